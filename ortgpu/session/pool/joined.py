"""Joined requests: a thread collects them into a batch, and the batch is copied into joined arrays."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ExecutionError, GPUError
from ...model.tensor_types import DTYPES
from ...process.background import attempt, this_thread
from ...provider import lifetime
from ...running.pinned import STAGED_FROM
from .workers import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...process.threads import Notice
    from ...provider.interfaces import Value
    from ...running.onnxruntimes import Results
    from .workers import Feeds, Request, Worker

    Arrays = dict[str, NDArray[Any]]

_ROOM = 4  # The next run gets rows for this many times the items of the last. A larger run is copied together.
_BUNDLE = 16  # A waiting collector wakes for this many requests, or for as many as its batch lacks.
_FRESH = 0.001  # seconds between two looks at the memory, as each asks the driver; a reset may come between them
_COPYING = 0.005  # seconds that a batch waits for callers while they copy requests into its rows


class Joining(Kind):
    """The kind of the requests of one Batched, and the rules for joining them.

    Sheets for the next batches are kept. Their rows without a request hold items of earlier runs. Threads take or give
    back a sheet by single steps of C, without a lock.

    Args:
        service: the Service. Its module stands above this one.
        max_batch: the most items of a run.
        max_wait: seconds.

    Attributes:
        sizes: the sizes of padded runs, in ascending order. Empty: any number of items runs unpadded.
        known: the forms that have run. For any other ONNX Runtime plans the run anew, whatever its size.
        sheet: the joined arrays with rows for the next requests.
    """

    def __init__(self, service: Any, max_batch: int, max_wait: float) -> None:
        super().__init__()
        self.max_batch, self.max_wait = max_batch, max_wait
        self.sizes: tuple[int, ...] = ()
        self.sheet: Sheet | None = None
        self._service = service
        self._feeds: Feeds = service.feeds
        self._last = 1  # items of the last run
        self._opening = threading.RLock()
        self._source: tuple[int, ...] = ()
        self._looked = 0.0  # the time when the memory was looked at
        self._idle: deque[Sheet] = deque(maxlen=service.most + 1)
        self.known: deque[object] = deque(maxlen=max(service.most + 1, 16))

    def keep(self, request: Request) -> None:
        """Copy the arrays of a request into rows of a batch, or into their own memory: the caller may change them."""
        sheet = self.sheet
        if (
            request.form is not None
            and (self._last > 1 or self.collector is not None)  # Others will run beside it.
            and (sheet is None or not sheet.left or sheet.takes(request))  # Rows for other requests stay.
        ):
            with contextlib.suppress(MemoryError, ExecutionError):
                for _ in range(2):  # The first sheet may have too few rows left.
                    is_fresh = self._looked + _FRESH > time.monotonic()
                    if sheet is None or sheet.source != self._source or not is_fresh or not sheet.takes(request):
                        sheet = self._sheet_for(request, max(self._last, len(self._service.waiting)))
                    if sheet is None:
                        break
                    if sheet.place(request):
                        return
        copies: Arrays = {}
        for name, array in request.feed.items() if request.form is not None else ():
            if array.nbytes >= STAGED_FROM:
                copies.clear()
                break
            copies[name] = array.copy()
        if copies:
            request.feed = copies
        else:
            request.feed, request.is_copied = self._feeds.copied(request.feed)

    def _sheet_for(self, request: Request, items: int) -> Sheet | None:
        """Return joined arrays with rows for requests like this one, and for about so many items of a batch.

        Return None while another thread, which may be stopped, opens them. Raises MemoryError, ExecutionError.
        """
        source = self.source()
        with this_thread.holds, attempt(self._opening) as is_free:
            if not is_free:
                return None
            sheet = self.sheet
            if sheet is None or sheet.source != source or not sheet.takes(request):
                self.sheet = None
                if sheet is not None:
                    sheet.seal()
                    if not sheet.end:
                        self.give_back(sheet)
                rows = min(_ROOM * max(items, request.items), self.max_batch)
                self.sheet = sheet = self.take(request, rows)
            return sheet

    def source(self) -> tuple[int, ...]:
        """Return the present identity of the memory. Raises ExecutionError if a session is closed or has lost its GPU.

        Arrays in other memory must not be written to: CUDA may have freed it.
        """
        self._looked = 0.0  # It stays so after an error.
        source = self._feeds.source()
        self._looked = time.monotonic()
        if source != self._source:
            self._source = source
            self._idle.clear()
        return source

    def take(self, request: Request, rows: int) -> Sheet:
        """Return a sheet of at least ``rows`` rows for requests like this one. Raises MemoryError, ExecutionError."""
        source = self.source()
        for sheet in reversed(list(self._idle)):  # The last one may still be in the caches of the CPU.
            if sheet.form == request.form and sheet.capacity >= rows and sheet.source == source:
                with contextlib.suppress(ValueError):  # Another thread may have taken the sheet.
                    self._idle.remove(sheet)
                    # Return a new object: a stopped thread of a caller may still take rows from the old one.
                    return Sheet(request, sheet.arrays, sheet.capacity, source, sheet.valid, self._feeds)
        # The size grows in steps, so that it seldom grows.
        rows = max(rows, min(1 << (rows - 1).bit_length(), self.max_batch))
        arrays = {}
        for name, array in request.feed.items():
            shape = (rows, *array.shape[1:])
            is_small = array.dtype.hasobject or math.prod(shape) * array.itemsize < STAGED_FROM
            arrays[name] = np.empty(shape, array.dtype) if is_small else self._feeds.empty(shape, array.dtype)
        return Sheet(request, arrays, rows, source, 0, self._feeds)

    def give_back(self, sheet: Sheet) -> None:
        if sheet.source == self._source:
            self._idle.append(sheet)

    def close(self) -> None:
        """Free all unused memory."""
        self.sheet = None
        self._idle.clear()

    def serve(self, first: Request, notice: Notice) -> None:
        service = self._service
        batch, worker = Batch(self, first), None
        batch.add(first)
        while worker is None:
            sheet = batch.sheet
            is_settled = sheet is None or sheet.is_settled()  # Check it before the queue.
            has_more = bool(service.waiting) and self._take(batch)
            if not batch.requests:
                service.stop_collecting(self, notice)
                return
            # A single request may run unchanged. A full batch is copied while another thread collects the next one.
            if len(batch.requests) > 1 and (batch.sheet is not None or not batch.is_full):
                # Requests without rows are copied before the run, and the run raises the error.
                with contextlib.suppress(Exception):
                    self._place(batch)
            seconds: float | None = 0  # to wait if nothing happens; None: until another batch ends
            if not (batch.is_full or self.is_closed or service.is_closed):
                if service.runs_of(self) >= len(service.serving):
                    seconds = None
                elif batch.items < self._last:
                    seconds = max(0, first.arrived + self.max_wait - time.monotonic())
            if seconds == 0 and (batch.sheet is not sheet or not is_settled):
                assert batch.sheet is not None
                notice.take(batch.sheet.seal())
                continue
            if seconds == 0:
                worker = service.try_start(batch, self, notice)
                if worker is not None:
                    break
                if service.is_hopeless:
                    service.stop_collecting(self, notice)
                    for request in batch.requests:  # All these requests have begun.
                        request.outcome.fail(service.why_over(self))
                    return
                seconds = None
            lacking = (self.max_batch if seconds is None else self._last) - batch.items
            before, self.bundle = self.bundle, min(_BUNDLE, lacking) or _BUNDLE
            if not has_more and self.bundle >= before:  # Else as many may wait already.
                notice.take(seconds)
        self.bundle, self._last = 1, batch.items
        self._answer(batch, worker)
        del first, batch  # The traceback of a request's error holds this frame.

    def _take(self, batch: Batch) -> bool:
        """Take the waiting requests that fit into the batch. Return False if there are none."""
        count = len(batch.requests)
        for request in list(self._service.waiting):
            if batch.is_full:
                break
            if batch.suits(request):
                batch.is_full = batch.items + request.items > self.max_batch
                if not batch.is_full and self._service.forget(request):
                    batch.add(request)
        sheet, most = batch.sheet, self.max_batch
        batch.is_full = (
            batch.is_full
            or batch.items == most
            or (sheet is not None and sheet.capacity >= most and sheet.is_whole(batch.items))
        )
        return len(batch.requests) > count

    def _place(self, batch: Batch) -> None:
        """Copy the requests without rows into joined arrays. Raises MemoryError, ExecutionError."""
        sheet = batch.sheet or self._sheet_for(batch.first, max(batch.items, self._last))
        unplaced = [request for request in batch.requests if request.sheet is None]
        if sheet is not None and unplaced:
            sheet.place(*unplaced)
        batch.sheet = batch.sheet or batch.first.sheet

    def _answer(self, batch: Batch, worker: Worker) -> None:
        """Run the requests together. If the run fails and the GPU is not the cause, run each request alone."""
        error: BaseException | None = None
        requests, results, rows = batch.requests, list[Any](), 0
        try:
            try:
                feed, rows = batch.feed()
            except BaseException:
                self._service.release(worker, batch)
                raise
            outputs = self._service.run(batch, batch.first.names, feed, worker)
            results = batch.taken_apart(outputs, rows) if rows else [outputs]
        except BaseException as raised:  # noqa: BLE001 - the outcomes raise it
            lifetime.let_go_of_variables(raised)  # arrays
            error = raised
        if error is None:  # After an error a row may hold an invalid item, and must not be padding later.
            if self.sizes and batch.first.form not in self.known:
                self.known.append(batch.first.form)
            if batch.sheet is not None:
                batch.sheet.valid = max(batch.sheet.valid, batch.items)
                self.give_back(batch.sheet)
        batch.sheet = None  # Release it before the waiting threads continue.
        if rows and (
            not results if error is None else isinstance(error, Exception) and not isinstance(error, GPUError)
        ):
            del error
            for request in requests:
                request.sheet = None
                self._service.answer(request)
            return
        for number, request in enumerate(requests):
            request.feed = request.sheet = None
            if error is None:
                request.outcome.give(results[number])
            elif number and isinstance(error, GPUError):  # A shared error would collect the frames of all callers.
                request.outcome.fail(lifetime.fresh_copy(error))
            else:
                request.outcome.fail(error)
        del batch, requests, request, error  # Break the cycle of outcome, exception and this frame.


class Declared:
    """The declared inputs of a model. Only a request that conforms to them can be joined with others."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._inputs = []  # For each: name, type, and the axes but the first. None: a free axis, an unknown shape.
        for value in inputs:
            axes = [length if isinstance(length, int) and length >= 0 else None for length in value.shape[1:]]
            self._inputs.append((value.name, DTYPES.get(value.type), axes if value.shape else None))

    def items_and_form(self, feed: Any, most: int) -> tuple[int, object]:
        """Return the number of items and the form. A feed gets no form if it would make a joined run fail."""
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
    """Joined arrays of some rows. Requests of the same form and with the same outputs get the rows one after another.

    Callers' threads take rows by a single step of C, and no lock. A batch runs without a copy if it holds all used
    rows.

    Attributes:
        valid: the number of rows, from the first, that held items of a run.
        end: the number of rows, from the first, for requests.
    """

    def __init__(
        self, request: Request, arrays: Arrays, capacity: int, source: tuple[int, ...], valid: int, feeds: Feeds
    ) -> None:
        self.form, self.names, self.arrays, self.source = request.form, request.names, arrays, source
        self.capacity = self.end = capacity
        self.valid = valid
        self._feeds = feeds
        self._free = iter(range(capacity))
        self._written: list[int] = []  # numbers of rows
        self._until: float | None = None

    @property
    def left(self) -> int:
        return operator.length_hint(self._free)

    def takes(self, request: Request) -> bool:
        return self.left > 0 and self.form == request.form and self.names == request.names

    def place(self, *requests: Request) -> bool:
        """Copy requests into free rows. Return False, and give no more rows away, if there are too few for all."""
        items = sum(request.items for request in requests)
        rows = list(itertools.islice(self._free, items))
        if len(rows) < items:
            if rows:  # Only a single call gets rows that are too few.
                self.end = rows[0]
            return False
        row = rows[0]
        for name, array in self.arrays.items():
            self._feeds.fill(array[row : row + items], *[request.feed[name] for request in requests])
        for request in requests:
            request.feed = {name: array[row : row + request.items] for name, array in self.arrays.items()}
            request.sheet, request.row = self, row
            row += request.items
        self._written.append(items)
        return True

    def seal(self) -> float:
        """Give no more rows away. Return the seconds to wait before the next check whether all rows are written."""
        left = len(list(self._free))
        if left:  # Another thread may have sealed it.
            self.end -= left
        if self._until is None:
            self._until = time.monotonic() + _COPYING
            return 0
        return _COPYING / 10

    def is_settled(self) -> bool:
        """Return True once all rows are written. A slow copy, as in a signal handler, is not waited for."""
        return self._until is not None and (sum(self._written) >= self.end or time.monotonic() > self._until)

    def is_whole(self, items: int) -> bool:
        """Return True if a batch of this number of items holds all used rows."""
        return not self.left and items == self.end


