"""Programs of ``tests/session/test_drop_in.py``."""

from __future__ import annotations

import pickle
import threading
import warnings

import numpy as np
import onnx.parser
import onnxruntime

import ortgpu
from ortgpu import GPUSession
from tests.programs.machines import report

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


def a_provider_that_is_named_again() -> None:
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


def the_warning_of_a_provider_that_is_named_again_points_to_the_caller() -> None:
    seen = []
    for make in (GPUSession, guarded):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            make(RELU, None, [CUDA, CPU, CPU])
        seen.append([[each.filename, str(each.message)] for each in warned])
    report(seen)


def set_providers_with_other_options_of_cuda() -> None:
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


def set_providers_that_fails_changes_nothing() -> None:
    session = GPUSession(RELU, providers=[(CUDA, {"gpu_mem_limit": 64 * MIB})], allow_cpu=True)
    before = dict(vars(session))
    found = {}
    for request in (
        [CPU],
        [CPU, CPU],
        ["OpenVINOExecutionProvider", CPU],
        ["cuda"],
        CUDA,
        [(CUDA, {"devise_id": 0})],
        [(CUDA, {"device_id": 5})],
    ):
        came = outcome(lambda: session.set_providers(request))
        after = vars(session)
        same = sorted(before) == sorted(after) and all(after[name] is before[name] for name in before)
        found[str(request)] = [came, bound(session), same, session.run(None, {"x": np.ones(4, np.float32)})[0].shape]
    report(list(found.values()))


def set_providers_gives_up_the_session_before() -> None:
    import gc
    import weakref

    session = GPUSession(RELU)
    before = weakref.ref(session._sess)
    session.set_providers([CUDA])
    gc.collect()
    report([before() is None, pickle.loads(pickle.dumps(session)).get_providers()])


def what_set_providers_advises_for_a_name_that_nobody_has() -> None:
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


def an_entry_of_the_callers_options_is_written_once() -> None:
    KEY = "session.record_ep_graph_assignment_info"

    def entry(options):
        return outcome(lambda: options.get_session_config_entry(KEY))

    seen = {}
    for name in ("ours", "guarded"):
        make = MAKERS[name]
        for given in (None, "0", "1"):
            options = onnxruntime.SessionOptions()
            if given is not None:
                options.add_session_config_entry(KEY, given)
            made = [make(RELU, options) for _ in range(2)]  # the second meets what the first left
            made[0].set_providers([CUDA])
            seen[f"{name}, {given}"] = [entry(options), *(each.placement.known for each in made)]

    options = onnxruntime.SessionOptions()
    seen["refused"] = [outcome(lambda: GPUSession(b"no model", options)), entry(options)]
    on_cpu = GPUSession(RELU, options, device="cpu", allow_cpu=True)
    seen["on the cpu"] = [entry(options), on_cpu.placement.known]
    arrived = pickle.loads(pickle.dumps(GPUSession(RELU, onnxruntime.SessionOptions)))
    seen["sent"] = arrived.placement.known

    made = []
    threads = [
        threading.Thread(target=lambda: made.extend(GPUSession(RELU, options) for _ in range(5))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen["in threads"] = [len(made), all(each.placement.known for each in made), entry(options)]
    report(seen)
