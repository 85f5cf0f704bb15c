"""Requests that may run together, and the batch into whose arrays they are copied."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.tensor_types import DTYPES
from ...process.threads import Outcome

if TYPE_CHECKING:
    import asyncio

    from numpy.typing import NDArray

    from ...provider.interfaces import Value
    from ...running.onnxruntimes import Results

    Empty = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]


class Request:
    """A request. ``key`` is what requests have in common that run together; None: it runs alone."""

    __slots__ = ("__weakref__", "arrived", "feed", "items", "key", "names", "outcome")

    def __init__(self, names: Any, feed: Any, items: int, key: object, outcome: Outcome[Any]) -> None:
        self.names, self.feed, self.items, self.key, self.outcome = names, feed, items, key, outcome
        self.arrived = time.monotonic()


class Form:
    """What a model declares of its inputs, which a request must have to be joined with others."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = [(each.name, DTYPES.get(each.type), _other_axes(each.shape)) for each in inputs]

    def items_and_key(self, names: Any, feed: Any, most: int) -> tuple[int, object]:
        """Return the number of items and the key. A request that would spoil the run of others has none."""
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
        return items, (tuple(names) if isinstance(names, list) else names, parts)


class Batch:
    """Requests of one key, which a thread collects and copies into joined arrays.

    Args:
        first: has the key and the outputs of all.
        empty: makes an array.
        pads: the run may have more rows than there are items.
        requests: those that are known already.
    """

    def __init__(self, first: Request, empty: Empty, *, pads: bool, requests: Sequence[Request] = ()) -> None:
        self._empty, self._pads = empty, pads
        self.key, self.names, self.arrived = first.key, first.names, first.arrived
        self.requests = list(requests)
        self.items = sum(each.items for each in requests)  # also of requests that are not copied yet
        self.is_full = False
        self._arrays: dict[str, NDArray[Any]] = {}
        self._copied = self._rows = 0  # requests and items in these arrays

    def copy(self, rows: int) -> None:
        """Copy what is not copied yet. The first time makes arrays of ``rows`` items. After an error it can go on."""
        requests = self.requests[self._copied :]
        if requests and not self._arrays:
            first: Mapping[str, NDArray[Any]] = requests[0].feed
            arrays = {name: self._empty((rows, *array.shape[1:]), array.dtype) for name, array in first.items()}
            for name, array in arrays.items() if self._pads else ():
                array[self.items :] = first[name][:1]  # the place of further requests, or padding
            self._arrays = arrays
        for request in requests:
            end = self._rows + request.items
            for name, array in self._arrays.items():
                np.copyto(array[self._rows : end], request.feed[name])  # releases the interpreter lock
            self._rows, self._copied = end, self._copied + 1

    def feed(self, rows: int) -> tuple[Any, bool]:
        """Return the inputs of a run of ``rows`` items, and True if they are those of a single request as it is."""
        if self.key is None or (len(self.requests) == 1 and rows == self.items and not self._arrays):
            return self.requests[0].feed, True
        self.copy(rows)
        return {name: array[:rows] for name, array in self._arrays.items()}, False

    def let_go(self) -> None:
        """Free the memory of the inputs."""
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
