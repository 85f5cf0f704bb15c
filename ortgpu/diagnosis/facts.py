"""What checks judge: the facts of the environment, what was asked for, and what was seen when it was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..environment.gpu.cuda import CudaState
from ..environment.inspection import Environment
from ..model.contents import ModelFacts
from ..provider.devices import DeviceRequest
from ..provider.preloading import LoadedLibrary, MissingLibrary, PreloadReport
from .probe.result import ProbeResult, ProbeStep

if TYPE_CHECKING:
    from ..provider.living import SessionRecord


@dataclass(frozen=True, slots=True)
class Request:
    """What a session was asked for, as far as it matters to a diagnosis."""

    device: DeviceRequest = None
    cudnn_operators: tuple[str, ...] = ()  # operators of the model that run on cuDNN; empty: none, or not known
    cufft_operators: tuple[str, ...] = ()  # likewise
    model: ModelFacts | None = None
    cudnn_disabled: bool = False  # provider option enable_cudnn=0
    collective_operators: tuple[str, ...] = ()  # operators of the model that work between processes


@dataclass(frozen=True, slots=True)
class Observed:
    """What happened when something was really tried. None: it was not tried."""

    import_error: str | None = None  # of `import onnxruntime`, as "Type: text"
    has_session: bool | None = None  # the imported module has InferenceSession
    available_providers: tuple[str, ...] | None = None
    preload: PreloadReport | None = None
    cudnn_mixed: tuple[str, ...] = ()  # as in PreloadReport
    provider_error: str | None = None  # the loader's words about the provider file, all its libraries being there
    cuda: CudaState | None = None
    probe: ProbeResult | None = None
    has_collective_ops: bool | None = None  # of the imported module
    not_loaded: tuple[MissingLibrary, ...] | None = None  # by a child process, where this one was not asked to
    sessions: tuple[SessionRecord, ...] = ()  # that this process holds open
    numpy_error: str | None = None  # what NumPy said, where the import failed for it; a probe has what was printed

    @property
    def crashed(self) -> bool:
        return self.probe is not None and self.probe.crashed

    @property
    def cudnn(self) -> tuple[LoadedLibrary, int] | None:
        """The cuDNN that was loaded, by this process or by that of the probe, and the CUDA that it was built for."""
        seen = self.preload or self.probe
        return seen.cudnn if seen is not None else None

    def step(self, name: str) -> ProbeStep | None:
        """What came of one step of the probe; None: it was not tried, or not finished."""
        return self.probe.step(name) if self.probe is not None else None

    def failed(self, name: str) -> ProbeStep | None:
        """The step, where it was finished without success."""
        step = self.step(name)
        return step if step is not None and not step.ok else None

    def printed(self, name: str) -> tuple[str, ...]:
        """The lines that libraries wrote while a step failed."""
        step = self.step(name)
        return tuple(step.data.get("printed", ())) if step is not None else ()


@dataclass(frozen=True, slots=True)
class Facts:
    environment: Environment
    request: Request = Request()
    observed: Observed = Observed()
