"""Device memory, a stream and events of one GPU, by ctypes from the CUDA runtime that ONNX Runtime would use as well.

For child processes: the first call of :class:`DeviceQueue` creates a CUDA context.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..diagnosis import Facts
from ..diagnosis.driver import for_code
from ..diagnosis.remedies import install_libraries, wheel_of
from ..environment.catalogue import BY_STEM
from ..environment.inspection import inspect_environment
from ..environment.packages import locate_packages
from ..errors import GPUError, LibraryNotFoundError, manual
from ..preloading import Plan, open_library, plan

# driver_types.h
_NOT_READY = 600  # cudaErrorNotReady
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered behind the default stream

_RUNTIME = "libcudart"


def load_runtime_library() -> ctypes.CDLL:
    """Raises LibraryNotFoundError where nothing has a CUDA runtime for the installed ONNX Runtime."""
    found = plan(locate_packages())
    resolutions = found.resolutions if isinstance(found, Plan) else ()
    candidates = [each for one in resolutions if one.spec.stem == _RUNTIME for each in one.candidates]
    refused = []
    for candidate in candidates:
        error = open_library(candidate.path)
        if error is None:
            return ctypes.CDLL(candidate.path)
        refused.append(f"{candidate.path}: {error}")
    environment = inspect_environment()
    major = environment.provider.cuda_major if environment.provider is not None else None
    wheel = wheel_of(f"{_RUNTIME}.so", major)
    raise LibraryNotFoundError(
        "the CUDA runtime, which the collective operations need, was not found",
        evidence=refused or ["there is no file of it in any place where libraries are looked for"],
        fixes=[
            install_libraries(environment, [wheel])
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
        self._library = load_runtime_library()
        self._do("cudaSetDevice", ctypes.c_int(ordinal))
        self._do("cudaFree", None)  # before CUDA 12 cudaSetDevice alone makes no context
        self.stream = ctypes.c_void_p()
        self._do("cudaStreamCreateWithFlags", ctypes.byref(self.stream), ctypes.c_uint(_NON_BLOCKING))

    def allocate(self, size: int) -> int:
        """The address of new device memory."""
        address = ctypes.c_void_p()
        self._do("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value or 0

    def free(self, address: int) -> None:
        self._do("cudaFree", ctypes.c_void_p(address))

    def copy_to_device(self, address: int, host: int, size: int) -> None:
        self._copy(address, host, size, _TO_DEVICE)

    def copy_to_host(self, host: int, address: int, size: int) -> None:
        self._copy(host, address, size, _TO_HOST)

    def _copy(self, to: int, from_: int, size: int, kind: int) -> None:
        arguments = (ctypes.c_void_p(to), ctypes.c_void_p(from_), ctypes.c_size_t(size), ctypes.c_int(kind))
        self._do("cudaMemcpyAsync", *arguments, self.stream)

    def new_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._do("cudaEventCreate", ctypes.byref(event))
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        self._do("cudaEventRecord", event, self.stream)

    def seconds_between(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Both events have passed."""
        milliseconds = ctypes.c_float()
        self._do("cudaEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1000

    def is_done(self) -> bool:
        code = int(self._library.cudaStreamQuery(self.stream))
        if code not in (0, _NOT_READY):
            raise self._error("cudaStreamQuery", code)
        return code == 0

    def _do(self, function: str, *arguments: Any) -> None:
        code = int(getattr(self._library, function)(*arguments))
        if code != 0:
            raise self._error(function, code)

    @staticmethod
    def _error(function: str, code: int) -> GPUError:
        return for_code(code, Facts(inspect_environment()), [f"{function} returned {code}"])
