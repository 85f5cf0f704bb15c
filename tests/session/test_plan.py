"""The plan of a session: facts in, a plan or an error out. No session is opened."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import onnx.parser
import onnxruntime
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import DeviceNotFoundError, ProviderOptionError, ProviderRequestError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.requests import CHOSEN_OPTIONS, parse
from ortgpu.provider.runtime import Runtime
from ortgpu.provider.settings import CAPTURE, DIMENSIONS, THREADS
from ortgpu.session.plan import Plan, bind_gpu, bound_to, cpu_plan, fit_to_model, plan_of, why_untuned
from ortgpu.session.request import SessionRequest
from tests.support.made_facts import AVAILABLE, HEALTHY, UUID

CUDA, CPU, TENSORRT = "CUDAExecutionProvider", "CPUExecutionProvider", "TensorrtExecutionProvider"
DML = "DmlExecutionProvider"
MODULE: Any = SimpleNamespace(get_available_providers=lambda: list(AVAILABLE), __version__="1.31.1")
RUNTIME = Runtime(HEALTHY.environment.packages, MODULE, None)
GPUS = CudaState(
    0, tuple(CudaDevice(number, f"{UUID[:-1]}{number}", "NVIDIA H200", (9, 0), 1 << 30, 0) for number in range(2)), 1
)
SEARCH = "cudnn_conv_algo_search"


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def planned(providers: Any = None, provider_options: Any = None, *, gpus: CudaState = GPUS, **arguments: Any) -> Plan:
    request = SessionRequest("model.onnx", providers=parse(providers, provider_options), **arguments)
    return bind_gpu(plan_of(request, RUNTIME), gpus)


def options_in(plan: Plan) -> dict[str, dict[str, str]]:
    return dict(plan.provider_arguments() or [])


def test_without_a_wish_it_is_the_first_gpu_and_the_cpu_for_the_rest() -> None:
    plan = planned()
    assert plan.provider_arguments() == [(CUDA, {SEARCH: "HEURISTIC"}), (CPU, {})]
    assert (plan.gpu, plan.chosen) == (cast(Any, GPUS.devices)[0], CHOSEN_OPTIONS)


@pytest.mark.parametrize(
    ("providers", "names"),
    [
        ([CPU], (CUDA, CPU)),
        ([CPU, CUDA], (CUDA, CPU)),
        ([TENSORRT, CUDA], (TENSORRT, CUDA, CPU)),
        ([TENSORRT, CPU, CUDA], (CUDA, CPU)),  # all that is available
        ([CUDA, TENSORRT], (CUDA, TENSORRT, CPU)),
    ],
)
def test_cuda_comes_first_and_the_cpu_last(providers: list[str], names: tuple[str, ...]) -> None:
    assert planned(providers).providers.names == names


def test_the_cpu_stays_out_where_the_options_say_so() -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    assert planned(sess_options=options).providers.names == (CUDA,)


def test_what_the_caller_sets_is_not_chosen() -> None:
    plan = planned([CUDA], [{SEARCH: "DEFAULT", "enable_cudnn": 0}])
    assert options_in(plan)[CUDA] == {SEARCH: "DEFAULT", "enable_cudnn": "0"}
    assert plan.chosen == {}
    assert plan.cudnn_disabled
    assert planned(is_guarded=True).chosen == {}


@pytest.mark.parametrize(
    ("device", "providers", "bound"),
    [
        (None, [CUDA], {CUDA: None}),
        (1, [CUDA], {CUDA: "1"}),
        (f"{UUID[:-1]}1", [CUDA], {CUDA: "1"}),
        (None, [TENSORRT, CUDA], {TENSORRT: None, CUDA: None}),
        (None, [(TENSORRT, {"device_id": 1}), CUDA], {TENSORRT: "1", CUDA: "1"}),
        (None, [(TENSORRT, {"device_id": 1})], {TENSORRT: "1", CUDA: "1"}),
        (None, [TENSORRT, (CUDA, {"device_id": 1})], {TENSORRT: "1", CUDA: "1"}),
        ("cuda:1", [(TENSORRT, {"device_id": 1}), (CUDA, {"device_id": 1})], {TENSORRT: "1", CUDA: "1"}),
        (None, [(TENSORRT, {"device_id": 0}), CUDA], {TENSORRT: "0", CUDA: "0"}),
    ],
)
def test_a_gpu_that_is_named_once_holds_for_all(device: Any, providers: Any, bound: dict[str, str | None]) -> None:
    found = {name: options.get("device_id") for name, options in options_in(planned(providers, device=device)).items()}
    assert found == {**bound, CPU: None}


@pytest.mark.parametrize(
    ("device", "providers"),
    [
        (0, [(TENSORRT, {"device_id": 1}), CUDA]),
        (0, [(CUDA, {"device_id": 1})]),
        (None, [(TENSORRT, {"device_id": 1}), (CUDA, {"device_id": 0})]),
        (1, [(TENSORRT, {"device_id": 0}), (CUDA, {"device_id": 1})]),
    ],
)
def test_gpus_that_contradict_each_other_are_refused(device: Any, providers: Any) -> None:
    with pytest.raises(ProviderRequestError, match="different GPUs") as raised:
        planned(providers, device=device)
    assert "device_id=1 in the options of" in str(raised.value)


@pytest.mark.parametrize(("device", "ordinal"), [(None, 0), (1, 1), ("cuda:1", 1), ("auto", 0)])
def test_a_driver_that_lists_no_gpus(device: Any, ordinal: int) -> None:
    plan = planned(device=device, gpus=CudaState(0, None, 1))
    assert plan.gpu.ordinal == ordinal
    assert options_in(plan)[CUDA].get("device_id", "0") == str(ordinal)


@pytest.mark.parametrize("device", [2, "GPU-9", "cpu"])
def test_a_gpu_that_is_not_there(device: Any) -> None:
    with pytest.raises(DeviceNotFoundError):
        planned(device=device)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([DML],), ProviderRequestError),
        ((["CudaExecutionProvider"],), ProviderRequestError),
        (([CUDA], [{"prefer_nhwc": "yes"}]), ProviderOptionError),
    ],
)
def test_requests_that_this_build_cannot_meet(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        planned(*arguments)


CARRYING = SimpleNamespace(has_providers=lambda: True)


@pytest.mark.parametrize("arguments", [{"providers": [CUDA]}, {"cuda_graph": True}])
def test_options_that_carry_providers_bear_no_others(arguments: dict[str, Any]) -> None:
    with pytest.raises(ProviderRequestError, match="carry execution providers"):
        planned(**arguments, sess_options=CARRYING)


def test_options_that_carry_providers_are_passed_alone() -> None:
    plan = planned(sess_options=CARRYING)
    assert (plan.provider_arguments(), plan.chosen) == (None, {})
    assert bound_to(plan, 1, GPUS).gpu.ordinal == 1
    with pytest.raises(ProviderRequestError, match="different GPUs"):
        bound_to(planned(device=0, sess_options=CARRYING), 1, GPUS)


def test_a_capture_is_asked_for_in_a_stream() -> None:
    plan = planned(cuda_graph=True)
    in_stream = plan.replace_cuda_options({"user_compute_stream": "42"})
    assert options_in(in_stream)[CUDA] == {SEARCH: "HEURISTIC", "enable_cuda_graph": "1", "user_compute_stream": "42"}
    assert plan.captures
    assert not planned().captures
    assert not cpu_plan(plan.request).captures


@pytest.mark.parametrize("options", [{"enable_cuda_graph": False}, {"user_compute_stream": "1234"}])
def test_a_capture_that_the_options_contradict(options: Any) -> None:
    with pytest.raises(ProviderRequestError, match="contradict each other"):
        planned([CUDA], [options], cuda_graph=True)


def test_what_suits_the_model_can_be_left_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
    plan = planned()
    suited = fit_to_model(plan, (1, 31), GraphOutline(onnx.parser.parse_model(text).SerializeToString()))
    assert fit_to_model(plan, (1, 30), GraphOutline(b"no model")) == plan
    assert suited.chosen[THREADS][0] == "4"
    assert options_in(suited)[CUDA] == {SEARCH: "HEURISTIC", "enable_cudnn": "0"}
    assert not suited.cudnn_disabled  # which is about the caller's wish
    assert suited.without({THREADS, "enable_cudnn"}) == plan


def test_the_plan_for_the_cpu() -> None:
    plan = cpu_plan(SessionRequest("model.onnx", providers=parse([CUDA], None), device=1))
    assert (plan.provider_arguments(), plan.chosen) == ([(CPU, {})], {})


@pytest.mark.parametrize("value", ["0", "false", "False"])
def test_cudnn_is_off_however_the_option_says_it(value: str) -> None:
    assert planned([CUDA], [{"enable_cudnn": value}]).cudnn_disabled
    assert not planned([CUDA], [{"enable_cudnn": "1"}]).cudnn_disabled
    assert not planned().cudnn_disabled


def test_the_argument_outweighs_the_variable_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTGPU_MEMORY", "512MiB")
    assert planned().budget == 512 << 20
    assert planned(memory=1 << 29 | 1).budget == 1 << 29 | 1
    monkeypatch.delenv("ORTGPU_MEMORY")
    assert planned().budget is None


def test_a_part_of_memory_is_of_the_gpu_that_is_named() -> None:
    gpus = CudaState(0, tuple(replace(gpu, total_memory=(gpu.ordinal + 1) << 30) for gpu in GPUS.devices or ()), 1)
    for ordinal in (0, 1):
        plan = planned(memory=0.5, device=ordinal, gpus=gpus)
        assert plan.budget == (ordinal + 1) << 29
        assert int(plan.chosen["gpu_mem_limit"][0]) < plan.budget


def test_a_budget_that_nothing_keeps_is_refused_if_it_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderRequestError, match="cannot limit"):
        planned([TENSORRT, (CUDA, {"use_tf32": 0})], memory=1 << 30)
    monkeypatch.setenv("ORTGPU_MEMORY", "1GiB")
    assert planned([TENSORRT, (CUDA, {"use_tf32": 0})]).budget is None


def record(**settings: str) -> Any:
    """A record with these settings, measured with a batch of 8."""
    choice, measured = SimpleNamespace(settings=settings), SimpleNamespace(dimensions={"n": 8})
    return SimpleNamespace(choice=choice, record=measured, why="took 0.50 of the time")


def recorded(found: Any, providers: Any = None, **arguments: Any) -> dict[str, str]:
    plan = fit_to_model(planned(providers, **arguments), (1, 30), GraphOutline(b"no model"), found)
    return {name: value for name, (value, _) in plan.chosen.items() if name != SEARCH or value != "HEURISTIC"}


def test_a_record_sets_its_options_but_none_of_the_callers() -> None:
    found = record(layout="channels-last, biases fused", search="exhaustive", threads="few", shapes="fixed")
    assert recorded(found) == {
        "prefer_nhwc": "1",
        "fuse_conv_bias": "1",
        SEARCH: "EXHAUSTIVE",
        THREADS: "4",
        DIMENSIONS: '{"n": 8}',
    }
    ours = recorded(found, [(CUDA, {"prefer_nhwc": "0"})])
    assert {"prefer_nhwc", "fuse_conv_bias"}.isdisjoint(ours), "one option of a setting without the other may be wrong"
    assert ours[SEARCH] == "EXHAUSTIVE"
    captured = record(graph="captured")
    assert recorded(captured) == {CAPTURE: "1"}
    assert recorded(captured, [(CUDA, {"user_compute_stream": "7"})]) == {}
    assert recorded(found, is_guarded=True) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"tuned": False},
        {"is_guarded": True},
        {"sess_options": onnxruntime.SessionOptions()},
        {"others": {"disabled_optimizers": []}},
        {"providers": parse([(CUDA, {"use_tf32": 0})], None)},
        {"providers": parse([(CUDA, {"use_tf32": "False"})], None)},
        {"providers": parse([TENSORRT, CUDA], None)},
    ],
)
def test_a_request_that_says_more_uses_no_record(arguments: dict[str, Any]) -> None:
    assert why_untuned(SessionRequest("model.onnx", **arguments)) is not None


@pytest.mark.parametrize(
    "arguments", [{}, {"tuned": "now"}, {"providers": parse([(CUDA, {"use_tf32": 1}), CPU], None)}, {"device": 1}]
)
def test_any_other_request_may_use_one(arguments: dict[str, Any]) -> None:
    assert why_untuned(SessionRequest("model.onnx", **arguments)) is None
