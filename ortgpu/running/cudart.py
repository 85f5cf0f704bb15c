"""The CUDA runtime library (cudart) of ONNX Runtime's provider, called through ctypes.

It is loaded before any session opens. The same copy must be used, because streams, a thread's current device and its
last error belong to one copy of cudart. Values and signatures come from driver_types.h and cuda_runtime_api.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..environment.gpu.cuda import context_is_active, stream_question
from ..provider.runtime import load_runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..provider.devices import Device

_HOST_ALLOC_PORTABLE = 1  # pinned for every device of the process; so is cudaHostRegisterPortable
_MEMORY_TYPE_HOST = 1
_MEMORY_TYPE_DEVICE = 2
_MEMCPY_DEFAULT = 4  # the addresses tell the direction
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_NOT_READY = 600  # cudaErrorNotReady
# cudaStreamLegacy and cudaStreamPerThread: CUDA's default streams. DLPack has the same numbers for them.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2

# Capture modes of a thread. ONNX Runtime captures in the global mode (cuda_graph.cc). During a capture, CUDA refuses
# memory to threads in the global mode, their default, and the capture fails. The calls of this module belong to no
# graph and are allowed in the relaxed mode (cudaThreadExchangeStreamCaptureMode in cuda_runtime_api.h).
CAPTURE_MODE_GLOBAL = 0
CAPTURE_MODE_RELAXED = 2


class _PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 8),  # CUDA 13 added it.
    )


class CudaCallError(RuntimeError):
    """A failed CUDA call. Its text is like ONNX Runtime's, "CUDA failure 2: ...", so that a session explains it."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"CUDA failure {code}: {words}")
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return CudaCallError, (self.code, str(self).partition(": ")[2])


