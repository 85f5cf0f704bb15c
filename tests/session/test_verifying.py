"""What is verified once ONNX Runtime has opened a session: its providers, its GPU, the nodes on the CPU."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import PlacementError, ProviderFallbackError
from ortgpu.provider.placement import CPUNodesWarning, PlacedNode, Placement
from ortgpu.provider.requests import CPUNodes, ProviderList
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session.plan import Plan
from ortgpu.session.request import SessionRequest
from ortgpu.session.undiagnosed import UndiagnosedError
from ortgpu.session.verifying import check_cpu_nodes, verify_plan

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
