"""A failure to open a session before its cause is known, and its diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..environment.gpu.cuda import CudaState
from ..environment.libraries.catalogue import stem_of
from ..errors import GPUError
from ..model.contents import describe_model, read_collective_operators
from ..model.outline import GraphOutline
from ..process.late import late
from ..provider.cudnn import operators_needing_cudnn
from ..provider.devices import DeviceRequest
from ..provider.placement import cufft_operators
from ..provider.runtime import Runtime

if TYPE_CHECKING:
    from ..diagnosis import diagnosing, facts
else:
    diagnosing = late("ortgpu.diagnosis.diagnosing")
    facts = late("ortgpu.diagnosis.facts")


@dataclass(eq=False)
class UndiagnosedError(Exception):
    """A session cannot be opened as planned, and only a diagnosis tells why.

    Attributes:
        device: the requested device.
        cudnn_disabled: the provider option enable_cudnn is 0.
        cuda: the driver's answer to this process, if it was asked.
        operators: operator and domain of the nodes on CUDA; None: all nodes of the model file count.
        cause: the exception of ONNX Runtime, if there was one.
    """

    runtime: Runtime
    device: DeviceRequest = None
    cudnn_disabled: bool = False
    cuda: CudaState | None = None
    operators: frozenset[tuple[str, str]] | None = None
    cause: BaseException | None = None

    def __post_init__(self) -> None:
        self.args = ()  # BaseException.__new__ put the parts there, where they would outlive their attributes.


class Diagnosed(NamedTuple):
    error: GPUError
    depends_on_model: bool


def diagnose(failure: UndiagnosedError, outline: GraphOutline) -> Diagnosed:
    """Return the error to raise for a failure that is about the GPU, whatever it is."""
    diagnosed = explain(failure, outline)
    assert diagnosed is not None  # only an exception of ONNX Runtime can be about something else
    return diagnosed


def explain(failure: UndiagnosedError, outline: GraphOutline) -> Diagnosed | None:
    """Return the error to raise, or None if the exception of ONNX Runtime has nothing to do with the GPU."""
    request = _request_of(failure, outline)
    error = diagnosing.why_unusable(failure.runtime, request=request, cuda=failure.cuda, cause=failure.cause)
    depends_on_model = bool(request.cudnn_operators or request.cufft_operators or request.collective_operators)
    return Diagnosed(error, depends_on_model) if error is not None else None


def _request_of(failure: UndiagnosedError, outline: GraphOutline) -> facts.Request:
    operators = failure.operators
    report = failure.runtime.preload
    # The operators matter if a library for some of them is missing or mixed.
    if operators is None and report is not None and (report.cudnn_mixed or report.missing):
        lazily_opened = ("libcudnn", "libcufft")
        stems = [stem_of(library.soname) for library in report.missing]
        if report.cudnn_mixed or any(stem.startswith(lazily_opened) for stem in stems):
            operators = describe_model(outline).operators
    return facts.Request(
        device=failure.device,
        cudnn_operators=operators_needing_cudnn(outline, operators) if operators else (),
        cufft_operators=cufft_operators(operators) if operators else (),
        cudnn_disabled=failure.cudnn_disabled,
        collective_operators=read_collective_operators(outline),
    )
