"""Order runs after the GPU work that their caller has queued, and results before the work that the caller queues next.

ONNX Runtime runs a model in a stream of its own. That stream does not wait for other streams, so a run over memory that
PyTorch or CuPy still writes would read old data. The streams of the caller are CUDA's two default streams and, if
PyTorch or CuPy are in use, the current stream of the calling thread there. The caller has to order other streams, as
between the streams of PyTorch.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

import onnxruntime
from numpy import ndarray

from ..provider.lifetime import device_of
from ..provider.requests import CUDA
from .cudart import LEGACY_STREAM, PER_THREAD_STREAM, CudaCallError, CudaRuntime, runtime_of
from .onnxruntimes import InferenceSession

if TYPE_CHECKING:
    from ..provider.interfaces import VerifiedSession
    from ..provider.lifetime import ContextCheck


class CallerStreams:
    """The order between one session and the streams of the calling thread. Threads may share it.

    Attributes:
        is_idle: returns True if these streams have no work, and the calling thread is in the session's CUDA context.
            False says nothing. CUDA needs two microseconds for this answer. In the global capture mode the question
            spoils a graph that another thread captures, as does each run that waits for its results.

    Args:
        runtime: the CUDA runtime for the session's GPU.
        own: the stream of the session; None if only ONNX Runtime knows it.
        read_on_host: the inputs that an IOBinding copies from the GPU as soon as they are bound.
        context: None if nothing tells the thread's context.
    """

    def __init__(
        self, runtime: CudaRuntime, own: int | None, read_on_host: Container[str], context: ContextCheck | None = None
    ) -> None:
        self._runtime = runtime
        self.own = own
        self.read_on_host = read_on_host
        self._ordinal = runtime.ordinal
        self._is_busy = runtime.stream_question()
        self._handles: dict[int, ctypes.c_void_p] = {}
        self.is_idle: Callable[[], bool] = lambda: False
        if context is not None and own is None:
            self.is_idle = self._idle_question(context)

    def _idle_question(self, context: ContextCheck) -> Callable[[], bool]:
        ask, number, expected = context
        # The legacy stream is busy while the threads' default streams are, and all others that are not non-blocking.
        legacy, is_busy, ordinal, modules = self._handle(LEGACY_STREAM), self._is_busy, self._ordinal, sys.modules

        def is_idle() -> bool:
            if ask() or number.value != expected or is_busy(legacy):
                return False
            if _raw_stream_of_torch is not None and "cupy" not in modules:
                stream = _raw_stream_of_torch(ordinal)
                return stream <= PER_THREAD_STREAM or not is_busy(self._handle(stream))
            return not any(is_busy(self._handle(stream)) for stream in self._library_streams())

        return is_idle

    def wait(self) -> None:
        """Have the session's next work wait for the present work of these streams.

        The session's stream waits on the GPU. Where that stream is unknown, the calling thread waits.

        Raises:
            CudaCallError: the work of a stream failed, for instance.
        """
        if self.own is not None:
            if not self._runtime.is_capturing(self.own):
                for stream in (LEGACY_STREAM, *self._library_streams()):
                    self._runtime.order(stream, self.own)
            return
        self._runtime.clear_error()  # is_idle may have left an error.
        for stream in self._runtime.pending([LEGACY_STREAM, *self._library_streams()]):
            self._runtime.order(stream, None)

    def order_results(self) -> None:
        """Have later work in these streams wait for the session's work.

        Only a session with a known stream can have such work: others wait for their results, unless a run option
        switches that off.

        Raises:
            CudaCallError: the work of the session failed, for instance.
        """
        if self.own is not None and not self._runtime.is_capturing(self.own):
            for stream in (LEGACY_STREAM, *self._library_streams()):
                self._runtime.order(self.own, stream)

    def _library_streams(self) -> list[int]:
        """Return the current streams of PyTorch and CuPy that are no default streams, nor the session's."""
        streams = []
        if "torch" in sys.modules and (stream := _stream_of_torch(self._ordinal)) > PER_THREAD_STREAM:
            streams.append(stream)
        if "cupy" in sys.modules and (stream := _stream_of_cupy(self._ordinal)) > PER_THREAD_STREAM:
            streams.append(stream)
        return streams if self.own is None else [stream for stream in streams if stream != self.own]

    def _handle(self, stream: int) -> ctypes.c_void_p:
        handle = self._handles.get(stream)
        if handle is None:
            handle = self._handles[stream] = ctypes.c_void_p(stream)
        return handle


