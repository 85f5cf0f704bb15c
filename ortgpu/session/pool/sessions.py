"""The workers in this process. Their sessions open together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...process.background import Task, cached_property, is_of_a_handler, may_wait
from ...provider import lifetime, living
from ...provider.devices import Device, DeviceRequest, check_devices, choose_devices
from ...running.copying import ParallelCopy, copy_threads, parallel_copy
from ...running.device_arrays import refuse_on_gpu, wrap_arrays
from ...running.feed_copies import FeedCopies
from ...running.pinned import PinnedMemory, memory_of
from ...running.pipeline import copy_feed, staged_run
from .workers import Feeds, Worker, check, options_of_others, wait_for_all

if TYPE_CHECKING:
    from ...model.files import ModelSource
    from ...provider.interfaces import Value
    from ...running.plain_runs import RunningSession

    class OpenSession(RunningSession, Protocol):
        """A GPUSession."""

        @property
        def device(self) -> Device: ...

        def get_inputs(self) -> Sequence[Value]: ...

        def get_outputs(self) -> Sequence[Value]: ...

        def warm(self, feeds: Iterable[Mapping[str, Any]]) -> object: ...

        def close(self) -> None: ...


# With fewer threads a GPU waits during the copies of inputs and outputs. ResNet-50 needs three for its limit on an
# H200.
THREADS_PER_DEVICE = 3

_COPYING_THREADS = 4  # for an array of one request


class SessionWorker(Worker):
    """A session of this process."""

    def __init__(self, session: OpenSession, place: int, most: int = THREADS_PER_DEVICE) -> None:
        super().__init__(place, most)
        self.session: OpenSession = session
        self.capacity = most

    @property
    def device(self) -> Device:
        return self.session.device

    @property
    def declared(self) -> tuple[Sequence[Value], Sequence[Value]]:
        return self.session.get_inputs(), self.session.get_outputs()

    def run(self, output_names: Any, feed: Any) -> Any:
        return staged_run(self.session, output_names, feed)

    def warm(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        self.session.warm(feeds)

    def close(self, timeout: float | None) -> None:
        self.session.close()


class SessionFeeds(Feeds):
    """Copies feeds into pinned memory of the sessions."""

    # On the host of an H200 one thread copied 600 KB into joined arrays in 97 µs, four in 25 µs.
    large = 512 << 10

    def __init__(self, workers: Callable[[], Iterable[Any]]) -> None:
        self._workers = workers

    @property
    def sessions(self) -> list[OpenSession]:
        sessions = [worker.session for worker in self._workers()]
        return [session for session in sessions if lifetime.error_of(session) is None]

    def pass_through(self, feed: Any) -> Any:
        refuse_on_gpu(feed)
        return copy_feed(feed)

    def copied(self, feed: Any, waits: Iterable[Callable[[], object]] = ()) -> tuple[Any, bool]:
        refuse_on_gpu(feed)
        try:
            for session in self.sessions[:1]:
                feed = wrap_arrays(session, feed) or feed
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # The run raises the same error.
        return self._memory.of(feed, waits)

    @cached_property
    def _threads(self) -> ParallelCopy | None:
        has_gpu = any(lifetime.device_of(session).is_gpu for session in self.sessions)
        # Idle threads spin for a while, so other threads need cores, too.
        return parallel_copy(_COPYING_THREADS, -1) if has_gpu and copy_threads() >= 2 * _COPYING_THREADS else None

    def source(self) -> tuple[int, ...]:
        return tuple(map(id, self._memories()))

    @cached_property
    def _memory(self) -> FeedCopies:
        session = next(worker.session for worker in self._workers())
        # Use copying threads of our own, since a session's threads are busy with its runs.
        ordinal = -1 if lifetime.device_of(session).is_gpu else None
        return FeedCopies(self._memories, session._pinned_memory_limit, ordinal)

    def _memories(self) -> list[PinnedMemory]:
        return [memory_of(session) for session in self.sessions]


def open_sessions(
    add: Callable[[Worker], object],
    model: ModelSource,
    devices: str | Iterable[Device | DeviceRequest],
    sessions_per_device: int,
    options: dict[str, Any],
    session_class: Callable[..., OpenSession],
) -> None:
    """Add a worker for each session, going round the devices ``sessions_per_device`` times.

    The first session opens in this thread, so that its warnings name the caller, and a general fault is diagnosed only
    once. The others open together, in threads. After an error all open sessions have been added.
    """
    check(sessions_per_device, options)
    requests = choose_devices(check_devices(devices))
    places = [place for _ in range(sessions_per_device) for place in range(len(requests))]
    others = range(1, len(places))
    opened: dict[int, OpenSession] = {}  # Threads fill it, so that an interrupt here loses no session.

    def open_one(number: int, options: Mapping[str, Any]) -> None:
        opened[number] = session_class(model, device=requests[places[number]], **options)

    try:
        open_one(0, options)
        if opened[0].device.is_gpu and may_wait():
            options = options_of_others(options)
            tasks = [Task(functools.partial(open_one, number, options), "ortgpu-open") for number in others]
            wait_for_all([task.result for task in tasks])
            for number in others:
                living.attribute(opened[number], to=opened[0])
        else:  # With allow_cpu each session warns the caller.
            for number in others:
                open_one(number, options)
    finally:
        for number in sorted(opened):
            add(SessionWorker(opened[number], places[number], -(-THREADS_PER_DEVICE // sessions_per_device)))
