"""Requests of few items that become one run, and are taken apart again: what ``batched()`` returns."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from ...errors import ExecutionError, GPUError, QueueFullError, manual
from ...process.background import uninterrupted
from ...process.threads import FutureOutcome, Notice, Outcome, Threads
from ...provider import lifetime
from ...running.pipeline import as_it_is_now, for_many_runs
from . import joinable
from .joined import Awaited, Batch, Buffers, Declared, Mailbox, Request

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ...provider.interfaces import Value
    from ...running.onnxruntimes import Results
    from ...running.pinned import PinnedMemory

_WORKS_AT_FEEDS = True  # a thread in here may hold what others need; see pipeline._may_wait


class Batched:
    """A service that joins concurrent requests of few items into one run, and takes the outputs apart again.

    ``GPUSession.batched`` and ``GPUSessionPool.batched`` make it. The items of a request are counted by the first axis
    of its arrays. Requests with the same inputs, outputs, types and other axes run together, up to ``max_batch`` items.
    While the GPU is busy, the next batch is collected and copied into pinned memory. It runs once the GPU is free, or
    beside the other as soon as it is full. If the GPU is idle, a request waits for up to ``max_wait`` until there are
    as many items as the last run had, so one client that waits for each result never waits for others. A request with
    more items, with none, or with anything but NumPy arrays of the declared types and shapes runs alone, as it is.

    If a joined run fails, its requests run again in halves, so that only the wrong one raises its error. If the GPU is
    the cause, each of them raises the error, and none runs again: what ended two workers of a pool must not end more.

    Args:
        max_batch: the most items of a run. 1 joins nothing, and suits any model.
        max_wait: seconds.
        max_queue: the most requests that wait to be run.
        when_full: "raise" refuses further requests with QueueFullError. "wait" lets ``submit`` wait for a place, while
            ``run`` and ``arun`` wait for their results anyhow.
        inputs: a feed of two items or more that differ, for models that do not run on made-up ones: 1 for other free
            axes, 0 and 1 for integers.
        warm: makes plans for the shapes of some feeds, as ``GPUSession.warm`` does; ``batched`` passes it.

    Raises:
        ProviderRequestError: requests cannot be joined. The items of the model depend on each other, as by a softmax
            over the first axis, or its inputs and outputs have no free first axis. Joined and separate runs are
            compared for this. Not promised: that every dependence shows in these inputs.
        ValueError, TypeError: an argument is invalid.
        GPUError, Exception: as ``run`` of the session or pool raises.

    Runs are padded to a few sizes, with items that ran before, if a run of a new shape takes twice as long as the
    largest. So it is with convolutions. A session keeps plans for 1, 2, 4, ... items, see ``GPUSession.shapes``;
    without plans only the largest size may be left. In other models any number of items is run as it is. Creating the
    service runs each size, which takes up to some seconds. Many threads and event loops may share it. Until it is
    closed, it keeps the joined arrays of one batch more than it has threads. Closing it leaves the session or pool
    open.
    """

    def __init__(
        self,
        run: Callable[[Any, Any], Results],
        inputs_and_outputs: tuple[Sequence[Value], Sequence[Value]],
        memories: Callable[[], Iterable[PinnedMemory]] | None,
        memory_limit: int,
        sessions: int,
        threads: int,
        *,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_queue: int = 1024,
        when_full: Literal["wait", "raise"] = "wait",
        inputs: Mapping[str, Any] | None = None,
        warm: Callable[[Sequence[Mapping[str, Any]]], object] | None = None,
    ) -> None:
        self._max_batch, self._max_queue = operator.index(max_batch), operator.index(max_queue)
        self._max_wait = float(max_wait)
        if self._max_batch < 1 or self._max_queue < 1 or not 0 <= self._max_wait < math.inf:
            raise ValueError(f"{max_batch=} and {max_queue=} must be at least 1, {max_wait=} at least 0")
        if when_full not in ("wait", "raise"):
            raise ValueError(f'when_full must be "wait" or "raise", not {when_full!r}')
        self._raises = when_full == "raise"
        self._pid = os.getpid()
        self._run = run
        declared, outputs = inputs_and_outputs
        self._declared = Declared(declared)
        self._sizes: tuple[int, ...] = ()
        if self._max_batch > 1:
            feed = joinable.example(declared, inputs, self._max_batch)

            def run_all(feed: Any) -> Sequence[Any]:
                return run(None, feed)

            joinable.check(run_all, feed, [each.name for each in outputs], made_up=inputs is None)
            self._sizes = joinable.sizes_of(run_all, feed, threads, warm)
        self._is_isolated = memories is None  # sessions in other processes: this one may have no ONNX Runtime
        self._buffers = Buffers(self._max_batch, threads + 1, memories, memory_limit)
        self._sessions = sessions
        self._turn = threading.RLock()  # for waiting; reentrant, as the garbage collector may submit
        self._room = Notice()  # that there may be a place
        self._news = Notice()  # that the thread that collects should look
        self._lock = threading.RLock()  # guards all below; held only briefly
        self._waiting: deque[Request] = deque()
        self._running = 0  # batches
        self._collecting = False  # a thread has a batch that does not run yet
        self._last = 1  # items of the last run
        self._closed = False
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
        self._threads = Threads("ortgpu-batched")
        # Close too if it is dropped without close(), or the interpreter ends.
        self._stop = weakref.finalize(self, _end, weakref.ref(self), self._threads, self._pid)
        try:
            self._threads.start(threads)
        except BaseException:
            self.close()
            raise

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model on the items of ``input_feed``, as InferenceSession.run does; see the class."""
        outcome: Outcome[Results] = Outcome()
        request = self._request(output_names, input_feed, outcome)
        try:
            self._put(request)
            return outcome.result()
        except BaseException:  # an interrupt, while it waits
            self._drop(request)
            raise
        finally:
            del request, outcome  # it holds the exception, and that this frame

    def submit(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Future[Results]:
        """Submit a run and return a future of its outputs.

        The arrays of ``input_feed`` must not change until the future is done. A request that has not begun can be
        cancelled, and leaves its place at once. Callbacks of the future run in a serving thread and must not wait for
        requests. An interrupt during ``future.result()`` does what :meth:`GPUSessionPool.submit` says.

        Raises:
            QueueFullError: ``max_queue`` requests wait already, and ``when_full`` is "raise".
            ExecutionError: the service is closed.
            ForkedSessionError: the service was opened in a parent process.
            ProviderRequestError: an array of ``input_feed`` is on a GPU.
        """
        outcome: FutureOutcome[Any] = FutureOutcome()
        request = self._request(output_names, input_feed, outcome)
        # Weak references, since a future keeps its callbacks, and the request has the future.
        service, dropped = weakref.ref(self), weakref.ref(request)
        outcome.future.add_done_callback(lambda future: _drop_cancelled(service, dropped, future))
        self._put(request, waits=threading.current_thread() not in self._threads.threads)
        return outcome.future

    async def arun(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model as :meth:`run` does, without blocking the event loop. Cancelling the task drops the request."""
        import asyncio  # a program without an event loop does without it

        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox())
        answer: asyncio.Future[Any] = loop.create_future()
        request = self._request(output_names, input_feed, Awaited(mailbox, answer))
        try:
            self._put(request)
            results: Results = await answer
            return results
        except BaseException:
            self._drop(request)
            raise
        finally:
            del request, answer

    def close(self) -> None:
        """Refuse further requests, and wait for those that run. Closing twice is fine.

        Waiting requests, and any later use, get an ExecutionError.
        """
        if os.getpid() != self._pid:
            return
        self._refuse_all()
        try:
            self._stop()
        except BaseException:  # an interrupt during the wait: finish when the service is dropped
            self._stop = weakref.finalize(self, _end, weakref.ref(self), self._threads, self._pid)
            raise
        self._buffers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the thread of the caller, where an interrupt may come at any line: a single change takes effect

    def _request(self, names: Any, feed: Any, outcome: Outcome[Any]) -> Request:
        if os.getpid() != self._pid:
            raise lifetime.forked(
                "this service was opened before this process was forked, and its threads are in the parent",
                f"it was opened in process {self._pid}; this is process {os.getpid()}",
                self._pid,
            )
        names, feed = for_many_runs(names), as_it_is_now(feed)
        items, form = 1, None
        if isinstance(names, tuple):
            names = list(names)
        is_plain = names is None or (isinstance(names, list) and all(isinstance(each, str) for each in names))
        if is_plain and self._max_batch > 1:  # other names cannot be compared
            items, form = self._declared.items_and_form(feed, self._max_batch)
        if form is None and not self._is_isolated:  # an isolated pool refuses more
            from ...running.device_arrays import refuse_on_gpu

            refuse_on_gpu(feed, "requests are joined in host memory")
        return Request(names, feed, items, form, outcome)

    def _put(self, request: Request, *, waits: bool = False) -> None:
        if not waits or self._raises:
            self._queue(request, self._max_queue if self._raises else sys.maxsize)
            return
        with self._turn:  # one waiter at a time, so an interrupted waiter never keeps a notice from another
            while not self._queue(request, self._max_queue):
                self._room.take()

    def _queue(self, request: Request, limit: int) -> bool:
        """Queue a request. False if ``limit`` requests wait already, and the caller may wait."""
        with self._lock:
            if self._closed:
                raise _closed()
            if len(self._waiting) >= limit:
                if not self._raises:
                    return False
                raise QueueFullError(
                    f"{limit} requests wait already, as many as max_queue allows",
                    fixes=[
                        manual("send fewer requests at a time, or answer with 503 and Retry-After"),
                        manual('raise max_queue=, or pass when_full="wait"'),
                    ],
                    limit=limit,
                )
            if self._collecting:  # first: a thread woken too early just finds no request
                self._news.give()
            elif self._running < len(self._threads.threads):
                self._threads.put(self._serve)
            self._waiting.append(request)
            return True

    def _drop(self, request: Request) -> None:
        """Forget a request that was cancelled, unless it runs."""
        if os.getpid() != self._pid or not request.outcome.cancel():
            return
        with self._lock:
            if request not in self._waiting:
                return
            self._waiting.remove(request)
            self._room.give()
        if not request.outcome.begin():  # tells those that wait for the future
            request.outcome.drop()

    # In a thread of the service

    def _serve(self) -> None:
        while (batch := self._collect()) is not None:
            try:
                if batch.requests:  # all may have been cancelled
                    self._answer(batch)
            finally:
                with self._lock:
                    self._running -= 1
                    self._last = max(1, batch.items)
                    self._news.give()
                del batch

    def _collect(self) -> Batch | None:
        """Return a batch that is to be run now. None if no request waits, or another thread collects."""
        batch: Batch | None = None
        while True:
            with self._lock:
                if batch is None:
                    if self._collecting or not self._waiting:
                        return None
                    batch = Batch(self._waiting[0], self._buffers)
                taken = self._take(batch)
                seconds = self._seconds_until_start(batch)
                self._collecting = seconds != 0
                if seconds == 0:
                    self._running += 1
                    if self._waiting and self._running < len(self._threads.threads):
                        self._threads.put(self._serve)
            for request in taken:
                if request.outcome.begin():
                    batch.requests.append(request)
                else:
                    batch.items -= request.items
                    request.outcome.drop()
            if seconds == 0:
                return batch
            with contextlib.suppress(Exception):  # what is not copied is copied before the run, which raises it
                batch.copy()
            if not taken:
                self._news.take(seconds)

    def _take(self, batch: Batch) -> list[Request]:
        """Take the waiting requests that fit into the batch."""
        taken = []
        for request in list(self._waiting):
            if not request.runs_with(batch.first):
                continue
            batch.is_full = batch.items + request.items > self._max_batch
            if batch.is_full:
                break
            self._waiting.remove(request)
            taken.append(request)
            batch.items += request.items
            batch.is_full = request.form is None or batch.items == self._max_batch
            if batch.is_full:
                break
        self._room.give()
        return taken

    def _seconds_until_start(self, batch: Batch) -> float | None:
        """Return how long a batch has to wait if nothing happens. None: until another one ends."""
        if batch.is_full or self._closed:
            return 0
        if self._running >= self._sessions:
            return None
        if batch.items >= self._last:
            return 0
        return max(0, batch.arrived + self._max_wait - time.monotonic())

    def _answer(self, batch: Batch) -> None:
        """Run the requests together; in halves if that fails and the GPU is not the cause."""
        error: BaseException | None = None
        requests, results = batch.requests, []
        try:
            results = self._results(batch)
        except BaseException as raised:  # noqa: BLE001 - the outcomes raise it
            lifetime.let_go_of_variables(raised)  # arrays
            error = raised
        batch.let_go(has_run=error is None)  # before the waiting threads go on
        if isinstance(error, Exception) and not isinstance(error, GPUError) and len(requests) > 1:
            del error
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                self._answer(Batch(part[0], self._buffers, part))
            return
        for number, request in enumerate(requests):
            request.feed = None
            if error is None:
                request.outcome.give(results[number])
            elif number and isinstance(error, GPUError):  # one that several raise would have the frames of all
                request.outcome.fail(lifetime.fresh_copy(error))
            else:
                request.outcome.fail(error)
        del requests, request, error  # break the cycle: outcome, exception, this frame

    def _results(self, batch: Batch) -> list[Results]:
        """Return the outputs of each request."""
        rows = next((size for size in self._sizes if size >= batch.items), batch.items)
        feed, is_whole = batch.feed(rows)
        outputs = self._run(batch.first.names, feed)
        if is_whole:
            return [outputs]
        if all(output.shape[:1] == (rows,) for output in outputs):
            return batch.taken_apart(outputs)
        if len(batch.requests) == 1:
            return [self._run(batch.first.names, batch.requests[0].feed)]
        raise ValueError("the outputs of these requests cannot be taken apart")

    def _refuse_waiting(self) -> None:
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
            self._room.give()
            self._news.give()
        for request in dropped:
            if request.outcome.begin():
                request.outcome.fail(_closed())
            else:
                request.outcome.drop()

    def _refuse_all(self) -> None:
        self._closed = True
        uninterrupted(self._refuse_waiting)


def _closed() -> ExecutionError:
    return ExecutionError("this service of joined requests is closed", fixes=[manual("make a new one by batched()")])


def _drop_cancelled(service: weakref.ref[Batched], request: weakref.ref[Request], future: Future[Any]) -> None:
    batched, dropped = service(), request()
    if future.cancelled() and batched is not None and dropped is not None:
        batched._drop(dropped)


def _end(service: weakref.ref[Batched], threads: Threads, pid: int) -> None:
    """End the service: it was closed or dropped, or the program ends."""
    if os.getpid() == pid:
        ending = service()
        if ending is not None:
            ending._refuse_all()
        threads.stop()
        threads.wait()
