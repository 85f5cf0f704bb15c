"""The state of the CUDA driver after ``cuInit``, and its devices in the order of their ordinals.

Unlike the probes of :mod:`ortgpu.environment.gpu.driver` this initialises the driver. An initialised driver does not
survive a fork. No context is created and no GPU memory taken. Sessions call it where ONNX Runtime would call it a
moment later anyway. Ordinals, and the effects of CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and MIG, are thereby the
driver's own answer, not a computation.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass

from ...process.background import Task, fork_safe_lock, this_thread

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _COMPUTE_MODE, _MULTIPROCESSORS = 75, 76, 20, 16  # CUdevice_attribute, cuda.h
_STREAM_NON_BLOCKING = 1  # CUstream_flags
_CAPTURE_MODE_GLOBAL, _CAPTURE_MODE_RELAXED = 0, 2  # CUstreamCaptureMode

# CUresult, cuda.h: known results of cuInit and of the first calls of a process.
RESULT_NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    34: "CUDA_ERROR_STUB_LIBRARY",
    35: "cudaErrorInsufficientDriver",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    102: "CUDA_ERROR_DEVICE_NOT_LICENSED",
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    500: "CUDA_ERROR_NOT_FOUND",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    805: "CUDA_ERROR_MPS_CONNECTION_FAILED",
    806: "CUDA_ERROR_MPS_RPC_FAILURE",
    807: "CUDA_ERROR_MPS_SERVER_NOT_READY",
    808: "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
    809: "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    999: "CUDA_ERROR_UNKNOWN",
}


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device in CUDA's numbering in this process."""

    ordinal: int
    uuid: str | None
    name: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None  # bytes
    compute_mode: int | None  # CUcomputemode: 0 default, 2 prohibited, 3 exclusive process


@dataclass(frozen=True, slots=True)
class CudaState:
    """The answer of ``cuInit``. ``code``: its result, 0 for success; None if there is no driver to ask.

    ``devices`` None: the driver could not be asked for them.
    """

    code: int | None
    devices: tuple[CudaDevice, ...] | None
    pid: int
    hidden_by: str | None = None  # CUDA_VISIBLE_DEVICES at the call: CUDA ignores later changes of it
    has_crashed: bool = False  # True only on Windows: ctypes turns a crash into an exception there

    @classmethod
    def seen_by_child(cls, code: int | None, devices: tuple[CudaDevice, ...] | None) -> CudaState:
        """Return a child's answer as this process's own: the child had the same environment variables."""
        return cls(code, devices, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"))


_state: CudaState | None = None
_has_failed = False  # True: the initialisation failed in this process, or before it was forked.
_lock = fork_safe_lock()


def initialise() -> CudaState:
    """Initialise the driver in this process and list its devices. A success is remembered; a failure is not."""
    global _state, _has_failed
    with this_thread.holds, _lock:
        if _state is not None and _state.pid == os.getpid():
            return _state
        state = _ask()
        _has_failed = state.code != 0
        if state.code == 0:
            _state = state
        return state


def initialising() -> Task[CudaState] | None:
    """Start :func:`initialise` in a thread. Return None if it was done or failed before."""
    if _has_failed or (_state is not None and _state.pid == os.getpid()):
        return None
    return Task(initialise, "ortgpu-driver")


def initialised_in() -> int | None:
    """Return the id of the process that called :func:`initialise`: after a fork, the parent's."""
    return _state.pid if _state is not None else None


def _ask() -> CudaState:
    pid, visible = os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")
    driver = None
    try:
        driver = _driver()
        code = int(driver.cuInit(0))
    except (OSError, AttributeError) as error:
        return CudaState(None, None, pid, has_crashed=driver is not None and isinstance(error, OSError))
    count = ctypes.c_int()
    if code != 0 or not _call("cuDeviceGetCount", ctypes.byref(count)):
        return CudaState(code, None, pid)
    return CudaState(code, tuple(map(_device, range(count.value))), pid, visible)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _device(ordinal: int) -> CudaDevice:
    handle = _handle_of(ordinal)
    if handle is None:
        return CudaDevice(ordinal, None, None, None, None, None)
    major, minor = _attribute(handle, _CAPABILITY_MAJOR), _attribute(handle, _CAPABILITY_MINOR)
    name, uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    has_uuid = _call("cuDeviceGetUuid_v2", uuid, handle) or _call("cuDeviceGetUuid", uuid, handle)
    has_name = _call("cuDeviceGetName", name, len(name), handle)
    memory = ctypes.c_size_t()
    has_memory = _call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    return CudaDevice(
        ordinal,
        f"GPU-{uuids.UUID(bytes=uuid.raw)}" if has_uuid else None,
        name.value.decode("utf-8", "replace") if has_name else None,
        (major, minor) if major is not None and minor is not None else None,
        memory.value if has_memory else None,
        _attribute(handle, _COMPUTE_MODE),
    )


def is_older_than(cuda_major: int | None) -> bool:
    """Return True if the driver does not support a CUDA of this major version: its runtime would refuse every call."""
    version = ctypes.c_int()
    is_known = cuda_major is not None and _call("cuDriverGetVersion", ctypes.byref(version))
    return is_known and 0 < version.value // 1000 < (cuda_major or 0)


def count_multiprocessors(ordinal: int) -> int | None:
    """Return the number of a device's multiprocessors, or None if it is unknown. MIG may provide only a part."""
    handle = _handle_of(ordinal)
    return _attribute(handle, _MULTIPROCESSORS) if handle is not None else None


def _handle_of(ordinal: int) -> ctypes.c_int | None:
    handle = ctypes.c_int()
    return handle if _call("cuDeviceGet", ctypes.byref(handle), ordinal) else None


def _attribute(handle: ctypes.c_int, attribute: int) -> int | None:
    value = ctypes.c_int()
    return value.value if _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle) else None


