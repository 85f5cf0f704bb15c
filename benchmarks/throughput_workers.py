"""What throughput.py measures inside one process, in turns; started by workers.py.

Ours is first checked to compute what plain ONNX Runtime computes. ``device`` is "cuda", or "cpu" to see that it works.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import report
from benchmarks.workers import feed_of, plain_session
from ortgpu.timing import in_turns

DIFFERENT_FEEDS = 4  # arrays that take turns, so that no cache holds all of a large batch


def ours(model: str, device: str, **arguments: Any) -> Any:
    from ortgpu import GPUSession

    session = GPUSession(model, allow_cpu=device == "cpu", **arguments)
    if session.device.kind != device:
        raise RuntimeError(f"the session is on {session.device}")
    return session


def relative_error(found: list[Any], expected: list[Any]) -> float:
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True))


def throughput(model: str, batch: int, batches: int, rounds: int, device: str) -> None:
    """Mean seconds of a batch out of ``batches``: mapped, in a loop over plain ``run``, and without any copy."""
    session, plain = ours(model, device), plain_session(model, device)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    pinned = []
    for feed in feeds:
        pinned.append({name: session.pinned_empty(array.shape, array.dtype) for name, array in feed.items()})
        for name, array in feed.items():
            pinned[-1][name][...] = array
    bindings = [resident(plain, feed, device) for feed in feeds]

    def mapped(which: list[dict[str, Any]]) -> None:
        for _ in session.map(itertools.islice(itertools.cycle(which), batches)):
            pass

    def looped() -> None:
        for feed in itertools.islice(itertools.cycle(feeds), batches):
            plain.run(None, feed)

    def bound() -> None:
        for binding in itertools.islice(itertools.cycle(bindings), batches):
            plain.run_with_iobinding(binding)

    results = [plain.run(None, feed) for feed in feeds]
    errors = [relative_error(found, right) for found, right in zip(session.map(feeds), results, strict=True)]
    report("largest error", max(errors))
    actions = {
        "ours": lambda: mapped(feeds),
        "plain": looped,
        "ours, pinned arrays": lambda: mapped(pinned),
        "plain, data on the device": bound,
    }
    report("seconds", take_turns(actions, batches, rounds))


def latency(model: str, batch: int, calls: int, rounds: int, device: str) -> None:
    """Mean seconds of a call: captured as a CUDA graph, and plain ``run``; copies in and out included."""
    session, plain = ours(model, device, cuda_graph=True), plain_session(model, device)
    feed, other = feed_of(plain, batch, 1), feed_of(plain, batch, 2)
    for each in (feed, other, feed):
        report("largest error", relative_error(session.run(None, each), plain.run(None, each)))
    actions = {"ours": repeated(session.run, [feed], calls), "plain": repeated(plain.run, [feed], calls)}
    report("seconds", take_turns(actions, calls, rounds))


def arrays(model: str, batch: int, calls: int, rounds: int, device: str) -> None:
    """Mean seconds of a call of ``run`` on ordinary arrays, whose results are dropped before the next call."""
    session, plain = ours(model, device), plain_session(model, device)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    errors = [relative_error(session.run(None, feed), plain.run(None, feed)) for feed in feeds]
    report("largest error", max(errors))
    actions = {"ours": repeated(session.run, feeds, calls), "plain": repeated(plain.run, feeds, calls)}
    report("seconds", take_turns(actions, calls, rounds))


def repeated(
    run: Callable[..., Any], feeds: list[dict[str, Any]], calls: int, keep: bool = False
) -> Callable[[], None]:
    def action() -> None:
        kept = []
        for feed in itertools.islice(itertools.cycle(feeds), calls):
            results = run(None, feed)
            if keep:
                kept.append(results)
            del results

    return action


def thresholds(
    model: str, sizes: list[int], threads: list[int], pieces: list[int], rounds: int, device: str, kept: bool
) -> None:
    """Mean seconds of a call by bytes of its array: staged with so many threads and bytes a piece, and plain ``run``.

    With ``kept``, the caller keeps the results of a round, so that most of them have to be in fresh memory.
    """
    from ortgpu.staging import Staging

    plain = plain_session(model, device)
    for size in sizes:
        session = ours(model, device, pinned_memory_limit=size * 3 // 2 if kept else 4 * size)
        feeds = [feed_of(plain, size // 4, seed) for seed in range(DIFFERENT_FEEDS)]
        calls = max(4, min(200, (256 << 20) // size))

        def configured(staging: Any, run: Callable[[], object], session: Any = session) -> Callable[[], None]:
            def action() -> None:
                session._staging = staging
                run()

            return action

        stagings = {
            f"{number} x {piece}": Staging(session, staged_from=1, threads=number, piece=piece)
            for number in threads
            for piece in pieces
        }
        one, *_ = stagings.values()
        first = timed(lambda one=one, feed=feeds[0], session=session: one.run(session, None, feed))  # type: ignore[misc]
        staged = one.run(session, None, feeds[0]) is not None
        run = repeated(session.run, feeds, calls, kept)
        actions = {name: configured(staging, run) for name, staging in stagings.items()}
        actions["plain"] = repeated(plain.run, feeds, calls, kept)
        report(str(size), {"seconds": take_turns(actions, calls, rounds), "first call": first, "staged": staged})
        session.close()


def new_shape(model: str, batch: int, rounds: int, device: str) -> None:
    """Seconds of the first run of a shape that the session has not seen: each round a batch larger than the last."""
    sessions = {"ours": ours(model, device), "plain": plain_session(model, device)}
    sizes = {name: iter(range(batch, batch + rounds + 2)) for name in sessions}

    def action(name: str) -> Callable[[], float]:
        def seconds() -> float:
            feed = feed_of(sessions[name], next(sizes[name]), 1)
            return timed(lambda: sessions[name].run(None, feed))

        return seconds

    actions = {name: action(name) for name in sessions}
    in_turns(actions, 2)
    report("seconds", in_turns(actions, rounds))


def first_run(model: str, batch: int, rounds: int, device: str) -> None:
    """Seconds of the first run of a new session, in a process in which others have run."""
    makers = {"ours": lambda: ours(model, device), "plain": lambda: plain_session(model, device)}

    def action(name: str) -> Callable[[], float]:
        def seconds() -> float:
            session = makers[name]()
            feed = feed_of(session, batch, 1)
            taken = timed(functools.partial(session.run, None, feed))
            if hasattr(session, "close"):
                session.close()
            del session
            gc.collect()
            return taken

        return seconds

    actions = {name: action(name) for name in makers}
    in_turns(actions, 1)
    report("seconds", in_turns(actions, rounds))


def resident(session: Any, feed: dict[str, Any], device: str) -> Any:
    """A binding whose inputs are on the device, and whose outputs stay there."""
    import onnxruntime

    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)
    return binding


def take_turns(actions: dict[str, Callable[[], None]], count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each action divided by ``count``, after a round that is not counted."""
    timers = {name: functools.partial(timed, action) for name, action in actions.items()}
    in_turns(timers, 1)
    gc.collect()
    seconds = in_turns(timers, rounds)
    return {name: [each / count for each in taken] for name, taken in seconds.items()}


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


WORKERS: dict[str, Callable[..., None]] = {
    "throughput": throughput,
    "latency": latency,
    "arrays": arrays,
    "thresholds": thresholds,
    "new_shape": new_shape,
    "first_run": first_run,
}
