"""Device memory, a stream and events of one GPU, by ctypes from the CUDA runtime that ONNX Runtime would use as well.

For child processes: the first call of :class:`DeviceQueue` creates a CUDA context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..diagnosis.checks import opening
from ..diagnosis.facts import Facts
from ..diagnosis.remedies import commands as remedies
from ..environment.inspection import inspect_environment
from ..environment.libraries.catalogue import BY_STEM
from ..environment.packages.installed import locate_packages
from ..errors import LibraryNotFoundError, manual
from ..provider.preloading import open_library, plan
from ..running.cudart import CudaCallError, CudaRuntime

_RUNTIME = "libcudart"


def load_runtime_library() -> str:
    """Its path. Raises LibraryNotFoundError where nothing has a CUDA runtime for the installed ONNX Runtime."""
    found = plan(locate_packages()).resolutions
    candidates = [each for one in found if one.spec.stem == _RUNTIME for each in one.candidates]
    refused = []
    for candidate in candidates:
        error = open_library(candidate.path)
        if error is None:
            return candidate.path
        refused.append(f"{candidate.path}: {error}")
    environment = inspect_environment()
    major = environment.provider.cuda_major if environment.provider is not None else None
    wheel = remedies.wheel_of(f"{_RUNTIME}.so", major)
    raise LibraryNotFoundError(
        "the CUDA runtime, which the collective operations need, was not found",
        evidence=refused or ["there is no file of it in any place where libraries are looked for"],
        fixes=[
            remedies.install_libraries(environment, [wheel])
            if wheel is not None
            else manual("install an ONNX Runtime that is built with CUDA")
        ],
        missing=(BY_STEM[_RUNTIME].sonames.get(major or 0, f"{_RUNTIME}.so"),),
    )


class DeviceQueue:
    """One GPU and a stream on it. Copies and events are queued; :meth:`is_done` says when all of it is done.

    Sizes in bytes. Memory of the host that is copied has to stay until then.

    Raises:
        GPUError: from every method, what the code of CUDA stands for.
    """

    def __init__(self, ordinal: int) -> None:
        self._runtime = runtime = CudaRuntime(load_runtime_library(), ordinal)
        with _explained():
            runtime.use_device()
            runtime.free(0)  # before CUDA 12 choosing the device alone makes no context
            self.stream = runtime.new_stream()

    def allocate(self, size: int) -> int:
        """The address of new device memory."""
        with _explained():
            return self._runtime.allocate(size)

    def free(self, address: int) -> None:
        with _explained():
            self._runtime.free(address)

    def copy(self, to: int, source: int, size: int) -> None:
        """From host to device or back."""
        with _explained():
            self._runtime.copy(to, source, size, self.stream)

    def new_event(self) -> int:
        with _explained():
            return self._runtime.new_event()

    def record(self, event: int) -> None:
        with _explained():
            self._runtime.record(event, self.stream)

    def seconds_between(self, start: int, end: int) -> float:
        """Both events have passed."""
        with _explained():
            return self._runtime.seconds_between(start, end)

    def is_done(self) -> bool:
        with _explained():
            return self._runtime.is_done(self.stream)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CudaCallError as failure:
        raise opening.for_code(failure.code, Facts(inspect_environment()), [str(failure)]) from failure