class Batch:
    """Requests like the first one. A thread collects them.

    Attributes:
        sheet: the joined arrays with all requests, or with some.
    """

    def __init__(self, joining: Joining, first: Request) -> None:
        self.joining, self.first = joining, first
        self.requests: list[Request] = []
        self.items = 0
        self.is_full = first.items >= joining.max_batch
        self.sheet: Sheet | None = None

    def add(self, request: Request) -> None:
        """Add a request that has left the queue, unless it was cancelled."""
        if request.outcome.begin():
            self.requests.append(request)
            self.items += request.items
            self.sheet = self.sheet or request.sheet
        else:
            request.outcome.drop()

    def suits(self, request: Request) -> bool:
        """Return True if a request is like the first one and has rows beside it, or can get them."""
        sheet = self.sheet
        return request.runs_with(self.first) and (
            sheet is None
            or sheet.capacity < self.joining.max_batch  # A sheet that is too small is copied into a new one.
            or request.sheet is sheet
            or (request.sheet is None and request.items <= sheet.left)
        )

    def feed(self) -> tuple[Any, int]:
        """Return the inputs of the run and their number of items, or the inputs of a single request and 0.

        The first run of a form is not padded, since ONNX Runtime plans it anyhow. Raises MemoryError, ExecutionError.
        """
        rows, joining = self.items, self.joining
        if joining.sizes and self.first.form in joining.known:
            rows = joining.sizes[bisect.bisect_left(joining.sizes, rows)]
        sheet = self.sheet
        if sheet is not None and (
            not sheet.is_whole(self.items)
            or any(request.sheet is not sheet for request in self.requests)
            or sheet.source != joining.source()
        ):
            sheet = self.sheet = None
        if len(self.requests) == 1 and rows == self.items:
            return self.requests[0].feed, 0
        if sheet is None or sheet.capacity < rows:
            sheet = self.sheet = joining.take(self.first, rows)
            sheet.place(*self.requests)
            sheet.seal()
        for array in sheet.arrays.values():
            filled = max(sheet.valid, self.items)
            array[filled:rows] = array[:1]
        sheet.valid = max(sheet.valid, rows)
        return {name: array[:rows] for name, array in sheet.arrays.items()}, rows

    def taken_apart(self, outputs: Results, rows: int) -> list[Results]:
        """Return the outputs of each request. Return an empty list if the first axis of an output does not fit.

        The outputs are copies: a caller that keeps an output must not keep the memory of all.
        """
        if any(output.shape[:1] != (rows,) for output in outputs):
            return []
        return [
            [output[request.row : request.row + request.items].copy() for output in outputs]
            for request in self.requests
        ]
