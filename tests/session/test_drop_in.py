"""What works with plain ONNX Runtime works with a GPUSession too, on a machine where sessions open on a GPU.

The CUDA provider is the real one, over libraries of CUDA that compute nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.installed import PLACES, older_than
from tests.support.children import Child

PRELUDE = """
import contextlib, copy, pickle, threading, warnings
import numpy as np, onnx.parser, onnxruntime
import ortgpu
from ortgpu import GPUSession
ortgpu.preload()  # for plain sessions

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
MIB = 1 << 20
text = '<ir_version: 8, opset_import: ["": 17]> {} (float[n] x) => (float[n] y) {{ y = {}(x) }}'
RELU = onnx.parser.parse_model(text.format("relu", "Relu")).SerializeToString()

def plain(model, options=None, providers=(CUDA, CPU), *others):
    return onnxruntime.InferenceSession(model, options, providers, *others)

def guarded(*arguments):
    with ortgpu.enforce():
        return plain(*arguments)

MAKERS = {"plain": plain, "ours": GPUSession, "guarded": guarded}

def outcome(action):
    try:
        return action()
    except Exception as error:
        return type(error).__name__

def bound(session):
    return [session.get_providers(), session.get_provider_options().get(CUDA, {}).get("gpu_mem_limit")]
"""


@pytest.fixture(scope="module")
def machine(module_lab: Lab, provider_library: str) -> Machine:
    return module_lab.machine_that_places(provider_library)


@pytest.fixture
def run(machine: Machine) -> Any:
    def start(code: str, on: Machine = machine) -> Any:
        result: Child = on.run(f"{PRELUDE}\n{code}").ok()
        return result.json

    return start


def test_a_provider_that_is_named_again(run: Any) -> None:
    found = run("""
limits = [{"gpu_mem_limit": size * MIB} for size in (64, 128)]
requests = {
    "cpu twice": [[CUDA, CPU, CPU]],
    "cuda twice": [[CUDA, CUDA]],
    "with options": [[(CUDA, limits[0]), (CUDA, limits[1]), CPU]],
    "options beside": [[CUDA, CUDA, CPU], [*limits, {}]],
}
seen = {}
for name, request in requests.items():
    seen[name] = {}
    for maker, make in MAKERS.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            session = make(RELU, None, *request)
        # ONNX Runtime adds the CPU, so a list without it comes out with it as well
        seen[name][maker] = [bound(session), len(warned)]
report(seen)
""")
    for name, made in found.items():
        assert made["ours"] == made["guarded"] == made["plain"], name
        assert made["ours"][1] == 1, "one warning"
    assert found["with options"]["ours"][0][1] == str(64 << 20), "the first counts"


def test_the_warning_of_a_provider_that_is_named_again_points_to_the_caller(run: Any) -> None:
    found = run("""
seen = []
for make in (GPUSession, guarded):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make(RELU, None, [CUDA, CPU, CPU])
    seen.append([[each.filename, str(each.message)] for each in warned])
report(seen)
""")
    assert found == [[["<string>", "CPUExecutionProvider is named more than once: the first counts"]]] * 2


# set_providers


def test_set_providers_with_other_options_of_cuda(run: Any) -> None:
    found = run("""
class Derived(GPUSession):
    def __init__(self, note):
        super().__init__(RELU, cpu_nodes="forbid", pinned_memory_limit=8 * MIB)
        self.note = note

seen = {}
for name, make in {**MAKERS, "derived": Derived}.items():
    session = make("mine") if name == "derived" else make(RELU)
    session.mine = [name]
    before = bound(session)
    session.set_providers([(CUDA, {"gpu_mem_limit": 64 * MIB})])
    inside = [bound(session)]
    session.set_providers([CUDA, CPU], [{"gpu_mem_limit": 32 * MIB}, {}])
    inside.append(bound(session))
    session.set_providers()
    seen[name] = [before[0], *inside, session.get_providers()[-1], session.mine]
    if name != "plain":
        assert str(session.device).startswith("cuda:0"), session.device
        seen[name].append(sum(record.model == "<bytes>" for record in ortgpu.sessions()))
    if name == "derived":
        request = session.__reduce__()[1][1]
        seen["kept"] = [session.note, request["cpu_nodes"], request["pinned_memory_limit"], request["allow_cpu"]]
    del session
report(seen)
""")
    first, second = [["CUDAExecutionProvider", "CPUExecutionProvider"], str(64 << 20)], str(32 << 20)
    for name in ("plain", "ours", "guarded", "derived"):
        before, one, two, last, mine, *listed = found[name]
        assert before == first[0]
        assert (one, two) == (first, [first[0], second])
        assert last == "CPUExecutionProvider"
        assert mine == [name]
        assert listed in ([], [1]), "one session, listed once"
    assert found["kept"] == ["mine", "forbid", 8 << 20, None]


def test_set_providers_that_fails_changes_nothing(run: Any) -> None:
    found = run("""