class CudaRuntime:
    """The calls of cudart for one device. Any thread may use it. Each call raises CudaCallError."""

    def __init__(self, path: str, ordinal: int) -> None:
        self.ordinal = ordinal
        # The same functions are here twice. CDLL releases the interpreter lock during a call, as calls that may wait
        # must. But another thread may then keep the lock for up to 5 ms (sys.setswitchinterval). PyDLL keeps the lock:
        # use it for calls of less than a microsecond.
        self._library = _declared(ctypes.CDLL(path))
        self._quick = _declared(ctypes.PyDLL(path))

    def allocate_pinned(self, size: int, address: ctypes.c_void_p) -> None:
        """Allocate ``size`` bytes of page-locked host memory and write their address to ``address``.

        The address is written even if an interrupt comes meanwhile. The call takes as long as a copy of that size.
        """
        self._call_on_device(self._library.cudaHostAlloc, ctypes.byref(address), size, _HOST_ALLOC_PORTABLE)

    def free_pinned(self, address: int) -> None:
        self._call_on_device(self._library.cudaFreeHost, address)

    def pin(self, address: int, size: int) -> None:
        """Pin host memory that something else has allocated. It takes as long as a copy of that size."""
        self._call_on_device(self._library.cudaHostRegister, address, size, _HOST_ALLOC_PORTABLE)

    def unpin(self, address: int) -> None:
        self._call_on_device(self._library.cudaHostUnregister, address)

    def is_pinned(self, address: int) -> bool:
        """Return True if this is page-locked host memory."""
        return bool(self._attributes_of(address).type == _MEMORY_TYPE_HOST)

    def is_on_device(self, address: int) -> bool:
        """Return True if this is memory of this device."""
        attributes = self._attributes_of(address)
        return bool(attributes.type == _MEMORY_TYPE_DEVICE and attributes.device == self.ordinal)

    def _attributes_of(self, address: int) -> _PointerAttributes:
        attributes = _PointerAttributes()
        with self.device_guard():
            self._call(self._quick.cudaPointerGetAttributes, ctypes.byref(attributes), address)
        return attributes

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes on the device and return their address."""
        return self._create(self._library.cudaMalloc, size)

    def free(self, address: int) -> None:
        self._call_on_device(self._library.cudaFree, address)

    def free_memory(self) -> int:
        """Return the bytes of the device that are free, for any process."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call_on_device(self._library.cudaMemGetInfo, ctypes.byref(free), ctypes.byref(total))
        return free.value

    def new_stream(self) -> int:
        """Create a non-blocking stream and return its handle."""
        return self._create(self._library.cudaStreamCreateWithFlags, _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call_on_device(self._library.cudaStreamDestroy, stream)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes between any host or device memory. The copy is done once ``stream`` is synchronised."""
        self._call(self._library.cudaMemcpyAsync, to, source, size, _MEMCPY_DEFAULT, stream)

    def copy_pinned(self, to: int, source: int, size: int, stream: int) -> None:
        """Begin a copy between pinned memory and the device. Like :meth:`copy`, but the call never waits."""
        self._call(self._quick.cudaMemcpyAsync, to, source, size, _MEMCPY_DEFAULT, stream)

    def prepared_copy_pinned(self, to: int, source: int, size: int, stream: int) -> Callable[[], None]:
        """Return a function that calls :meth:`copy_pinned` with these arguments in half the time."""
        pointer = ctypes.c_void_p
        arguments = pointer(to), pointer(source), ctypes.c_size_t(size), _MEMCPY_DEFAULT, pointer(stream)
        return self.prepared("cudaMemcpyAsync", *arguments)

    def synchronise(self, stream: int) -> None:
        """Wait for all work in ``stream``."""
        self._call(self._library.cudaStreamSynchronize, stream)

    def end_capture(self, stream: int) -> None:
        """End and drop a capture of the calling thread from ``stream``, if there is one. Raises nothing."""
        graph = ctypes.c_void_p()
        with contextlib.suppress(CudaCallError):  # a capture that failed has no graph, and this call says so
            self._call(self._library.cudaStreamEndCapture, stream, ctypes.byref(graph))
        if graph.value:
            with contextlib.suppress(CudaCallError):
                self._call(self._library.cudaGraphDestroy, graph)

    def is_done(self, stream: int) -> bool:
        """Return True if all work in ``stream`` is done."""
        return self._is_ready(self._library.cudaStreamQuery, stream)

    def stream_question(self) -> Callable[[ctypes.c_void_p], int]:
        """Return a function that returns 0 if all work in a stream is done, while :meth:`is_current`."""
        question: Callable[[ctypes.c_void_p], int] = stream_question() or self._quick["cudaStreamQuery"]
        return question

    def clear_error(self) -> None:
        """Forget the last error of the calling thread. Otherwise ONNX Runtime would blame its next kernel for it."""
        self._quick.cudaGetLastError()

    def is_current(self) -> bool:
        """Return True if this device is the current one of the calling thread."""
        current = ctypes.c_int()
        self._call(self._quick.cudaGetDevice, ctypes.byref(current))
        return current.value == self.ordinal

    def pending(self, streams: Sequence[int]) -> list[int]:
        """Return the streams of this device with work to do, out of ``streams``. This spoils no capture."""
        if not self.is_current():
            with self.device_guard():
                return self.pending(streams)
        mode = self.exchange_capture_mode(CAPTURE_MODE_RELAXED, self._quick)
        try:
            return [stream for stream in streams if not self._is_ready(self._quick.cudaStreamQuery, stream)]
        finally:
            self.exchange_capture_mode(mode, self._quick)

    def is_capturing(self, stream: int) -> bool:
        """Return True if a CUDA graph is captured from ``stream``."""
        status = ctypes.c_int()
        self._call(self._quick.cudaStreamIsCapturing, stream, ctypes.byref(status))
        return bool(status.value)

    def order(self, before: int, after: int | None) -> None:
        """Make later work in the stream ``after`` wait for the present work in ``before``. None: wait here.

        The event lives no longer than this call: one that was kept would belong to a context that something may reset.
        """
        if after is None:
            with self.device_guard():
                event = Event(self)
                self.record(event.handle, before)
                self.wait_for(event.handle)
        elif self.is_current():
            self._order_on_gpu(before, after)
        else:
            with self.device_guard():
                self._order_on_gpu(before, after)

    def _order_on_gpu(self, before: int, after: int) -> None:
        created = ctypes.c_void_p()
        self._call(self._quick.cudaEventCreateWithFlags, ctypes.byref(created), _EVENT_DISABLE_TIMING)
        try:
            self._call(self._quick.cudaEventRecord, created, before)
            self._call(self._quick.cudaStreamWaitEvent, after, created, 0)
        finally:
            self._call(self._quick.cudaEventDestroy, created)

    def _is_ready(self, query: Any, handle: int) -> bool:
        code = query(handle)
        if code == _NOT_READY:
            self._quick.cudaGetLastError()
        elif code:
            self._raise(query, code)
        return not code

    def new_event(self, flags: int = 0) -> int:
        """Create an event and return its handle. The event has a time unless ``flags`` say otherwise."""
        return self._create(self._library.cudaEventCreateWithFlags, flags)

    def destroy_event(self, event: int) -> None:
        self._call_on_device(self._library.cudaEventDestroy, event)

    def record_now(self, event: int, stream: int) -> None:
        """Record the event like :meth:`record`. Copies in ``stream`` must never block the calling thread."""
        self._call(self._quick.cudaEventRecord, event, stream)

    def has_passed(self, event: int) -> bool:
        return self._is_ready(self._quick.cudaEventQuery, event)

    def wait_for(self, event: int) -> None:
        """Wait until the event has passed."""
        self._call(self._library.cudaEventSynchronize, event)

    def record(self, event: int, stream: int) -> None:
        """Make the event pass once all present work in ``stream`` is done."""
        self._call(self._library.cudaEventRecord, event, stream)

    def seconds_between(self, start: int, end: int) -> float:
        """Return the seconds between two events that have passed."""
        milliseconds = ctypes.c_float()
        self._call(self._library.cudaEventElapsedTime, ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1000

    def device_count(self) -> int:
        """Return the number of GPUs that the process sees."""
        count = ctypes.c_int()
        self._call(self._library.cudaGetDeviceCount, ctypes.byref(count))
        return count.value

    def use_device(self) -> None:
        """Make this device the current one of the calling thread, as ONNX Runtime does for a run."""
        self._call(self._library.cudaSetDevice, self.ordinal)

    def prepared_use_device(self) -> Callable[[], None]:
        """Return :meth:`use_device` for many calls; see :meth:`prepared`."""
        return self.prepared("cudaSetDevice", ctypes.c_int(self.ordinal))

    def exchange_capture_mode(self, mode: int, library: ctypes.CDLL | None = None) -> int:
        """Set the capture mode of the calling thread. Return the previous mode."""
        exchanged = ctypes.c_int(mode)
        self._call((library or self._library).cudaThreadExchangeStreamCaptureMode, ctypes.byref(exchanged))
        return exchanged.value

    def device_guard(self) -> contextlib.AbstractContextManager[None]:
        """Make this device current for a ``with`` block, also while a graph is captured. It must have a context."""
        return self._device_guard(self._quick)

    @contextlib.contextmanager
    def _device_guard(self, library: ctypes.CDLL) -> Iterator[None]:
        """Implement :meth:`device_guard`. Afterwards the thread's earlier device is current again.

        An earlier device without a context is not set again: that would create one, a quarter of a gigabyte.
        """
        current = ctypes.c_int()
        self._call(library.cudaGetDevice, ctypes.byref(current))
        is_elsewhere = current.value != self.ordinal
        if is_elsewhere:
            self._call(library.cudaSetDevice, self.ordinal)
        try:
            before = self.exchange_capture_mode(CAPTURE_MODE_RELAXED, library)
            try:
                yield
            finally:
                self.exchange_capture_mode(before, library)
        finally:
            if is_elsewhere and context_is_active(current.value):
                self._call(library.cudaSetDevice, current.value)

    def prepared(self, name: str, *arguments: object) -> Callable[[], None]:
        """Return a function that calls cudart's ``name`` with these C values, in a third of the usual time."""
        function = self._quick[name]  # a new object without argtypes, as the arguments are C values already
        call = functools.partial(function, *arguments)

        def prepared() -> None:
            code = call()
            if code:
                self._raise(function, code)

        return prepared

    def _create(self, function: Any, *arguments: object) -> int:
        """Return the handle or address that ``function`` writes to its first argument."""
        created = ctypes.c_void_p()
        self._call_on_device(function, ctypes.byref(created), *arguments)
        return created.value or 0

    def _call_on_device(self, function: Any, *arguments: object) -> None:
        with self._device_guard(self._library):
            self._call(function, *arguments)

    def _call(self, function: Any, *arguments: object) -> None:
        code = function(*arguments)
        if code:
            self._raise(function, code)

    def _raise(self, function: Any, code: int) -> NoReturn:
        self._library.cudaGetLastError()  # clear the error, or ONNX Runtime blames its next kernel
        words = self._library.cudaGetErrorString(code)
        name = function.__name__
        raise CudaCallError(code, f"{(words or b'').decode()} ; GPU={self.ordinal} ; expr={name}")


class Relaxed:
    """A context that sets the thread's device and the relaxed mode. One thread at a time may enter it, often.

    The device must have a context.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._mode = ctypes.c_int()
        self._use_device = runtime.prepared_use_device()
        self._exchange = runtime.prepared("cudaThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))

    def __enter__(self) -> None:
        self._use_device()
        self._mode.value = CAPTURE_MODE_RELAXED
        self._exchange()  # stores the previous mode, for __exit__

    def __exit__(self, *_: object) -> None:
        self._exchange()


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.cudaGetErrorString.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cudaHostAlloc.argtypes = (ctypes.POINTER(pointer), size, ctypes.c_uint)
    library.cudaFreeHost.argtypes = library.cudaHostUnregister.argtypes = (pointer,)
    library.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
    library.cudaMalloc.argtypes = (ctypes.POINTER(pointer), size)
    library.cudaFree.argtypes = (pointer,)
    library.cudaMemGetInfo.argtypes = (ctypes.POINTER(size), ctypes.POINTER(size))
    library.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
    library.cudaStreamCreateWithFlags.argtypes = (ctypes.POINTER(pointer), ctypes.c_uint)
    library.cudaStreamDestroy.argtypes = library.cudaStreamSynchronize.argtypes = (pointer,)
    library.cudaStreamQuery.argtypes = (pointer,)
    library.cudaStreamWaitEvent.argtypes = (pointer, pointer, ctypes.c_uint)
    library.cudaStreamIsCapturing.argtypes = (pointer, ctypes.POINTER(ctypes.c_int))
    library.cudaStreamEndCapture.argtypes = (pointer, ctypes.POINTER(pointer))
    library.cudaGraphDestroy.argtypes = (pointer,)
    library.cudaThreadExchangeStreamCaptureMode.argtypes = (ctypes.POINTER(ctypes.c_int),)
    library.cudaEventCreateWithFlags.argtypes = (ctypes.POINTER(pointer), ctypes.c_uint)
    library.cudaEventDestroy.argtypes = library.cudaEventSynchronize.argtypes = (pointer,)
    library.cudaEventQuery.argtypes = (pointer,)
    library.cudaEventRecord.argtypes = (pointer, pointer)
    library.cudaEventElapsedTime.argtypes = (ctypes.POINTER(ctypes.c_float), pointer, pointer)
    library.cudaPointerGetAttributes.argtypes = (ctypes.POINTER(_PointerAttributes), pointer)
    return library


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class DeviceBuffer:
    """Memory of the device, freed with this object."""

    def __init__(self, runtime: CudaRuntime, size: int) -> None:
        self.address = runtime.allocate(size)
        self.size = size
        _free_with(self, runtime.free, self.address)


class Stream:
    """A non-blocking stream, destroyed with this object."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.handle = runtime.new_stream()
        _free_with(self, runtime.destroy_stream, self.handle)


class Event:
    """An event without timing, destroyed with this object. It passes once the work before it in a stream is done."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.handle = runtime.new_event(_EVENT_DISABLE_TIMING)
        _free_with(self, runtime.destroy_event, self.handle)


def _free_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    weakref.finalize(owner, _free, free, handle, os.getpid()).atexit = False


def _free(free: Callable[[int], None], handle: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # after a fork it belongs to the parent, since CUDA does not survive the fork
    with contextlib.suppress(RuntimeError):  # a lost context has freed it already
        free(handle)


def runtime_of(device: Device) -> CudaRuntime | None:
    """Return cudart for a session on ``device``. None on the CPU, or if the provider links no shared cudart."""
    return runtime_on(device.ordinal) if device.is_gpu and device.ordinal is not None else None


def runtime_on(ordinal: int) -> CudaRuntime | None:
    """Return cudart for a session on this GPU. None if the provider links no shared cudart."""
    report = load_runtime().preload
    path = report.path_of("libcudart", linked=True) if report is not None else None
    return _runtime(path, ordinal) if path is not None else None


def device_setter(device: Device) -> Callable[[], None] | None:
    """Return the function that makes a GPU the current one of the calling thread. None if the process has no other."""
    runtime = runtime_of(device)
    return runtime.prepared_use_device() if runtime is not None and runtime.device_count() > 1 else None


_runtime = functools.cache(CudaRuntime)  # each run with arrays of other libraries asks for it
