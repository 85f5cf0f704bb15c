"""A session with ``memory=``: what it asks of ONNX Runtime, and what it does and says when the budget is reached.

The arena is ONNX Runtime's own, over libraries of CUDA that count memory and compute nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.sizes import parse_gpu_size
from ortgpu.session.budget import bytes_outside, room_in
from ortgpu.session.plan import bind_gpu, fit_to_model, plan_of
from ortgpu.session.request import SessionRequest
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.session.test_plan import RUNTIME
from tests.support.cpu_session import child
from tests.support.made_facts import UUID

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python

SETUP = """
import ctypes, threading, warnings
import numpy as np, onnx.parser, onnxruntime
from ortgpu import GPUSession
from ortgpu.running.cudart import runtime_on
MIB = 1 << 20
text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'
model = onnx.parser.parse_model(text).SerializeToString()
def of(mebibytes):
    return {"x": np.zeros((mebibytes, MIB // 4), np.float32)}
def outcome(action):
    try:
        return {"returned": repr(action())}
    except Exception as error:
        return {
            "type": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__,
            "requested": getattr(error, "requested", None),
        }
GPUSession(model).close()
device_bytes = runtime_on(0)._library.stub_device_bytes
device_bytes.restype = ctypes.c_size_t
"""

WITHIN = (
    SETUP
    + """
before = device_bytes()
session = GPUSession(model, memory="230MiB", pinned_memory_limit=0)
option = session.options_chosen["gpu_mem_limit"][0]
found, highest = [], 0
for size in (1, 20, 1, 26, 8, 200, 1, 24, 26):
    found.append(outcome(lambda: session.run(None, of(size))[0].shape))
    highest = max(highest, device_bytes() - before)
bound = session.io_binding()
value = onnxruntime.OrtValue.ortvalue_from_numpy(of(26)["x"])
bound.bind_cpu_input("x", of(24)["x"])
bound.bind_output("z")
by_binding = outcome(lambda: session.run_with_iobinding(bound))
del bound
by_value = outcome(lambda: session.run_with_ort_values(None, {"x": value})[0].shape())
kept = [session.run_on_device(None, of(20))[0]]
full = outcome(lambda: session.run(None, of(26)))
del kept
after = outcome(lambda: session.run(None, of(26))[0].shape)
memory = session.memory
session.close()
report({
    "option": option, "found": found, "highest": highest, "by_binding": by_binding, "by_value": by_value,
    "full": full, "after": after, "memory": [memory.budget, memory.arena], "left": device_bytes() - before,
})
"""
)


@pytest.fixture(scope="module")
def within(module_lab: Lab, provider_library: str) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    return module_lab.machine_that_places(provider_library).run(WITHIN).ok().json


def test_the_arena_may_hold_the_budget_without_what_lies_outside(within: Any) -> None:
    assert 64 * MIB <= int(within["option"]) < 230 * MIB
    assert within["highest"] <= int(within["option"])
    assert within["memory"][0] == 230 * MIB
    assert within["left"] == 0


def test_what_fits_alone_runs_whatever_ran_before(within: Any) -> None:
    """Without giving back, the regions that earlier inputs left would be in the way."""
    sizes = (1, 20, 1, 26, 8, 200, 1, 24, 26)
    failed = [size for size, outcome in zip(sizes, within["found"], strict=True) if "returned" not in outcome]
    assert failed == [200]
    assert "returned" in within["by_binding"]
    assert "returned" in within["by_value"]


def test_a_run_that_does_not_fit_names_the_budget_and_what_is_held(within: Any) -> None:
    refused = within["found"][5]
    assert (refused["type"], refused["cause"]) == ("GPUOutOfMemoryError", "Fail")
    assert refused["requested"] == 200 * MIB
    text = refused["text"]
    assert text.startswith("the session's budget of 230 MiB is reached: 200 MiB were asked for")
    assert "arena, with the weights" in text
    assert "raise memory=" in text


def test_values_that_the_caller_keeps_count_and_the_session_goes_on(within: Any) -> None:
    assert within["full"]["type"] == "GPUOutOfMemoryError"
    assert "returned" in within["after"]


OPENING = (
    SETUP
    + """
import os
from onnx import helper, numpy_helper
w = numpy_helper.from_array(np.zeros((4 * MIB,), np.float32), "w")
graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g",
    [helper.make_tensor_value_info("x", 1, [4 * MIB])], [helper.make_tensor_value_info("y", 1, [4 * MIB])], [w])
large = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
def limit(session):
    found = session.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"], session.memory.budget
    session.close()
    return [found[0], found[1]]
def with_options(options, **arguments):
    return GPUSession(model, providers=[("CUDAExecutionProvider", options)], **arguments)
shared = onnxruntime.SessionOptions()
shared.add_session_config_entry("session.use_env_allocators", "1")
found = {
    "none": limit(GPUSession(model)),
    "part": limit(GPUSession(model, memory=0.25)),
    "own": limit(with_options({"gpu_mem_limit": "123456789"}, memory="1GiB")),
    "small": outcome(lambda: GPUSession(large, memory="160MiB")),
    "shared": outcome(lambda: GPUSession(model, shared, memory="1GiB")),
    "external": outcome(lambda: with_options({"gpu_external_alloc": "4096"}, memory="1GiB")),
}
before = device_bytes()
outcome(lambda: GPUSession(large, memory="160MiB"))
found["left"] = device_bytes() - before
os.environ["ORTGPU_MEMORY"] = "2GiB"
found["variable"] = limit(GPUSession(model))
found["argument"] = limit(GPUSession(model, memory="1GiB"))
found["variable shared"] = limit(GPUSession(model, shared))
import ortgpu
with ortgpu.enforce():
    session = onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])
    found["guarded"] = session.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"]
