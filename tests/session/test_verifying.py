"""What is verified once ONNX Runtime has opened a session: its providers, its GPU, the nodes on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import onnx.parser
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.libraries.catalogue import stem_of
from ortgpu.environment.libraries.wheel import Architecture
from ortgpu.errors import PlacementError, ProviderFallbackError, ProviderOptionError, ProviderRequestError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.devices import Device
from ortgpu.provider.placement import CPUNodesWarning, PlacedNode, Placement
from ortgpu.provider.preloading import MissingLibrary
from ortgpu.provider.requests import CPUNodes, ProviderList
from ortgpu.provider.settings import LIMIT
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session import verifying
from ortgpu.session.plan import Opened, Plan
from ortgpu.session.request import SessionRequest
from ortgpu.session.undiagnosed import UndiagnosedError
from ortgpu.session.verifying import check_cpu_nodes, check_libraries_of_nodes, verify, verify_plan
from tests.support.made_facts import SEEN_HEALTHY

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
GPUS = tuple(
    CudaDevice(number, f"GPU-{number}", f"NVIDIA {name}", capability, memory, 0)
    for number, (name, capability, memory) in enumerate([("H200", (9, 0), 141 << 30), ("L4", (8, 9), 24 << 30)])
)
ASKED = CudaState(0, None, 1)  # which lists no devices, so nobody asks for a context
RUNTIME = cast(Any, None)  # of no use where no diagnosis is made
ON_CPU = Placement((PlacedNode("a", "Unique", "", CPU, "compute"), PlacedNode("b", "Relu", "", CUDA, "compute")))
SHAPES_ON_CPU = Placement((PlacedNode("a", "Gather", "", CPU, "shape"), PlacedNode("b", "Relu", "", CUDA, "compute")))


class Bound(InferenceSession):  # type: ignore[misc]  # ONNX Runtime ships no types
    """An open session as ONNX Runtime reports it: what a C++ session would answer."""

    def __init__(self, providers: list[str], options: dict[str, dict[str, str]]) -> None:
        self._providers, self._provider_options = providers, options


def verified(bound: list[str], ordinal: str, *, planned: int = 0, **changes: Any) -> Plan:
    request = SessionRequest("model.onnx", **changes)
    plan = Plan(request, ProviderList((CUDA, CPU)), device=planned, gpu=GPUS[planned])
    session = Bound(bound, {CUDA: {"device_id": ordinal}, CPU: {}})
    return verify_plan(cast(Any, session), plan, RUNTIME, ASKED)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_session_on_the_gpu_that_was_asked_for_holds(ordinal: int) -> None:
    assert verified([CUDA, CPU], str(ordinal), planned=ordinal).gpu == GPUS[ordinal]


@pytest.mark.parametrize(("asked", "bound"), [(0, 1), (1, 0)])
def test_a_session_on_another_gpu_than_asked_for_is_refused(asked: int, bound: int) -> None:
    with pytest.raises(ProviderFallbackError, match=f"bound cuda:{bound} and cuda:{asked} was asked for"):
        verified([CUDA, CPU], str(bound), planned=asked)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("bound", [[CPU], [CPU, CUDA], ["DmlExecutionProvider", CPU]])
def test_a_session_without_cuda_before_the_cpu_is_refused(bound: list[str], guarded: bool) -> None:
    with pytest.raises((ProviderFallbackError, UndiagnosedError)):
        verified(bound, "0", is_guarded=guarded)


def checked_nodes(placement: Placement, cpu_nodes: CPUNodes) -> list[str]:
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        check_cpu_nodes(object(), placement, cpu_nodes)
    assert all(each.category is CPUNodesWarning for each in issued)
    return [str(each.message) for each in issued]


def test_nodes_that_compute_on_the_cpu_are_warned_of() -> None:
    (text,) = checked_nodes(ON_CPU, "warn")
    assert "Unique" in text
    assert checked_nodes(ON_CPU, "allow") == []
    with pytest.raises(PlacementError):
        checked_nodes(ON_CPU, "forbid")


@pytest.mark.parametrize("cpu_nodes", ["warn", "allow", "forbid"])
def test_nodes_that_handle_shapes_may_be_on_the_cpu(cpu_nodes: CPUNodes) -> None:
    assert checked_nodes(SHAPES_ON_CPU, cpu_nodes) == []


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs with a context of this process. All GPUs are visible."""
    active = [0, 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(verifying, "context_is_active", lambda ordinal: ordinal in active)
    return active


LISTED = CudaState(0, GPUS, 1)


def bound_plan(
    options: dict[str, str], *, planned: int | None = 0, cuda: CudaState = LISTED, chosen: Any = None, **changes: Any
) -> Plan:
    carried, memory = changes.pop("providers_in_options", False), changes.pop("budget", None)
    request = SessionRequest("model.onnx", **changes)
    gpu = {} if planned is None else {"gpu": GPUS[planned]}
    plan = Plan(
        request,
        ProviderList((CUDA, CPU)),
        planned,
        providers_in_options=carried,
        budget=memory,
        chosen=chosen or {},
        **gpu,
    )
    return verify_plan(cast(Any, Bound([CUDA, CPU], {CUDA: options, CPU: {}})), plan, RUNTIME, cuda)


def test_a_gpu_without_a_context_of_this_process_is_refused(contexts: list[int]) -> None:
    contexts.remove(1)
    assert bound_plan({"device_id": "0"}).gpu == GPUS[0]
    with pytest.raises(ProviderFallbackError, match="no CUDA context there"):
        bound_plan({"device_id": "1"}, planned=1)


def test_providers_in_another_order_are_refused() -> None:
    plan = Plan(SessionRequest("model.onnx"), ProviderList((CUDA, CPU)), gpu=GPUS[0])
    session = Bound([CPU, CUDA], {CUDA: {"device_id": "0"}, CPU: {}})
    with pytest.raises(ProviderFallbackError, match="other providers"):
        verify_plan(cast(Any, session), plan, RUNTIME, ASKED)


CHOSEN = {"enable_cudnn": ("0", "small"), "cudnn_conv_algo_search": ("HEURISTIC", "sooner"), "map_depth": ("2", "x")}


def test_what_the_provider_ignores_is_not_called_chosen() -> None:
    """A plugin of 1.31.1 leaves enable_cudnn on."""
    options = {"device_id": "0", "enable_cudnn": "1", "cudnn_conv_algo_search": "HEURISTIC"}
    assert {*bound_plan(options, chosen=CHOSEN).chosen} == {"cudnn_conv_algo_search", "map_depth"}
    assert bound_plan({**options, "enable_cudnn": "0"}, chosen=CHOSEN).chosen == CHOSEN


def test_a_budget_that_the_provider_ignores_is_none() -> None:
    limited: dict[str, Any] = {"chosen": {LIMIT: ("1000", "memory")}, "budget": 2000}
    assert bound_plan({LIMIT: "1000"}, **limited).budget == 2000
    plan = bound_plan({LIMIT: "9999"}, **limited)
    assert (plan.budget, dict(plan.chosen)) == (None, {})
    with pytest.raises(ProviderRequestError, match="cannot limit"):
        bound_plan({LIMIT: "9999"}, memory=2000, **limited)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_providers_in_the_options_show_their_gpu(ordinal: int) -> None:
    options = {"device_id": str(ordinal)}
    assert bound_plan(options, planned=None, providers_in_options=True).gpu == GPUS[ordinal]
    assert bound_plan(options, planned=ordinal, providers_in_options=True).gpu == GPUS[ordinal]
    with pytest.raises(ProviderRequestError, match="different GPUs"):
        bound_plan(options, planned=1 - ordinal, providers_in_options=True)


def test_options_whose_providers_lack_cuda_are_refused() -> None:
    plan = Plan(SessionRequest("model.onnx"), ProviderList((CUDA, CPU)), providers_in_options=True)
    with pytest.raises(ProviderRequestError, match="leave this session on the CPU"):
        verify_plan(cast(Any, Bound([CPU], {CPU: {}})), plan, RUNTIME, ASKED)


# Libraries that nodes need

CODE_FOR_HOPPER = (Architecture(9, 0, False, False),)
CONV = Placement((PlacedNode("c", "Conv", "", CUDA, "compute"),))
RELU = Placement((PlacedNode("r", "Relu", "", CUDA, "compute"),))
RFFT = Placement((PlacedNode("f", "Rfft", "com.microsoft", CUDA, "compute"),))
MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> conv (float[1,1,n] x) => (float[1,1,m] y)'
    " <float[1,1,1] w = {1.0}> { y = Conv(x, w) }"
).SerializeToString()


