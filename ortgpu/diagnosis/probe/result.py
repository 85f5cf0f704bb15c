"""The result of the probe: the steps of its child process, and the end of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...environment.gpu.cuda import CudaState
from ...environment.gpu.driver import LIBCUDA, Asked
from ...provider.preloading import LoadedLibrary, MissingLibrary

NVML = "NVML"  # ProbeResult.opening has this value, because only nvidia-ml-py knows the path.


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """One step. ``detail``: result or words of a failure. ``data``: measurements, and output as "printed"."""

    name: str
    ok: bool
    detail: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of the child. ``died_in``: the last step before it was killed, crashed or ran out of time."""

    steps: tuple[ProbeStep, ...]
    completed: bool
    returncode: int | None
    signal: str | None
    timed_out: bool
    died_in: str | None
    seconds: float
    output: str  # It holds the end of the libraries' output.
    opening: str | None = None  # The path of the library that was opening when the child died, or "NVML".

    def step(self, name: str) -> ProbeStep | None:
        return next((step for step in self.steps if step.name == name), None)

    def measured(self, name: str, key: str) -> Any:
        """Return a measurement of a step; None: the step was not tried, or has no such measurement."""
        step = self.step(name)
        return step.data.get(key) if step is not None else None

    @property
    def missing(self) -> tuple[MissingLibrary, ...] | None:
        """The libraries that the child could not load, with the loader's words; None if it did not try."""
        missing: tuple[MissingLibrary, ...] | None = self.measured("libraries", "not_loaded")
        return missing

    @property
    def cudnn(self) -> tuple[LoadedLibrary, int] | None:
        """The cuDNN in the child, in the same form as in PreloadReport."""
        cudnn: tuple[LoadedLibrary, int] | None = self.measured("libraries", "cudnn")
        return cudnn

    @property
    def cudnn_mixed(self) -> tuple[str, ...]:
        """The files of cuDNN in the child if several releases are mixed, in the same form as in PreloadReport."""
        return tuple(self.measured("libraries", "cudnn_mixed") or ())

    @property
    def crashed(self) -> bool:
        """True if libraries of packages ended the child: a file may be damaged behind its headers."""
        outside = self.timed_out or self.signal in ("SIGKILL", "SIGSYS")
        return not outside and self.died_in not in (None, "start", "driver", "training")

    @property
    def deadly(self) -> tuple[Asked, ...]:
        """The questions to the driver that the child did not survive."""
        if self.died_in != "driver":
            return ()
        return {NVML: ("nvml", "libcuda"), LIBCUDA: ("libcuda",)}.get(self.opening or "", ())

    @property
    def cuda(self) -> CudaState | None:
        """The driver's answer, as if this process had asked."""
        step = self.step("driver")
        if step is None or "code" not in step.data:
            return None
        return CudaState.seen_by_child(step.data["code"], step.data["devices"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
