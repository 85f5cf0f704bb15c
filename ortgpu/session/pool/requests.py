"""Requests of a service. A request is complete from the start, and gets a single answer."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ...process.background import logged
from ...process.threads import FutureOutcome, Outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import Protocol

    from ...errors import GPUError
    from ...process.threads import Notice

    class Queue(Protocol):
        """The part of a service that its requests use."""

        @property
        def must_not_wait(self) -> bool: ...

        def forget(self, request: Request) -> bool: ...


class Kind:
    """Requests of a service that may run together.

    Attributes:
        collector: the notice of the thread that collects the next batch; None while there is no such thread.
        bundle: the number of waiting requests that this thread wakes for.
    """

    def __init__(self) -> None:
        self.collector: Notice | None = None
        self.bundle = 1
        self.is_closed = False

    def serve(self, first: Request, notice: Notice) -> None:
        """Collect a batch that begins with a request, run it and answer. In a thread of the service."""
        raise NotImplementedError


class Request:
    """A request. The service never reads it later from a list or dict of the caller.

    Attributes:
        joining: the kind of requests that it may be joined with; None for a request of a pool.
        form: the types and shapes of its inputs without the first axis. None: it runs alone.
        items: the length of the first axis of its inputs.
        is_waited_for: the caller waits for its result at once.
        is_copied: its run reads no array of the caller.
        sheet, row: the joined arrays with a copy of the request, and its first row there.
    """

    __slots__ = (
        "__weakref__", "arrived", "feed", "form", "is_copied", "is_waited_for", "items", "joining", "names", "outcome",
        "row", "service", "sheet",
    )  # fmt: skip

    def __init__(
        self,
        service: Queue,
        names: Any,
        feed: Any,
        outcome: Outcome[Any],
        joining: Kind | None = None,
        items: int = 1,
        form: object = None,
    ) -> None:
        self.service, self.names, self.feed, self.outcome = service, names, feed, outcome
        self.joining, self.items, self.form = joining, items, form
        self.is_waited_for, self.is_copied = False, True
        self.sheet: Any = None
        self.row = 0
        self.arrived = time.monotonic()
        # The reference is weak, since callers keep futures for long.
        (outcome.future if isinstance(outcome, FutureOutcome) else outcome).leave = weakref.WeakMethod(self._leave)

    def runs_with(self, other: Request) -> bool:
        if self.form is None:
            return self is other
        return self.joining is other.joining and self.form == other.form and self.names == other.names

    def wait(self) -> None:
        """Wait for the end, since the run reads the caller's array. A thread of the service would wait for itself."""
        if not self.service.must_not_wait:
            try:
                self.outcome.wait()
            except BaseException:  # an interrupt of the wait
                self.outcome.cancel()
                raise

    def _leave(self) -> None:
        """Leave the queue after a cancellation."""
        if self.service.forget(self) and not self.outcome.begin():  # begin() tells all waiters of the future.
            self.outcome.drop()

    def refuse(self, why: Callable[[], GPUError]) -> None:
        """Answer with an error, unless the request was cancelled."""
        if self.outcome.begin():
            self.outcome.fail(why())
        else:
            self.outcome.drop()


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