def checked_libraries(
    monkeypatch: pytest.MonkeyPatch,
    placement: Placement,
    *,
    gpu: CudaDevice = GPUS[0],
    options: Any = None,
    **report: Any,
) -> frozenset[str]:
    """Check the libraries of nodes. Return the stems that were loaded for them."""
    assert SEEN_HEALTHY.observed.preload is not None
    loaded: list[frozenset[str]] = [frozenset()]
    healthy = {"cudnn_mixed": (), **report}
    runtime: Any = SimpleNamespace(preload=replace(SEEN_HEALTHY.observed.preload, **healthy))

    def load(stems: frozenset[str]) -> Any:
        loaded.append(stems)
        return runtime

    monkeypatch.setattr(verifying, "load_lazily_opened", load)
    monkeypatch.setattr(verifying, "_read_architectures_once", lambda _: CODE_FOR_HOPPER)
    plan = Plan(SessionRequest("model.onnx"), ProviderList((CUDA, CPU), {CUDA: options or {}}), gpu=gpu)
    assert check_libraries_of_nodes(plan, placement, runtime, ASKED, GraphOutline(MODEL)) is runtime
    return loaded[-1]


def test_libraries_are_loaded_for_the_nodes_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_libraries(monkeypatch, RELU) == frozenset()
    conv, rfft = checked_libraries(monkeypatch, CONV), checked_libraries(monkeypatch, RFFT)
    assert {"libcudnn", "libcudnn_cnn", "libcudnn_graph", "libnvrtc"} <= conv
    assert rfft == {"libcufft", "libnvJitLink"}
    everything = checked_libraries(monkeypatch, replace(RELU, known=False))
    assert conv | rfft < everything
    assert "libcudnn_adv" in everything - conv
    lstm = Placement((PlacedNode("l", "LSTM", "", CUDA, "compute"),))
    assert "libcudnn_adv" in checked_libraries(monkeypatch, lstm)


