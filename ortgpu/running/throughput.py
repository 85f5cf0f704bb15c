"""What a GPUSession has for throughput and an InferenceSession has not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .onnxruntimes import LastOfOurs

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class ThroughputMethods(LastOfOurs):
    """Each imports what it needs when it is first called: a session that is not asked pays nothing."""

    def run_on_device(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Any]:
        """As ``run``, with results that stay where they are computed: OrtValues, complete, in this session's memory.

        Since ONNX Runtime 1.26 they have ``__dlpack__``: ``torch.from_dlpack(value)`` shares the memory. It is used
        again when value and tensor are gone, so keep one of them until your stream is done with it. Booleans are uint8
        there until 1.31. Inputs and outputs must be tensors, and not of strings: ONNX Runtime raises RuntimeError for
        others, and for names, shapes and types that do not fit.
        """
        from .device_arrays import run_on_device

        return run_on_device(self, output_names, input_feed, run_options)

    def map(
        self, feeds: Iterable[Mapping[str, Any]], *, in_flight: int | None = None, output_names: Any = None
    ) -> Iterator[Any]:
        """What ``run(output_names, feed)`` gives for each of ``feeds``, in their order, with up to four runs at a time.

        Copies in, computation and copies out overlap, and arrays go through pinned memory: the way to the highest
        throughput. Four runs at a time need the GPU memory of four; a smaller ``in_flight`` needs less.

        Args:
            feeds: any iterable, also a generator without end. It is consumed in the thread that iterates. A generator
                may fill the same arrays again for each feed: what it gives is copied before it is asked for the next,
                large arrays into pinned memory, by several threads. What cannot be copied, as an array that is on the
                GPU where ONNX Runtime is older than 1.30, is run before that. A ``list`` or ``tuple`` of feeds is not
                copied: its arrays must stay as they are until their results are there.
            in_flight: how many feeds may have been taken whose results were not handed out; 8 unless given. A generator
                that needs the result of a feed to make the next wants 1; nothing is copied then.

        The first exception, of ``run`` or of ``feeds``, comes out at its place, after the results of the feeds before
        it, and ends the iteration. Ending it early, by ``break``, ``close()`` or dropping it, waits for the runs under
        way and leaves nothing running. Not so where the garbage collector ends it in the middle of another run: these
        runs then end by themselves. As of any generator, one thread at a time may ask for the next result.

        Raises:
            ExecutionError: the session is closed.
            TypeError, ValueError: ``feeds`` is not iterable, or one feed; ``in_flight`` is not a positive int.
        """
        from .pipeline import map_session

        return map_session(self, feeds, in_flight, output_names)

    def pinned_empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = "float32") -> NDArray[Any]:
        """As numpy.empty, in pinned memory: copies from it to the GPU are fastest, and ``map`` makes no other of those
        in a list.

        It is used again when the array and all views of it are gone, and given back after ``close()``. On the CPU,
        beyond ``pinned_memory_limit`` or where it cannot be pinned, it is ordinary memory, and a debug message says so.

        Raises:
            ExecutionError: the session is closed.
            TypeError: ``dtype`` is that of Python objects.
        """
        from .pinned import memory_of

        return memory_of(self).empty(shape, dtype)
