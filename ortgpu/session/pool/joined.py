"""Requests that may run together, and the batch into whose arrays they are copied."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.tensor_types import DTYPES
from ...process.threads import Outcome
from ...running.pinned import STAGED_FROM, OrdinaryMemory

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from ...provider.interfaces import Value
    from ...running.feed_copies import FeedCopies
    from ...running.onnxruntimes import Results
    from ...running.pinned import PinnedMemory

    Arrays = dict[str, NDArray[Any]]


class Request:
    """A request. ``form`` has the types and shapes of its inputs without the first axis. None: it runs alone."""

    __slots__ = ("__weakref__", "arrived", "feed", "form", "items", "names", "outcome")

    def __init__(self, names: Any, feed: Any, items: int, form: object, outcome: Outcome[Any]) -> None:
        self.names, self.feed, self.items, self.form, self.outcome = names, feed, items, form, outcome
        self.arrived = time.monotonic()

    def runs_with(self, other: Request) -> bool:
        if self.form is None:
            return self is other
        return self.form == other.form and self.names == other.names


class Declared:
    """What a model declares of its inputs, to which a request must conform to be joined with others."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = [(each.name, DTYPES.get(each.type), _other_axes(each.shape)) for each in inputs]

    def items_and_form(self, feed: Any, most: int) -> tuple[int, object]:
        """Return the number of items and the form. A feed that would spoil the run of others has none."""
        if type(feed) is not dict or len(feed) != len(self._inputs):
            return 1, None
        items, parts = 0, []
        for name, dtype, declared in self._inputs:
            array = feed.get(name)
            if not isinstance(array, np.ndarray) or not array.ndim or (dtype is not None and array.dtype != dtype):
                return 1, None
            count, *others = array.shape
            items = items or count
            if count != items or not 0 < count <= most:
                return 1, None
            if declared is not None and (
                len(others) != len(declared)
                or any(length not in (other, None) for length, other in zip(declared, others, strict=True))
            ):
                return 1, None
            parts.append((array.dtype, others))
        return items, parts


class Buffers:
    """Joined arrays, which are kept for the next batches. Rows that no request fills hold items that have run before.

    Args:
        rows: of each array.
        most: number of batches whose arrays are kept.
        memories: returns the pinned memories of the sessions. Raises ExecutionError if one has lost its GPU. None: the
            sessions are in other processes.
        limit: bytes of ordinary memory to keep.
    """

    def __init__(self, rows: int, most: int, memories: Callable[[], Iterable[PinnedMemory]] | None, limit: int) -> None:
        self._rows, self._memories = rows, memories
        self._memory: OrdinaryMemory | FeedCopies
        if memories is None:
            self._memory = OrdinaryMemory(limit)
        else:
            from ...running.feed_copies import FeedCopies  # not above: it imports ONNX Runtime

            self._memory = FeedCopies(memories, limit, None)
        self._source: tuple[int, ...] = ()
        self._idle: deque[tuple[object, Arrays]] = deque(maxlen=most)
        self._lock = threading.Lock()  # for threads of the service, in which no interrupt comes

    def source(self) -> tuple[int, ...]:
        """Return what identifies the memory now. Arrays in other memory must not be written to: CUDA may have freed it.

        Raises:
            ExecutionError: a session is closed, or has lost its GPU.
        """
        source = tuple(id(memory) for memory in self._memories()) if self._memories is not None else ()
        if source != self._source:
            self._source = source
            self._idle.clear()
        return source

    def take(self, request: Request) -> Arrays:
        """Return arrays for requests like this one. Raises MemoryError."""
        with self._lock:
            for number, (form, arrays) in enumerate(self._idle):
                if form == request.form:
                    del self._idle[number]
                    return arrays
        arrays = {}
        for name, given in request.feed.items():
            shape = (self._rows, *given.shape[1:])
            small = given.dtype.hasobject or math.prod(shape) * given.itemsize < STAGED_FROM
            arrays[name] = np.empty(shape, given.dtype) if small else self._memory.empty(shape, given.dtype)
            arrays[name][:] = given[:1]
        return arrays

    def give_back(self, form: object, arrays: Arrays, source: tuple[int, ...]) -> None:
        with self._lock:
            if source == self._source:
                self._idle.append((form, arrays))

    def close(self) -> None:
        """Free the memory that is not in use."""
        self._idle.clear()
        self._memory.close()


class Batch:
    """Requests like the first, which a thread collects and copies into joined arrays."""

    def __init__(self, first: Request, buffers: Buffers, requests: Sequence[Request] = ()) -> None:
        self.first, self.arrived, self._buffers = first, first.arrived, buffers
        self.requests = list(requests)
        self.items = sum(each.items for each in requests)  # also of requests that are not copied yet
        self.is_full = False
        self._arrays: Arrays = {}
        self._copied = self._rows = 0  # requests and items in these arrays
        self._source: tuple[int, ...] = ()

    def copy(self) -> None:
        """Copy what is not copied yet. Raises MemoryError, ExecutionError; calling it again goes on."""
        source = self._buffers.source()
        if source != self._source:
            self._arrays, self._copied, self._rows, self._source = {}, 0, 0, source
        requests = self.requests[self._copied :]
        if requests and not self._arrays:
            self._arrays = self._buffers.take(requests[0])
        for request in requests:
            end = self._rows + request.items
            for name, array in self._arrays.items():
                np.copyto(array[self._rows : end], request.feed[name])  # releases the interpreter lock
            self._rows, self._copied = end, self._copied + 1

    def feed(self, rows: int) -> tuple[Any, bool]:
        """Return the inputs of a run of ``rows`` items, and True if they are those of a single request as it is."""
        if self.first.form is None or (len(self.requests) == 1 and rows == self.items and not self._arrays):
            return self.requests[0].feed, True
        self.copy()
        return {name: array[:rows] for name, array in self._arrays.items()}, False

    def let_go(self, *, has_run: bool) -> None:
        """Give the arrays back. Those of a run that failed may hold an invalid item, which would be padding later."""
        if self._arrays and has_run:
            self._buffers.give_back(self.first.form, self._arrays, self._source)
        self._arrays = {}

    def taken_apart(self, outputs: Results) -> list[Results]:
        """Return the outputs of each request. They are copies: one that is kept must not keep the memory of all."""
        results, end = [], 0
        for request in self.requests:
            start, end = end, end + request.items
            results.append([output[start:end].copy() for output in outputs])
        return results


class Awaited(Outcome[Any]):
    """The outcome of a request that a task of an event loop waits for."""

    def __init__(self, mailbox: Mailbox, answer: asyncio.Future[Any]) -> None:
        super().__init__()
        self._mailbox, self._answer = mailbox, answer

    def give(self, result: Any) -> None:
        self._mailbox.put(self._answer, result, None)

    def fail(self, error: BaseException) -> None:
        self._mailbox.put(self._answer, None, error)


class Mailbox:
    """Passes outcomes to an event loop, many at a time, since waking it takes longer than all else."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_called = False

    def put(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._outcomes.append((answer, result, error))
        if not self._is_called:
            self._is_called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                answer.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False
        while self._outcomes:
            answer, result, error = self._outcomes.popleft()
            if answer.done():  # its task was cancelled
                continue
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)


def _other_axes(shape: Sequence[int | str | None]) -> list[int | None] | None:
    """Return the lengths of the axes but the first, None for a free one. None if the shape is not known."""
    return [each if isinstance(each, int) and each >= 0 else None for each in shape[1:]] if shape else None