def without_library(stem: str) -> dict[str, Any]:
    assert SEEN_HEALTHY.observed.preload is not None
    libraries = SEEN_HEALTHY.observed.preload.libraries
    return {"libraries": tuple(each for each in libraries if stem_of(each.soname) != stem)}


LACKS: dict[str, tuple[Placement, dict[str, Any]]] = {
    "cuDNN": (CONV, without_library("libcudnn")),
    "a part of cuDNN": (CONV, {"missing": (MissingLibrary("libcudnn_cnn.so.9", False, None, ()),)}),
    "one release of cuDNN": (CONV, {"cudnn_mixed": ("/a/libcudnn.so.9", "/b/libcudnn_cnn.so.9")}),
    "cuFFT": (RFFT, without_library("libcufft")),
    "code for this GPU in cuDNN": (CONV, {"gpu": CudaDevice(0, "GPU-0", "NVIDIA V100", (7, 0), 16 << 30, 0)}),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_nodes_lack_is_told_when_the_session_opens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime since 1.28 binds CUDA without it, and the first run fails."""
    placement, lacks = LACKS[name]
    with pytest.raises(UndiagnosedError) as raised:
        checked_libraries(monkeypatch, placement, **lacks)
    assert raised.value.operators == placement.placed_on(CUDA)
    checked_libraries(monkeypatch, RELU, **lacks)


def test_a_convolution_with_cudnn_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderOptionError, match="enable_cudnn is 0"):
        checked_libraries(monkeypatch, CONV, options={"enable_cudnn": "0"})
    checked_libraries(monkeypatch, RELU, options={"enable_cudnn": "0"})


def test_a_verified_session_has_the_facts_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[None] = []
    monkeypatch.setattr(verifying, "check_libraries_of_nodes", lambda plan, placement, runtime, *_: runtime)
    monkeypatch.setattr(verifying, "read_driver_version", lambda: "580.65.06")
    monkeypatch.setattr(verifying, "note_session", lambda: noted.append(None))
    runtime: Any = SimpleNamespace(preload=None)
    for ordinal, gpu in enumerate(GPUS):
        chosen = {LIMIT: ("1000", "memory")}
        plan = Plan(SessionRequest("m"), ProviderList((CUDA, CPU)), ordinal, gpu=gpu, budget=2000, chosen=chosen)
        session: Any = Bound([CUDA, CPU], {CUDA: {"device_id": str(ordinal), LIMIT: "1000"}, CPU: {}})
        facts = verify(session, Opened(plan, RELU, runtime, LISTED), GraphOutline(MODEL))
        assert facts.device == Device(
            "cuda", ordinal, gpu.uuid, gpu.name, gpu.compute_capability, gpu.total_memory, "580.65.06"
        )
        assert (facts.placement, facts.options_chosen, facts.budget) == (RELU, chosen, 2000)
    assert len(noted) == 2
    session = Bound([CUDA, CPU], {CUDA: {"device_id": "0"}, CPU: {}})
    plan = Plan(SessionRequest("m", cpu_nodes="forbid"), ProviderList((CUDA, CPU)), gpu=GPUS[0])
    with pytest.raises(PlacementError):
        verify(session, Opened(plan, ON_CPU, runtime, LISTED), GraphOutline(MODEL))