session = GPUSession(RELU, providers=[(CUDA, {"gpu_mem_limit": 64 * MIB})], allow_cpu=True)
before = dict(vars(session))
found = {}
for request in ([CPU], [CPU, CPU], ["OpenVINOExecutionProvider", CPU], ["cuda"], CUDA, [(CUDA, {"devise_id": 0})],
                [(CUDA, {"device_id": 5})]):
    came = outcome(lambda: session.set_providers(request))
    after = vars(session)
    same = sorted(before) == sorted(after) and all(after[name] is before[name] for name in before)
    found[str(request)] = [came, bound(session), same, session.run(None, {"x": np.ones(4, np.float32)})[0].shape]
report(list(found.values()))
""")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    errors = ["ProviderRequestError"] * 5 + ["ProviderOptionError", "DeviceNotFoundError"]
    assert found == [[error, [providers, str(64 << 20)], True, [4]] for error in errors]


@pytest.mark.parametrize("allowed", [True, None])
def test_set_providers_never_moves_a_session_to_the_cpu(run: Any, machine: Machine, allowed: bool | None) -> None:
    """Neither with allow_cpu nor with its variable: the session that is there works on."""
    found = run(
        f"""
from unittest import mock
session = GPUSession(RELU, allow_cpu={allowed})
native = session._sess
from ortgpu.session import plan
with mock.patch.object(plan, "choose_visible", side_effect=ortgpu.NoDeviceError("the GPU is gone")):
    came = outcome(lambda: session.set_providers([CUDA]))
report([came, session._sess is native, str(session.device).partition(" ")[0], session._request.allow_cpu])
""",
        machine.but(env={**machine.env, "ORTGPU_ALLOW_CPU": "1"}),
    )
    assert found == ["NoDeviceError", True, "cuda:0", allowed]


def test_set_providers_gives_up_the_session_before(run: Any) -> None:
    found = run("""
import gc, weakref
session = GPUSession(RELU)
before = weakref.ref(session._sess)
session.set_providers([CUDA])
gc.collect()
report([before() is None, pickle.loads(pickle.dumps(session)).get_providers()])
""")
    assert found == [True, ["CUDAExecutionProvider", "CPUExecutionProvider"]]


# The caller's SessionOptions


@pytest.mark.skipif(older_than(PLACES) is not None, reason=older_than(PLACES) or "")
def test_an_entry_of_the_callers_options_is_written_once(machine: Machine) -> None:
    """ONNX Runtime logs a warning for each entry that is written again, to take it back as well."""
    result = machine.run(f"""{PRELUDE}
KEY = "session.record_ep_graph_assignment_info"

def entry(options):
    return outcome(lambda: options.get_session_config_entry(KEY))

seen = {{}}
for name in ("ours", "guarded"):
    make = MAKERS[name]
    for given in (None, "0", "1"):
        options = onnxruntime.SessionOptions()
        if given is not None:
            options.add_session_config_entry(KEY, given)
        made = [make(RELU, options) for _ in range(2)]  # the second meets what the first left
        made[0].set_providers([CUDA])
        seen[f"{{name}}, {{given}}"] = [entry(options), *(each.placement.known for each in made)]

options = onnxruntime.SessionOptions()
seen["refused"] = [outcome(lambda: GPUSession(b"no model", options)), entry(options)]
on_cpu = GPUSession(RELU, options, device="cpu", allow_cpu=True)
seen["on the cpu"] = [entry(options), on_cpu.placement.known]
arrived = pickle.loads(pickle.dumps(GPUSession(RELU, onnxruntime.SessionOptions)))
seen["sent"] = arrived.placement.known

made = []
threads = [threading.Thread(target=lambda: made.extend(GPUSession(RELU, options) for _ in range(5))) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
seen["in threads"] = [len(made), all(each.placement.known for each in made), entry(options)]
report(seen)
""").ok()
    found = result.json
    assert "will be overwritten" not in result.stderr
    for name in ("ours", "guarded"):
        assert found[f"{name}, None"] == ["1", True, True]
        assert found[f"{name}, 0"] == ["0", False, False]
        assert found[f"{name}, 1"] == ["1", True, True]
    assert found["refused"] == ["InvalidProtobuf", "1"]
    assert found["on the cpu"] == ["1", True]
    assert found["sent"] is True
    assert found["in threads"] == [20, True, "1"]


def test_what_set_providers_advises_for_a_name_that_nobody_has(run: Any) -> None:
    """Executed: without it the session is opened again, and with a name that was misspelt, with the right one."""
    found = run("""
session = GPUSession(RELU, allow_cpu=True)
said = []
for wrong in (["InvalidProvider"], ["CUDAExecutionProvidr"]):
    try:
        session.set_providers(wrong)
    except ortgpu.ProviderRequestError as error:
        said += map(str, error.fixes)
session.set_providers([])
session.set_providers(["CUDAExecutionProvider"])
report([said, bound(session)[0]])
""")
    assert found[0] == ["leave 'InvalidProvider' out", "write 'CUDAExecutionProvider'"]
    assert found[1] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