def _call(function: str, *arguments: object) -> bool:
    """Return True if a call of the driver succeeds. Without a driver, or without the function, it does not."""
    try:
        return int(getattr(_driver(), function)(*arguments)) == 0
    except (OSError, AttributeError):
        return False


def context_is_active(ordinal: int) -> bool | None:
    """Return True if this process has CUDA's primary context on a device, as for a bound session; None if unknown."""
    context = _primary_context(ordinal)
    return context if context is None else context[1]


def context_id(ordinal: int) -> int | None:
    """Return the number of this process's primary context on a device, 0 without one, None if it is not known."""
    context = _primary_context(ordinal)
    if context is None:
        return None
    device, active = context
    if not active:
        return 0
    handle, number = ctypes.c_void_p(), ctypes.c_ulonglong()
    if not _call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device):
        return None
    is_known = _call("cuCtxGetId", handle, ctypes.byref(number))
    _call("cuDevicePrimaryCtxRelease_v2", device)
    return number.value if is_known else None


def context_question() -> tuple[Callable[[], int], ctypes.c_ulonglong] | None:
    """Return a function that writes the number of the calling thread's context, and where it writes.

    It returns 0 for success. Threads may share it, as it keeps the interpreter lock. None if the driver lacks it.
    """
    ask, number = _quick_function("cuCtxGetId"), ctypes.c_ulonglong()
    return (functools.partial(ask, None, ctypes.byref(number)), number) if ask is not None else None


def stream_question() -> Callable[[ctypes.c_void_p], int] | None:
    """Return a function that returns 0 if all work in a stream of the calling thread's context is done.

    None if the driver lacks it. It leaves no error in the thread, as the function of the CUDA runtime does.
    """
    return _quick_function("cuStreamQuery")


def _quick_function(name: str) -> Callable[..., int] | None:
    """Return a function of the driver that keeps the interpreter lock: it takes half the time of a CDLL's function."""
    try:
        function: Callable[..., int] = ctypes.PyDLL(_driver()._name)[name]
    except (OSError, AttributeError):
        return None
    return function


def context_error(ordinal: int, *, is_opening: bool = False) -> int | None:
    """Return the driver's result of harmless calls in this process's primary context on a device.

    0: the context works. After a sticky error every call in it returns that error (driver_types.h). None: there is no
    context, no driver, or a driver without these functions. The calls wait for nothing, and disturb no capture of a
    CUDA graph.

    With ``is_opening`` the calls behave like the calls that open a session. They create the context if there is none,
    and keep it if it works. While another thread captures a CUDA graph they fail, and so does the capture.
    """
    context = _primary_context(ordinal)
    if context is None or not (context[1] or is_opening):
        return None
    driver, (device, existed), handle, code = _driver(), context, ctypes.c_void_p(), None
    try:
        code = int(driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device))
        if code:
            return code
        try:
            code = int(driver.cuCtxPushCurrent_v2(handle)) or _error_in_current_context(
                driver, is_relaxed=not is_opening
            )
            return code
        finally:
            if existed or code:
                driver.cuDevicePrimaryCtxRelease_v2(device)
    except AttributeError:
        return None


def _error_in_current_context(driver: ctypes.CDLL, *, is_relaxed: bool) -> int:
    """Return the first error of the calls, 0 for none, and pop the context from the calling thread again."""
    free, total, stream = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    # Unless it is relaxed, a new stream spoils the graph that another thread captures.
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED if is_relaxed else _CAPTURE_MODE_GLOBAL)
    try:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            code = int(driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
            code = code or int(driver.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING))
            if not code:
                code = int(driver.cuStreamQuery(stream))
                driver.cuStreamDestroy_v2(stream)
            return code
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _primary_context(ordinal: int) -> tuple[ctypes.c_int, bool] | None:
    device, flags, active = _handle_of(ordinal), ctypes.c_uint(), ctypes.c_int()
    if device is None:
        return None
    if not _call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)):
        return None
    return device, bool(active.value)