os.environ["ORTGPU_MEMORY"] = "plenty"
found["wrong"] = outcome(lambda: GPUSession(model))
report(found)
"""
)


@pytest.fixture(scope="module")
def opening(module_lab: Lab, provider_library: str) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    return module_lab.machine_that_places(provider_library).run(OPENING).ok().json


def test_without_a_budget_nothing_is_limited(opening: Any) -> None:
    assert opening["none"] == [str(2**64 - 1), None]


def test_a_part_of_the_gpu_is_of_its_whole_memory(opening: Any) -> None:
    limit, budget = opening["part"]
    assert budget == (141 << 30) // 4
    assert budget - 512 * MIB < int(limit) < budget


def test_a_limit_of_the_caller_stays(opening: Any) -> None:
    assert opening["own"] == ["123456789", 1 << 30]


def test_a_model_that_needs_more_names_the_budget(opening: Any) -> None:
    refused = opening["small"]
    assert refused["type"] == "InsufficientDeviceMemoryError"
    assert refused["text"].startswith("this model does not open within memory=167772160 (160 MiB)")
    assert opening["left"] == 0


@pytest.mark.parametrize("name", ["shared", "external"])
def test_a_budget_that_cannot_be_kept_is_refused(opening: Any, name: str) -> None:
    assert opening[name]["type"] == "ProviderRequestError"
    assert opening[name]["text"].startswith("memory= cannot limit this session")


def test_a_variable_names_the_budget_of_all_sessions(opening: Any) -> None:
    assert opening["variable"][1] == 2 << 30
    assert opening["argument"][1] == 1 << 30
    assert opening["variable shared"] == [str(2**64 - 1), None], "no limit would keep it"
    assert (2 << 30) - 512 * MIB < int(opening["guarded"]) < 2 << 30
    assert opening["wrong"]["type"] == "ValueError"
    assert opening["wrong"]["text"].startswith("ORTGPU_MEMORY must be")


CONVOLUTION = """
<ir_version: 8, opset_import: ["": 17]> g (float[n, 64, {0}, {0}] x) => (float[n, 64, a, b] y)
<float[64, 64, 3, 3] w> {{ y = {1}(x, w) }}
"""


def arena_of(budget: str, text: str, **arguments: Any) -> tuple[int, str, int]:
    """Return the limit of the arena that is planned, its reason, and the bytes for the arena of plans."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 64, 3, 3), np.float32), "w"))
    request = SessionRequest("model.onnx", memory=budget, **arguments)
    gpus = CudaState(0, (CudaDevice(0, UUID, "NVIDIA H200", (9, 0), 1 << 40, 0),), 1)
    plan = bind_gpu(plan_of(request, RUNTIME), gpus)
    plan = fit_to_model(plan, (1, 31), GraphOutline(model.SerializeToString()))
    limit, why = plan.chosen["gpu_mem_limit"]
    assert plan.budget is not None
    return int(limit), why, room_in(plan.budget, limit, captures=plan.captures)


def test_captured_graphs_have_a_quarter_of_the_arena_and_one_run_at_a_time() -> None:
    for budget in ("400MiB", "2GiB"):
        size = parse_gpu_size("memory", budget)
        assert isinstance(size, int)
        whole = size - bytes_outside(size)
        limit, why, room = arena_of(budget, CONVOLUTION.format("w", "Conv"), cuda_graph=True)
        assert limit == whole - whole // 4
        assert why.endswith(f"and {whole // 4 // MIB} MiB for CUDA graphs")
        assert limit + room + bytes_outside(0) == size
        limit, _, room = arena_of(budget, CONVOLUTION.format("w", "Conv"), cuda_graph=True, shares_budget=False)
        assert (limit, room) == (whole, bytes_outside(size) - bytes_outside(0))


def test_plans_for_further_shapes_have_half_of_the_arena() -> None:
    whole = (2 << 30) - bytes_outside(2 << 30)
    limit, why, room = arena_of("2GiB", CONVOLUTION.format("w", "Conv"))
    assert limit == whole - whole // 2
    assert why.endswith(f"and {whole // 2 // MIB} MiB for plans of further shapes")
    assert 0 < room < whole // 2, "its session has memory outside of its arena, too"


