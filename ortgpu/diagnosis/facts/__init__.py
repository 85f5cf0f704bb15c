"""The facts for the checks: the environment, the request, and the observations from real attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...environment.gpu.cuda import CudaDevice, CudaState
from ...environment.inspection import Environment
from ...model.contents import ModelFacts
from ...provider.devices import DeviceRequest
from ...provider.preloading import PreloadReport
from ..probe.result import ProbeResult, ProbeStep

if TYPE_CHECKING:
    from ...provider.living import SessionRecord


@dataclass(frozen=True, slots=True)
class Request:
    """The request for a session, as far as a diagnosis needs it."""

    device: DeviceRequest = None
    cudnn_operators: tuple[str, ...] = ()  # The model's operators on cuDNN; empty: none, or not known.
    cufft_operators: tuple[str, ...] = ()  # The model's operators on cuFFT; empty: none, or not known.
    model: ModelFacts | None = None
    cudnn_disabled: bool = False  # The provider option enable_cudnn is 0.
    collective_operators: tuple[str, ...] = ()  # The model's operators that work between processes.


@dataclass(frozen=True, slots=True)
class Observed:
    """The results of real attempts. None: there was no attempt."""

    import_error: str | None = None  # The failure of `import onnxruntime`, as "Type: text".
    has_session: bool | None = None  # The imported module has InferenceSession.
    available_providers: tuple[str, ...] | None = None
    preload: PreloadReport | None = None
    provider_error: str | None = None  # The loader's words about the provider file, if all its libraries are there.
    cuda: CudaState | None = None
    probe: ProbeResult | None = None
    has_collective_ops: bool | None = None  # The imported module has collective operators.
    list_sessions: Callable[[], tuple[SessionRecord, ...]] = tuple  # It returns the open sessions of this process.
    plugin_problem: str | None = None  # It is the same as in Runtime.
    cuda_is_plugin: bool | None = None  # In this process CUDA comes as a plugin of ONNX Runtime.
    has_other_cuda_plugin: bool = False  # A registered plugin of another name lists a GPU of NVIDIA.
    numpy_error: str | None = None  # NumPy's own words if it made the import fail; a probe has its output instead.

    @property
    def crashed(self) -> bool:
        return self.probe is not None and self.probe.crashed

    @property
    def cuda_code(self) -> int | None:
        """The result of ``cuInit``; None: it was not called."""
        return self.cuda.code if self.cuda is not None else None

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The devices in CUDA's list; empty, too, if CUDA was not asked."""
        return (self.cuda.devices if self.cuda is not None else None) or ()

    @property
    def loading(self) -> PreloadReport | ProbeResult | None:
        """The result of loading the libraries in this process, or else in the probe."""
        return self.preload or self.probe

    @property
    def printed(self) -> tuple[str, ...]:
        """The output during the failed import: if NumPy fails, only the output names the cause."""
        printed = self.probe.measured("import", "printed") if self.probe is not None else None
        return (*(printed or ()), *filter(None, [self.numpy_error]))

    def step(self, name: str) -> ProbeStep | None:
        """Return the result of one step of the probe; None: it was not tried, or not finished."""
        return self.probe.step(name) if self.probe is not None else None

    def failed(self, name: str) -> ProbeStep | None:
        step = self.step(name)
        return step if step is not None and not step.ok else None


@dataclass(frozen=True, slots=True)
class Facts:
    environment: Environment
    request: Request = Request()
    observed: Observed = Observed()
