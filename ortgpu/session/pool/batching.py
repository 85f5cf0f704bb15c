"""The service of ``batched()``: requests of few items become one run, and its outputs are taken apart again."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from ...errors import GPUError, QueueFullError, manual
from ...process.background import logged, uninterrupted
from ...process.late import late
from ...process.threads import FutureOutcome, Outcome
from ...running.pipeline import copy_names
from . import joinable
from .joined import Declared, Joining
from .serving import Service
from .workers import Request

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Self  # Type checkers bring this module; typing has Self since Python 3.11.

    from ...running.onnxruntimes import Results
    from . import sessions
    from .sessions import OpenSession
else:
    sessions = late("ortgpu.session.pool.sessions")

_LOOK = 0.01  # seconds between two looks at the remaining batches


class Awaited(Outcome[Any]):
    """The outcome of a request for a task of an event loop."""

    def __init__(self, mailbox: Mailbox, answer: asyncio.Future[Any]) -> None:
        super().__init__()
        self._mailbox, self._answer = mailbox, answer

    def give(self, result: Any) -> None:
        self._mailbox.put(self._answer, result, None)

    def fail(self, error: BaseException) -> None:
        self._mailbox.put(self._answer, None, error)


class Mailbox:
    """Passes outcomes to an event loop, many at a time, since waking the loop is the most expensive step."""

    def __init__(self) -> None:
        self._outcomes: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_called = False

    def put(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._outcomes.append((answer, result, error))
        if not self._is_called:
            self._is_called = True
            with logged("an event loop raised"), contextlib.suppress(RuntimeError):  # The loop may be closed.
                answer.get_loop().call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False
        while self._outcomes:
            answer, result, error = self._outcomes.popleft()
            if answer.done():  # The task was cancelled.
                continue
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)


class Batched:
    """A service that joins concurrent requests of few items into one run, and takes the outputs apart again.

    ``GPUSession.batched`` and ``GPUSessionPool.batched`` make it. The first axis of its arrays counts the items of a
    request. Requests with the same inputs, outputs, types and other axes run together, up to ``max_batch`` items.
    While the GPU is busy, the service collects the next batch and copies it into pinned memory. The batch runs once the
    GPU is free, or beside the current batch as soon as it is full. If the GPU is idle, a request waits for up to
    ``max_wait`` for as many items as the last run had. So a single client never waits for other clients. Some
    requests run alone, unchanged: requests with more items, with no item, or with anything but NumPy arrays of the
    declared types and shapes.

    If a joined run fails, its requests run again, each alone, so that only the wrong request raises its error. If the
    GPU is the cause, each request raises the error. None runs again, so that no request ends a third worker of a pool.

    Args:
        max_batch: the most items of a run. 1 joins nothing, and suits any model.
        max_wait: seconds.
        max_queue: the most waiting requests.
        when_full: "raise" refuses further requests with QueueFullError. "wait" lets ``submit`` wait for a place, while
            ``run`` and ``arun`` wait for their results anyhow.
        inputs: a feed of two or more different items, for models that do not run on made-up inputs. Made-up inputs have
            length 1 for other free axes, and the integers 0 and 1.
        warm: makes plans for the shapes of some feeds, like ``GPUSession.warm``; ``batched`` passes it.

    Raises:
        ProviderRequestError: requests cannot be joined. The items depend on each other, as by a softmax over the first
            axis, or the inputs and outputs have no free first axis. The service compares joined and separate runs to
            find out. Not promised: that every dependence shows in these inputs.
        ValueError, TypeError: an argument is invalid.
        GPUError, Exception: the errors of ``run`` of the session or pool.

    With convolutions a run of a new shape may take twice as long as the largest. Then runs are padded to a few sizes
    with earlier items. A session keeps plans for 1, 2, 4, ... items, see ``GPUSession.shapes``; without plans only the
    largest size may remain. In other models any number of items runs unpadded, and so does the first run of other axes.
    Creating the service runs each size, and takes up to some seconds. Many threads and event loops may share it. Until
    it is closed, it keeps the joined arrays of all batches that can run at a time, and of one more. Closing it leaves
    the session or pool open.
    """

    def __init__(
        self,
        service: Service,
        *,
        is_alone: bool = False,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_queue: int = 1024,
        when_full: Literal["wait", "raise"] = "wait",
        inputs: Mapping[str, Any] | None = None,
        warm: Callable[[Sequence[Mapping[str, Any]]], object] | None = None,
    ) -> None:
        most, wait = operator.index(max_batch), float(max_wait)
        self._max_queue = operator.index(max_queue)
        if most < 1 or self._max_queue < 1 or not 0 <= wait < math.inf:
            raise ValueError(f"{max_batch=} and {max_queue=} must be at least 1, {max_wait=} at least 0")
        if when_full not in ("wait", "raise"):
            raise ValueError(f'when_full must be "wait" or "raise", not {when_full!r}')
        self._raises = self._full if when_full == "raise" else None
        self._service, self._is_alone = service, is_alone
        inputs_, outputs = service.serving[0].declared
        self._declared = Declared(inputs_)
        self._joining = Joining(service, most, wait)
        if most > 1:
            if service.model is not None:
                joinable.refuse_known(service.model)
            feed = joinable.example(inputs_, inputs, most)
            # The notice of a queued request may be the one that this thread has taken, and no other thread comes then.
            runs_here = service.must_not_wait

            def run_all(feed: Any) -> Any:
                if runs_here:
                    return service.run(object(), None, feed)
                return service.result_of(Request(service, None, feed, Outcome()), service.most)

            joinable.check(run_all, feed, [output.name for output in outputs], made_up=inputs is None)
            feed, _ = service.feeds.copied(feed)  # Batches are in such memory, and runs are timed.
            self._joining.sizes = joinable.sizes_of(run_all, feed, service.most, warm)
            self._joining.known.append(self._declared.items_and_form(feed, most)[1])
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model on the items of ``input_feed``, like InferenceSession.run; see the class."""
        results: Results = self._service.result_of(
            self._request(output_names, input_feed, Outcome()),
            self._max_queue if self._raises else sys.maxsize,
            raises=self._raises,
        )
        return results

    def submit(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Future[Results]:
        """Submit a run and return a future of its outputs.

        The request is copied, as by :meth:`GPUSessionPool.submit`, so you may fill the arrays again at once. A request
        that has not begun can be cancelled, and leaves its place at once. Callbacks of the future run in a serving
        thread and must not wait for its result. For an interrupt during ``future.result()`` see
        :meth:`GPUSessionPool.submit`.

        Raises:
            QueueFullError: ``max_queue`` requests wait already, and ``when_full`` is "raise".
            ExecutionError: the service is closed.
            ForkedSessionError: the service was opened in a parent process.
            ProviderRequestError: an array of ``input_feed`` is on a GPU.
        """
        outcome: FutureOutcome[Any] = FutureOutcome()
        request = self._request(output_names, input_feed, outcome)
        self._service.ask(request, self._max_queue, raises=self._raises, keep=self._joining.keep)
        if not request.is_copied:
            request.wait()
        return outcome.future

    async def arun(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Results:
        """Run the model as :meth:`run` does, without blocking the event loop. Cancelling the task drops the request."""
        import asyncio  # A program without an event loop does not need this import.

        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.setdefault(loop, Mailbox())
        answer: asyncio.Future[Any] = loop.create_future()
        request = self._request(output_names, input_feed, Awaited(mailbox, answer))
        try:
            self._service.ask(request, self._max_queue if self._raises else sys.maxsize, raises=self._raises)
            results: Results = await answer
            return results
        except BaseException:
            request.outcome.cancel()
            raise
        finally:
            del request, answer

    def close(self, timeout: float | None = None) -> None:
        """Refuse further requests, and wait for the running ones. Closing twice is fine.

        Waiting requests, and any later use, get an ExecutionError. In a callback of a future this does not wait.

        Raises:
            TimeoutError: after ``timeout`` seconds requests still run.
        """
        service, joining = self._service, self._joining
        if os.getpid() != service.pid:
            return
        joining.is_closed = True
        uninterrupted(service.refuse_waiting)
        if self._is_alone:
            service.close(timeout)
        elif not service.must_not_wait:
            until = None if timeout is None else time.monotonic() + timeout
            while joining.collector is not None or service.runs_of(joining):
                service.wake_busy()
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"after {timeout} s, joined requests still run")
                time.sleep(_LOOK)
        joining.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, names: Any, feed: Any, outcome: Outcome[Any]) -> Request:
        service, joining = self._service, self._joining
        if os.getpid() != service.pid:
            raise service.forked()
        names = None if names is None else copy_names(names)
        items, form = 1, None
        if (names is None or (type(names) is list and all(isinstance(name, str) for name in names))) and (
            joining.max_batch > 1  # Names of other types cannot be compared.
        ):
            items, form = self._declared.items_and_form(feed, joining.max_batch)
        feed = dict(feed) if form is not None else service.feeds.pass_through(feed)
        return Request(service, names, feed, outcome, joining, items, form)

    def _full(self) -> GPUError:
        return QueueFullError(
            f"{self._max_queue} requests wait already: the limit of max_queue",
            fixes=[
                manual("send fewer requests at a time, or answer with 503 and Retry-After"),
                manual('raise max_queue=, or pass when_full="wait"'),
            ],
            limit=self._max_queue,
        )


def batched_session(session: OpenSession, **options: Any) -> Batched:
    """Return a service of one session. The session stays open when the service is closed or dropped."""
    worker = sessions.SessionWorker(session, 0)
    service = Service(
        "ortgpu-batched", "service of joined requests", sessions.SessionFeeds(lambda: (worker,)), owns=False
    )
    service.workers.append(worker)
    service.model = session._request.model
    try:
        service.open()
        batched = Batched(service, is_alone=True, **options)
    except BaseException:
        service.close()
        raise
    # End the threads of the service, too, if the program drops it without close().
    weakref.finalize(batched, service.let_go).atexit = False
    return batched
