"""Requests that may run together: the batch that a thread collects, and the arrays that it is copied into."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import GPUError
from ...model.tensor_types import DTYPES
from ...provider import lifetime
from ...running.pinned import STAGED_FROM
from .requests import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...process.threads import Notice
    from ...provider.interfaces import Value
    from ...running.onnxruntimes import Results
    from .requests import Queue, Request
    from .workers import Feeds, Worker

    Arrays = dict[str, NDArray[Any]]

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait


class Joining(Kind):
    """How the requests of one Batched are joined.

    Args:
        max_batch: the most items of a run.
        max_wait: seconds.
        buffers: keeps joined arrays.

    Attributes:
        sizes: that runs are padded to, in ascending order. Empty: any number of items runs as it is.
    """

    def __init__(self, service: Queue, max_batch: int, max_wait: float, buffers: Buffers) -> None:
        super().__init__()
        self.max_batch, self.max_wait, self.buffers = max_batch, max_wait, buffers
        self.sizes: tuple[int, ...] = ()
        self._service = service
        self._last = 1  # items of the last run

    def serve(self, first: Request, notice: Notice) -> None:
        service = self._service
        batch, taken, worker = Batch(self, first), [first], None
        while worker is None:
            if service.waiting and not batch.is_full:
                self._take(batch, taken)
            for request in taken:
                if request.outcome.begin():
                    batch.requests.append(request)
                else:  # it was cancelled
                    batch.items -= request.items
                    request.outcome.drop()
            if not batch.requests:
                service.stop_collecting(self, notice)
                return
            seconds = self._seconds_until_start(batch)
            if seconds == 0:
                worker = service.try_start(batch, self, notice)
                if worker is not None:
                    break
                if service.is_hopeless:
                    service.stop_collecting(self, notice)
                    for request in batch.requests:  # which have begun
                        request.outcome.fail(service.why_over(self))
                    return
                seconds = None
            with contextlib.suppress(Exception):  # what is not copied is copied before the run, which raises it
                batch.copy()
            if not taken:
                notice.take(seconds)
            taken = []
        self._last = batch.items
        self._answer(batch, worker)
        del first, batch, taken  # they have an error, whose traceback has this frame

    def _take(self, batch: Batch, taken: list[Request]) -> None:
        """Take the waiting requests that fit into the batch."""
        for request in list(self._service.waiting):
            if not request.runs_with(batch.first):
                continue
            batch.is_full = batch.items + request.items > self.max_batch
            if batch.is_full:
                return
            if self._service.forget(request):
                taken.append(request)
                batch.items += request.items
            batch.is_full = batch.items == self.max_batch
            if batch.is_full:
                return

    def _seconds_until_start(self, batch: Batch) -> float | None:
        """Return how long a batch has to wait if nothing happens. None: until another one ends."""
        if batch.is_full or self.is_closed or self._service.is_closed:
            return 0
        if self._service.runs_of(self) >= len(self._service.serving):
            return None
        if batch.items >= self._last:
            return 0
        return max(0, batch.first.arrived + self.max_wait - time.monotonic())

    def _answer(self, batch: Batch, worker: Worker | None = None) -> None:
        """Run the requests together; in halves if that fails and the GPU is not the cause."""
        error: BaseException | None = None
        requests, results = batch.requests, list[Any]()
        try:
            try:
                feed, rows = batch.feed()
            except BaseException:
                if worker is not None:
                    self._service.release(worker, batch)
                raise
            outputs = self._service.run(batch, batch.first.names, feed, worker)
            results = batch.taken_apart(outputs, rows) if rows else [outputs]
            if not results:
                if len(requests) > 1:
                    raise ValueError("the outputs of these requests cannot be taken apart")
                results = [self._service.run(batch, batch.first.names, requests[0].feed)]
        except BaseException as raised:  # noqa: BLE001 - the outcomes raise it
            lifetime.let_go_of_variables(raised)  # arrays
            error = raised
        batch.let_go(has_run=error is None)  # before the waiting threads go on
        if isinstance(error, Exception) and not isinstance(error, GPUError) and len(requests) > 1:
            del error
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                self._answer(Batch(self, part[0], part))
            return
        for number, request in enumerate(requests):
            request.feed = None
            if error is None:
                request.outcome.give(results[number])
            elif number and isinstance(error, GPUError):  # one that several raise would have the frames of all
                request.outcome.fail(lifetime.fresh_copy(error))
            else:
                request.outcome.fail(error)
        del batch, requests, request, error  # break the cycle: outcome, exception, this frame


class Declared:
    """What a model declares of its inputs, to which a request must conform to be joined with others."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = [(each.name, DTYPES.get(each.type), _other_axes(each.shape)) for each in inputs]

    def items_and_form(self, feed: Any, most: int) -> tuple[int, object]:
        """Return the number of items and the form. A feed that would spoil the run of others has none."""
        if type(feed) is not dict or len(feed) != len(self._inputs):
            return 1, None
        items, parts = 0, list[object]()
        for name, dtype, declared in self._inputs:
            array = feed.get(name)
            if not isinstance(array, np.ndarray) or not array.ndim or (dtype is not None and array.dtype != dtype):
                return 1, None
            count, *others = array.shape
            items = items or count
            if count != items or not 0 < count <= most:
                return 1, None
            if declared is not None:
                if len(others) != len(declared):
                    return 1, None
                for length, other in zip(declared, others, strict=True):
                    if length not in (other, None):
                        return 1, None
            parts.append((array.dtype, *others))
        return items, tuple(parts)


class Sheet:
    """Joined arrays for requests of one form: ``capacity`` rows, of which the first ``valid`` hold items."""

    def __init__(self, form: object, arrays: Arrays, capacity: int, source: tuple[int, ...]) -> None:
        self.form, self.arrays, self.capacity, self.source = form, arrays, capacity, source
        self.valid = 0