@pytest.mark.parametrize(
    ("budget", "text", "arguments"),
    [
        ("2GiB", CONVOLUTION.format("w", "Add"), {}),
        ("2GiB", CONVOLUTION.format(8, "Conv").replace("[n,", "[1,"), {}),
        ("400MiB", CONVOLUTION.format("w", "Conv"), {}),
        ("2GiB", CONVOLUTION.format("w", "Conv"), {"shares_budget": False}),
        ("2GiB", CONVOLUTION.format("w", "Conv"), {"is_guarded": True}),
    ],
    ids=["no convolution", "one shape", "a small budget", "a run needed it", "guarded"],
)
def test_without_plans_the_whole_budget_is_the_sessions(budget: str, text: str, arguments: dict[str, Any]) -> None:
    limit, _, room = arena_of(budget, text, **arguments)
    size = parse_gpu_size("memory", budget)
    assert isinstance(size, int)
    assert (limit, room) == (size - bytes_outside(size), 0)


GIVEN_BACK = (
    SETUP
    + """
from ortgpu.session import failures
words = "while running Relu node. bfc_arena.cc Available memory of 60518144 is smaller than requested bytes of 67108864"
class Kept:
    def bytes_held(self): return 5
    def give_back(self): found["given back"] = True
found = {"given back": False}
session = GPUSession(model, memory="1GiB")
inner = session._sess
session._holdings.room = 5  # as if it had plans
session._holdings.add("plans", Kept())
def again():
    return [session._sess is not inner, session.memory.plans, session._holdings.room]
found["again"] = failures.call_again(session, RuntimeError(words), again)
found["shares"] = session._request.shares_budget
report(found)
"""
)


IN_TURNS = (
    SETUP
    + """
from ortgpu.running.pinned import memory_of
from ortgpu.session import failures
words = "while running Relu node. bfc_arena.cc Available memory of 60518144 is smaller than requested bytes of 67108864"
session = GPUSession(model, memory="230MiB")
turns, steps = session._holdings.turns, []
turns.take()  # as another run does
again = threading.Thread(
    target=lambda: failures.call_again(session, RuntimeError(words), lambda: steps.append("repeated")))
again.start()
again.join(0.5)
steps.append("the other run ends")
turns.give()
again.join(60)
failures._outdate(session)
inner = session._sess
memory = turns.run(lambda: memory_of(session))  # as a run does that copies in threads
report([steps, session._sess is inner, memory is session._pinned])
"""
)


def test_a_repeated_run_has_a_turn_and_no_run_opens_the_session_again(module_lab: Lab, provider_library: str) -> None:
    """Beside another run it would take a stream with handles, and opening again waits for the turns of all runs."""
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run(IN_TURNS).ok().json
    assert found == [["the other run ends", "repeated"], True, True]


CAPTURED = (
    SETUP
    + """
session = GPUSession(model, memory="400MiB", cuda_graph=True, pinned_memory_limit=0)
inner, found = session._sess, []
for size in (1, 70, 1):  # Three arrays of 70 MiB are more than three quarters of 250 MiB.
    found.append(outcome(lambda: session.run(None, of(size))[0].shape).get("text", "") or "returned")
    found.append([session._sess is inner, session._holdings.room, session._sess.captures])
report([*found, inner._inner is None])  # The budget had no room for two.
"""
)


def test_a_run_that_needs_the_part_of_the_graphs_gets_it(module_lab: Lab, provider_library: str) -> None:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run(CAPTURED).ok().json
    assert found == [
        "returned", [True, 62 * MIB + MIB // 2, 1], "returned", [False, 0, 0], "returned", [False, 0, 0], True
    ]  # fmt: skip


def test_plans_are_given_back_for_good_when_a_run_needs_their_part(module_lab: Lab, provider_library: str) -> None:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run(GIVEN_BACK).ok().json
    assert found == {"given back": True, "again": [True, 0, 0], "shares": False}


def test_arguments_are_checked_before_anything_is_opened() -> None:
    found = child(
        """
        wrong = [{"memory": 0}, {"memory": 1.5}, {"memory": "lots"}, {"memory": [1]}, {"pinned_memory_limit": "much"},
                 {"pinned_memory_limit": 0.5}, {"pinned_memory_limit": -1}]
        right = GPUSession(NEG, memory="1GiB", pinned_memory_limit="2MiB")
        report([[outcome(lambda each=each: GPUSession("missing.onnx", **each)) for each in wrong],
                right.pinned_empty(4).size, right._pinned_memory_limit, right.memory.budget])
        """
    )
    outcomes, *others = found
    assert [each["type"] for each in outcomes] == [
        "ValueError", "ValueError", "ValueError", "TypeError", "ValueError", "TypeError", "ValueError",
    ]  # fmt: skip
    assert [each["text"].partition(" ")[0] for each in outcomes] == ["memory"] * 4 + ["pinned_memory_limit"] * 3
    assert others == [4, 2 * MIB, None], "a session on the CPU has no budget of GPU memory"