_raw_stream_of_torch: Callable[[int], int] | None = None  # set once PyTorch has used CUDA


def _stream_of_torch(ordinal: int) -> int:
    """Return PyTorch's current stream, 0 for the default stream or if PyTorch has not used CUDA."""
    global _raw_stream_of_torch
    if _raw_stream_of_torch is not None:
        return _raw_stream_of_torch(ordinal)
    torch: Any = sys.modules["torch"]
    cuda = getattr(torch, "cuda", None)  # Another thread may still import PyTorch.
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return 0
    _raw_stream_of_torch = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # It takes a tenth of the time.
    stream: int = cuda.current_stream(ordinal).cuda_stream
    return stream


def _stream_of_cupy(ordinal: int) -> int:
    """Return CuPy's current stream, 0 for the default stream."""
    cupy: Any = sys.modules["cupy"]
    current = getattr(getattr(cupy, "cuda", None), "get_current_stream", None)
    if current is None:  # another thread imports CuPy
        return 0
    stream: int = current(ordinal).ptr
    return stream


def streams_of(session: VerifiedSession) -> CallerStreams | None:
    """Return the order of a session. None on the CPU, or if the provider links no shared CUDA runtime."""
    runner = session._gpu_runner
    if not runner.caller:
        runner.caller = (_find_streams(session),)
    streams: CallerStreams | None = runner.caller[0]
    return streams


def _find_streams(session: VerifiedSession) -> CallerStreams | None:
    runtime = runtime_of(device_of(session))
    if runtime is None:
        return None
    options = InferenceSession.get_provider_options(session).get(CUDA, {})
    stream = int(options.get("user_compute_stream", "0")) if options.get("has_user_compute_stream") == "1" else None
    # ONNX Runtime 1.23 added _input_meminfos.
    places = zip(session._inputs_meta, getattr(session, "_input_meminfos", ()), strict=False)
    read_on_host = {value.name for value, memory in places if memory.name.lower() != "cuda"}
    return CallerStreams(
        runtime, stream if stream is None else stream or LEGACY_STREAM, read_on_host, session._gpu_context
    )


def wait_for_caller(session: VerifiedSession) -> None:
    """Have the session's next work wait for the GPU work that the calling thread has queued.

    Raises:
        ExecutionError: that work failed, for instance.
    """
    streams = streams_of(session)
    if streams is not None and not streams.is_idle():
        try:
            streams.wait()
        except CudaCallError as error:
            raise session._gpu_explained(error)  # noqa: B904 - the method sets the cause


def order_results(session: VerifiedSession) -> None:
    """Have later GPU work of the calling thread wait for the session's work.

    Raises:
        ExecutionError: the session's work failed, for instance.
    """
    streams = streams_of(session)
    if streams is not None:
        try:
            streams.order_results()
        except CudaCallError as error:
            raise session._gpu_explained(error)  # noqa: B904 - the method sets the cause


def is_value_on_gpu(value: Any) -> bool:
    """Return True for an OrtValue in the memory of a GPU."""
    if not isinstance(value, onnxruntime.OrtValue):
        return False
    has_device = value.is_tensor() or value.is_sparse_tensor()  # ONNX Runtime raises for other values
    return has_device and value.device_name() not in ("cpu", "cuda_pinned")


class ForeignArrayError(TypeError):
    """An array of another library was passed on. ONNX Runtime would first look at each of its elements."""


def wait_for_values(session: VerifiedSession, feed: Mapping[str, Any]) -> None:
    """Have the session's next work wait for the caller's queued work, if OrtValues of ``feed`` are on a GPU."""
    if any(map(is_value_on_gpu, feed.values())):
        wait_for_caller(session)


def refuse_foreign(feed: Mapping[str, Any]) -> None:
    """Raise ForeignArrayError if ``feed`` has an array of another library. Such arrays need a conversion first."""
    if any(map(is_foreign, feed.values())):
        raise ForeignArrayError("an array of another library is not converted")


def is_foreign(value: Any) -> bool:
    """Return True for an array of another library, on whatever device."""
    return hasattr(value, "__dlpack__") and not isinstance(value, (ndarray, onnxruntime.OrtValue))