class Buffers:
    """Sheets, which are kept for the next batches. Rows that no request fills hold items that have run before.

    Callers' threads never come here, so no lock is needed: a sheet is taken and given back by single steps of C.

    Args:
        feeds: gives memory.
        most: number of sheets that are kept, and forms that are known.
    """

    def __init__(self, feeds: Feeds, most: int) -> None:
        self._feeds = feeds
        self._source: tuple[int, ...] = ()
        self._idle: deque[Sheet] = deque(maxlen=most)
        self._known: deque[object] = deque(maxlen=max(most, 16))

    def knows(self, form: object) -> bool:
        """Return True if a batch of this form has run. Else its run is planned anew, whatever its size."""
        return form in self._known

    def source(self) -> tuple[int, ...]:
        """Return what identifies the memory now. Arrays in other memory must not be written to: CUDA may have freed it.

        Raises:
            ExecutionError: a session is closed, or has lost its GPU.
        """
        source = self._feeds.source()
        if source != self._source:
            self._source = source
            self._idle.clear()
        return source

    def take(self, request: Request, rows: int) -> Sheet:
        """Return a sheet of at least so many rows for requests like this one. Raises MemoryError."""
        for sheet in list(self._idle):
            if sheet.form == request.form and sheet.capacity >= rows and sheet.source == self._source:
                with contextlib.suppress(ValueError):  # another thread took it
                    self._idle.remove(sheet)
                    return sheet
        arrays = {}
        for name, given in request.feed.items():
            shape = (rows, *given.shape[1:])
            is_small = given.dtype.hasobject or math.prod(shape) * given.itemsize < STAGED_FROM
            arrays[name] = np.empty(shape, given.dtype) if is_small else self._feeds.empty(shape, given.dtype)
        return Sheet(request.form, arrays, rows, self._source)

    def give_back(self, sheet: Sheet) -> None:
        if sheet.source == self._source:
            self._idle.append(sheet)

    def has_run(self, form: object) -> None:
        if form not in self._known:
            self._known.append(form)

    def close(self) -> None:
        """Free the memory that is not in use."""
        self._idle.clear()


class Batch:
    """Requests like the first, which a thread collects and copies into joined arrays."""

    def __init__(self, joining: Joining, first: Request, requests: Sequence[Request] = ()) -> None:
        self.joining, self.first, self._buffers = joining, first, joining.buffers
        self.requests = list(requests)
        self.items = 0 if requests else first.items  # also of requests that have not begun
        for request in requests:
            self.items += request.items
        self.is_full = self.items >= joining.max_batch
        self._sheet: Sheet | None = None
        self._copied = self._end = 0  # requests and items in the sheet

    def rows(self) -> int:
        """Return the items of the run, with padding. The first run of a form is planned anyhow, and not padded."""
        if self._buffers.knows(self.first.form):
            for size in self.joining.sizes:
                if size >= self.items:
                    return size
        return self.items

    def copy(self, rows: int | None = None) -> None:
        """Copy what is not copied yet. Raises MemoryError, ExecutionError; calling it again goes on.

        Without ``rows``, a single request is left as it is: it may run alone.
        """
        rows = rows or (0 if len(self.requests) == 1 else self.rows())
        if not rows:
            return
        source = self._buffers.source()
        if self._sheet is None or source != self._sheet.source or rows > self._sheet.capacity:
            step = min(1 << (rows - 1).bit_length(), self.joining.max_batch)  # larger in steps, as it seldom grows
            self._sheet, self._copied, self._end = self._buffers.take(self.requests[0], max(rows, step)), 0, 0
        for request in self.requests[self._copied :]:
            start, self._end = self._end, self._end + request.items
            for name, array in self._sheet.arrays.items():
                np.copyto(array[start : self._end], request.feed[name])  # releases the interpreter lock
            self._copied += 1
            self._sheet.valid = max(self._sheet.valid, self._end)
        if rows > self._sheet.valid:
            for array in self._sheet.arrays.values():
                array[self._sheet.valid : rows] = array[:1]
            self._sheet.valid = rows

    def feed(self) -> tuple[Any, int]:
        """Return the inputs of the run and their number of items; 0 if they are those of a single request as it is."""
        rows = self.rows() if self.joining.sizes else self.items
        if self.first.form is None or (len(self.requests) == 1 and rows == self.items and self._sheet is None):
            return self.requests[0].feed, 0
        self.copy(rows)
        assert self._sheet is not None
        return {name: array[:rows] for name, array in self._sheet.arrays.items()}, rows

    def let_go(self, *, has_run: bool) -> None:
        """Give the arrays back. Those of a run that failed may hold an invalid item, which would be padding later."""
        if has_run and self.joining.sizes:
            self._buffers.has_run(self.first.form)
        if self._sheet is not None and has_run:
            self._buffers.give_back(self._sheet)
        self._sheet = None

    def taken_apart(self, outputs: Results, rows: int) -> list[Results]:
        """Return the outputs of each request; nothing if an output has no axis for so many items.

        They are copies: one that is kept must not keep the memory of all.
        """
        if any(output.shape[:1] != (rows,) for output in outputs):
            return []
        results, end = [], 0
        for request in self.requests:
            start, end = end, end + request.items
            results.append([output[start:end].copy() for output in outputs])
        return results


def _other_axes(shape: Sequence[int | str | None]) -> list[int | None] | None:
    """Return the lengths of the axes but the first, None for a free one. None if the shape is not known."""
    return [each if isinstance(each, int) and each >= 0 else None for each in shape[1:]] if shape else None
