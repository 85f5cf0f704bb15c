"""Methods of a GPUSession for throughput that InferenceSession does not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..running.onnxruntimes import LastOfOurs

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class ThroughputMethods(LastOfOurs):
    """The methods for throughput. Each imports its modules at its first call."""

    def run_on_device(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Any]:
        """Run the model as ``run`` does, and return the results as OrtValues in this session's device memory.

        The results are complete when this returns. With ONNX Runtime 1.26 or newer they have ``__dlpack__``:
        ``torch.from_dlpack(value)`` shares the memory. The memory is reused once value and tensor are gone, so keep one
        of them until your stream is done with it. Up to 1.31 booleans are uint8 there. Inputs and outputs must be
        tensors and not of strings. ONNX Runtime raises RuntimeError for other types, and for wrong names, shapes and
        types.
        """
        from ..running.device_arrays import run_on_device

        return run_on_device(self, output_names, input_feed, run_options)

    def map(
        self, feeds: Iterable[Mapping[str, Any]], *, in_flight: int | None = None, output_names: Any = None
    ) -> Iterator[Any]:
        """Yield ``run(output_names, feed)`` for each of ``feeds``, in their order, with up to four runs at a time.

        Copies to the GPU, computation and copies back overlap, and arrays go through pinned memory. This gives the
        highest throughput. Four runs need the GPU memory of four; a smaller ``in_flight`` needs less. The iterating
        thread makes runs of less than a millisecond itself, if that takes less time for each feed.

        Args:
            feeds: any iterable, also an endless generator. The iterating thread consumes it. A generator may fill the
                same arrays for each feed, because each feed is copied before the next is requested; several threads
                copy large arrays into pinned memory. A feed that cannot be copied runs before the next is requested,
                for instance an array on the GPU with ONNX Runtime older than 1.30. The feeds of a ``list`` or ``tuple``
                are not copied, so their arrays must not change until their results are there.
            in_flight: the most feeds that were taken and whose results were not yielded yet; 8 by default. Use 1 for a
                generator that needs the result of a feed to make the next. Nothing is copied then.

        The first exception of ``run`` or ``feeds`` is raised in its place, after the results of earlier feeds, and ends
        the iteration. Ending the iteration early, by ``break``, ``close()`` or dropping it, waits for the running runs
        and leaves nothing running. If the garbage collector ends it during another run, it does not wait, and the runs
        end by themselves. Only one thread at a time may ask for the next result, as with any generator.

        Raises:
            ExecutionError: the session is closed.
            TypeError, ValueError: ``feeds`` is not iterable or is a single feed; ``in_flight`` is not a positive int.
        """
        from ..running.pipeline import map_session

        return map_session(self, feeds, in_flight, output_names)

    def pinned_empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """Return an empty array of ``shape`` and ``dtype`` in pinned memory, from which copies to the GPU are fastest.

        ``map`` makes no further copy of such arrays in a list of feeds. The memory is reused once the array and all its
        views are gone, and freed after ``close()``. It is ordinary memory, and a debug message says so, if the session
        is on the CPU, if ``pinned_memory_limit`` is reached, or if pinning fails.

        Raises:
            ExecutionError: the session is closed.
            TypeError: ``dtype`` is that of Python objects.
        """
        from ..running.pinned import memory_of

        return memory_of(self).empty(shape, dtype)
