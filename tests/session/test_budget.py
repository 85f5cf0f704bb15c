"""A session with ``memory=``: what it asks of ONNX Runtime, and what it does and says when the budget is reached.

The arena is ONNX Runtime's own, over libraries of CUDA that count memory and compute nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnxruntime
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import GPUOutOfMemoryError, InsufficientDeviceMemoryError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.requests import parse
from ortgpu.provider.sizes import parse_gpu_size
from ortgpu.session.budget import (
    OUTSIDE,
    choose_limits,
    exceeded,
    holdings_within,
    room_in,
    share_with_plans,
    too_small,
    why_not_limited,
)
from ortgpu.session.plan import bind_gpu, fit_to_model, plan_of
from ortgpu.session.request import SessionRequest
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.session.test_plan import RUNTIME
from tests.support.cpu_session import child
from tests.support.made_facts import UUID
from tests.support.made_sessions import made_session

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python


WITHIN = "session.budget.within"


@pytest.fixture(scope="module")
def within(module_lab: Lab, provider_library: str) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    return module_lab.machine_that_places(provider_library).run_program(WITHIN).ok().json


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


OPENING = "session.budget.opening"


@pytest.fixture(scope="module")
def opening(module_lab: Lab, provider_library: str) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    return module_lab.machine_that_places(provider_library).run_program(OPENING).ok().json


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
        whole = size - OUTSIDE
        limit, why, room = arena_of(budget, CONVOLUTION.format("w", "Conv"), cuda_graph=True)
        assert limit == whole - whole // 4
        assert why.endswith(f"and {whole // 4 // MIB} MiB for CUDA graphs")
        assert limit + room + OUTSIDE == size
        limit, _, room = arena_of(budget, CONVOLUTION.format("w", "Conv"), cuda_graph=True, shares_budget=False)
        assert (limit, room) == (whole, 0)


def test_plans_for_further_shapes_have_half_of_the_arena() -> None:
    whole = (2 << 30) - OUTSIDE
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
    assert (limit, room) == (size - OUTSIDE, 0)


GIVEN_BACK = "session.budget.given_back"


IN_TURNS = "session.budget.in_turns"


def test_a_repeated_run_has_a_turn_and_no_run_opens_the_session_again(module_lab: Lab, provider_library: str) -> None:
    """Beside another run it would take a stream with handles, and opening again waits for the turns of all runs."""
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run_program(IN_TURNS).ok().json
    assert found == [["the other run ends", "repeated"], True, True]


CAPTURED = "session.budget.captured"


def test_a_run_that_needs_the_part_of_the_graphs_gets_it(module_lab: Lab, provider_library: str) -> None:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run_program(CAPTURED).ok().json
    assert found == [
        "returned", [True, 62 * MIB + MIB // 2, 1], "returned", [False, 0, 0], "returned", [False, 0, 0], True
    ]  # fmt: skip


def test_plans_are_given_back_for_good_when_a_run_needs_their_part(module_lab: Lab, provider_library: str) -> None:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    found = module_lab.machine_that_places(provider_library).run_program(GIVEN_BACK).ok().json
    assert found == {"given back": True, "again": [True, 0, 0], "shares": False}


def test_arguments_are_checked_before_anything_is_opened() -> None:
    found = child("session.budget_arguments.arguments_are_checked_before_anything_is_opened")
    outcomes, *others = found
    assert [each["type"] for each in outcomes] == [
        "ValueError", "ValueError", "ValueError", "TypeError", "ValueError", "TypeError", "ValueError",
    ]  # fmt: skip
    assert [each["text"].partition(" ")[0] for each in outcomes] == ["memory"] * 4 + ["pinned_memory_limit"] * 3
    assert others == [4, 2 * MIB, None], "a session on the CPU has no budget of GPU memory"


# The arithmetic of a budget

GIB = 1 << 30
CUDA = "CUDAExecutionProvider"


@pytest.mark.parametrize("budget", [1, 4 * GIB, 100 * GIB])
def test_a_session_with_a_budget_makes_one_run_at_a_time_also_once_it_is_opened_again(budget: int) -> None:
    """All runs share the handles of one stream."""
    first = holdings_within(budget, {}, {}, None, captures=False)
    assert first.turns is not None
    assert holdings_within(budget, {}, {}, first, captures=False).turns is first.turns, "runs may wait for it"


@pytest.mark.parametrize("budget", [200 << 20, GIB, 8 * GIB])
def test_the_arena_leaves_room_for_what_lies_outside(budget: int) -> None:
    limits = choose_limits(budget, ())
    assert int(limits["gpu_mem_limit"][0]) == budget - OUTSIDE > 0
    assert limits["arena_extend_strategy"][0] == "kSameAsRequested"
    assert limits["use_ep_level_unified_stream"][0] == "1"


def test_a_budget_too_small_for_anything_is_still_a_limit() -> None:
    """0 bytes would mean no limit."""
    assert int(choose_limits(1, ())["gpu_mem_limit"][0]) == 1 << 20


@pytest.mark.parametrize("own", ["gpu_mem_limit", "arena_extend_strategy", "use_ep_level_unified_stream"])
def test_what_the_caller_set_stays(own: str) -> None:
    both = choose_limits(GIB, ())
    assert {*choose_limits(GIB, {own: "x"})} == {*both} - {own}
    assert choose_limits(GIB, both) == {}


def test_plans_get_half_of_the_arena_where_they_have_room() -> None:
    limits = choose_limits(4 * GIB, ())
    shared = share_with_plans(limits["gpu_mem_limit"], 100 << 20)
    arena, whole = int(shared["gpu_mem_limit"][0]), int(limits["gpu_mem_limit"][0])
    assert whole // 2 <= arena <= whole // 2 + 1
    assert room_in(4 * GIB, shared["gpu_mem_limit"][0], captures=False) == whole - arena - OUTSIDE
    assert share_with_plans(limits["gpu_mem_limit"], whole // 4) == {}, "they hold the weights once more"
    assert share_with_plans(limits["gpu_mem_limit"], None) == {}
    assert room_in(4 * GIB, limits["gpu_mem_limit"][0], captures=False) == 0
    assert room_in(4 * GIB, None, captures=False) == 0, "the caller set the limit"


def test_a_budget_that_nothing_would_keep() -> None:
    shared, own = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    shared.add_session_config_entry("session.use_env_allocators", "1")
    own.add_session_config_entry("session.use_env_allocators", "0")
    for providers in ([CUDA], [CUDA, "CPUExecutionProvider"], None):
        for options in (None, own):
            assert why_not_limited(parse(providers, None), options) is None
        assert "share an arena" in str(why_not_limited(parse(providers, None), shared))
    assert "TensorrtExecutionProvider" in str(why_not_limited(parse(["TensorrtExecutionProvider", CUDA], None), None))
    for value, is_own in (("0", False), ("140000000", True)):
        reason = why_not_limited(parse([(CUDA, {"gpu_external_alloc": value})], None), None)
        assert (reason is not None) is is_own


@pytest.mark.parametrize(("budget", "words"), [(GIB, "1,024 MiB"), (512 << 20, "512 MiB")])
def test_errors_of_a_budget_tell_it_in_mebibytes(budget: int, words: str) -> None:
    small = too_small(InsufficientDeviceMemoryError("no room", requested=1, free=2, total=3), budget)
    assert small.summary == f"this model does not open within memory={budget} ({words})"
    assert (small.requested, small.free, small.total) == (1, 2, 3)
    reached = exceeded(GPUOutOfMemoryError("out of memory", requested=3 << 20), made_session(budget=budget), budget)
    assert reached.summary == f"the session's budget of {words} is reached: 3 MiB were asked for"
    assert reached.evidence[1].split() == ["budget", words.replace(" MiB", ".0"), "MiB"]
