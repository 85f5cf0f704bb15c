"""Measurements of throughput.py inside one process, alternately. Started by workers.py.

Ours is first checked to compute what plain ONNX Runtime computes. ``device`` is "cuda", or "cpu" to see that it works.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import models
from benchmarks.workers import feed_of, report_turns
from ortgpu.process.timing import alternate
from tests.support.children import report
from tests.support.plain_session import plain_session

LARGEST_OF_GRAPHS = 8  # batches that may gain by a CUDA graph
BYTES_OF_A_ROUND = 128 << 20  # of an input that is staged, by each way to do it
DIFFERENT_FEEDS = 4  # arrays that take turns, so that no cache holds all of a large batch
_RANK_OF_IMAGES = 4


def ours(model: str, device: str, **arguments: Any) -> Any:
    from ortgpu import GPUSession

    session = GPUSession(model, allow_cpu=device == "cpu", **arguments)
    if session.device.kind != device:
        raise RuntimeError(f"the session is on {session.device}")
    return session


def relative_error(found: list[Any], expected: list[Any]) -> float:
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True))


def throughput(model: str, batch: int, batches: int, rounds: int, device: str, torch_model: str | None) -> None:
    """Report the mean seconds of a batch of ``batches``: mapped, in a loop over plain ``run``, and without any copy.

    Then once more mapped, and by other libraries, if PyTorch has ``torch_model`` and they work here.
    """
    session, plain = ours(model, device), plain_session(model, device)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    pinned = [in_pinned_memory(session, feed) for feed in feeds]
    bindings = {each: [resident(each, feed, device) for feed in feeds] for each in (session, plain)}

    def mapped(which: list[dict[str, Any]], session: Any = session) -> None:
        deque(session.map(itertools.islice(itertools.cycle(which), batches)), 0)

    def looped() -> None:
        for feed in itertools.islice(itertools.cycle(feeds), batches):
            plain.run(None, feed)

    def bound(each: Any) -> None:
        for binding in itertools.islice(itertools.cycle(bindings[each]), batches):
            each.run_with_iobinding(binding)

    results = [plain.run(None, feed) for feed in feeds]
    errors = [relative_error(found, right) for found, right in zip(session.map(feeds), results, strict=True)]
    report("largest error", max(errors))
    actions = {
        "ours": lambda: mapped(feeds),
        "plain": looped,
        "ours, pinned arrays": lambda: mapped(pinned),
        "ours, data on the device": lambda: bound(session),
        "plain, data on the device": lambda: bound(plain),
    }
    left_out: dict[str, str] = {}
    if device == "cuda" and batch <= LARGEST_OF_GRAPHS:
        try:
            graphs = ours(model, device, cuda_graph=True)
            deque(graphs.map(feeds), 0)
        except Exception as error:
            left_out["ours, CUDA graph"] = f"{type(error).__name__}: {error}"[:300]
        else:
            actions["ours, CUDA graph"] = lambda: mapped(feeds, graphs)
    take_turns(actions, batches, rounds)
    if torch_model is not None:
        others = other_libraries(torch_model, plain, feeds, batches, device, left_out)
        if others:
            take_turns({"ours": actions["ours"], **others}, batches, rounds, "seconds of others")
    report("left out", left_out)


def reused(model: str, batch: int, batches: int, rounds: int, device: str) -> None:
    """Report the mean seconds of a batch of ``batches`` from a generator that fills one array again.

    They are mapped, and run in a loop over plain ``run``. "ours, list" has a few arrays, which are not copied before.
    """
    session, plain = ours(model, device), plain_session(model, device)
    feed = feed_of(plain, batch, 1)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    some = (feeds * -(-batches // DIFFERENT_FEEDS))[:batches]
    results = [plain.run(None, each) for each in refilled(feed, DIFFERENT_FEEDS * 3)]
    found = session.map(refilled(feed, len(results)))
    report("largest error", max(relative_error(each, right) for each, right in zip(found, results, strict=True)))
    actions = {
        "ours": lambda: deque(session.map(refilled(feed, batches)), 0),
        "plain": lambda: deque((plain.run(None, each) for each in refilled(feed, batches)), 0),
        "ours, list": lambda: deque(session.map(some), 0),
    }
    take_turns(actions, batches, rounds)


def concurrency(model: str, batch: int, batches: int, rounds: int, threads: list[int], device: str) -> None:
    """Report the mean seconds of a batch by the number of threads that run and stage."""
    from ortgpu.running.pipeline import iterate_in_order, staged_run

    session, plain = ours(model, device), plain_session(model, device)
    feeds = [feed_of(plain, batch, seed) for seed in range(DIFFERENT_FEEDS)]
    pinned = [in_pinned_memory(session, feed) for feed in feeds]
    bindings = [resident(plain, feed, device) for feed in feeds]

    def some(values: list[Any]) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(values), batches)

    def in_threads(which: list[dict[str, Any]], count: int) -> None:
        deque(iterate_in_order(functools.partial(staged_run, session, None), iter(some(which)), 2 * count, count), 0)

    actions: dict[str, Callable[[], object]] = {
        "plain": lambda: deque((plain.run(None, feed) for feed in some(feeds)), 0),
        "plain, data on the device": lambda: deque((plain.run_with_iobinding(each) for each in some(bindings)), 0),
    }
    for count in threads:
        actions[f"{count} threads"] = functools.partial(in_threads, feeds, count)
        actions[f"{count} threads, pinned arrays"] = functools.partial(in_threads, pinned, count)
    take_turns(actions, batches, rounds)


def refilled(feed: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield ``feed`` ``count`` times in the same arrays, each time with another number at the start of each sample.

    Not all is filled again: that is the generator's own work, and takes one thread longer than a GPU needs.
    """
    for number in range(count):
        for array in feed.values():
            array.reshape(len(array), -1)[:, 0] = number
        yield feed


def in_pinned_memory(session: Any, feed: dict[str, Any]) -> dict[str, Any]:
    found = {name: session.pinned_empty(array.shape, array.dtype) for name, array in feed.items()}
    for name, array in feed.items():
        found[name][...] = array
    return found


def other_libraries(
    model: str, plain: Any, feeds: list[dict[str, Any]], batches: int, device: str, why_not: dict[str, str]
) -> dict[str, Callable[[], None]]:
    """Return functions for PyTorch, eager and compiled, also with channels-last images, and for optimum.

    They take and return ordinary arrays. ``why_not`` gets the reasons of those that do not work here.
    """
    actions: dict[str, Callable[[], None]] = {}
    try:
        torch: Any = importlib.import_module("torch")
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("the installed PyTorch has no CUDA that works here")
    except Exception as error:
        why_not["torch"] = f"{type(error).__name__}: {error}"[:300]
        return {}
    torch.set_float32_matmul_precision("high")  # TF32, which ONNX Runtime uses too unless told otherwise
    inputs = [torch.from_numpy(array) for feed in feeds for array in feed.values()]  # of one input each

    def loop(run: Callable[..., Any], batches: int) -> None:
        with torch.inference_mode():
            for array in itertools.islice(itertools.cycle(inputs), batches):
                run(array.to(device)).cpu()

    def in_torch(layout: Any = torch.contiguous_format, *, compiled: bool = False) -> Callable[..., Any]:
        made = models.TORCH[model]()[0].to(device, memory_format=layout)
        run = torch.compile(made) if compiled else made
        return lambda array: run(array.contiguous(memory_format=layout))

    makers: dict[str, Callable[[], Callable[..., Any]]] = {
        "torch eager": in_torch,
        "torch.compile": lambda: in_torch(compiled=True),
        "optimum": lambda: optimum_run(plain),
    }
    if inputs[0].ndim == _RANK_OF_IMAGES:
        makers["torch eager, channels-last"] = lambda: in_torch(torch.channels_last)
        makers["torch.compile, channels-last"] = lambda: in_torch(torch.channels_last, compiled=True)
    for name, make in makers.items():
        try:
            run = make()
            loop(run, len(inputs))  # compiles
        except Exception as error:
            why_not[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            actions[name] = functools.partial(loop, run, batches)
    return actions


def optimum_run(session: Any) -> Callable[..., Any]:
    """Return a function of tensors by optimum's ORTModel around a session of plain ONNX Runtime."""
    optimum: Any = importlib.import_module("optimum.onnxruntime")
    transformers: Any = importlib.import_module("transformers")
    model = optimum.ORTModelForCustomTasks(config=transformers.PretrainedConfig(), session=session)
    name, output = session.get_inputs()[0].name, session.get_outputs()[0].name
    return lambda tensor: model(**{name: tensor})[output]


def latency(model: str, batch: int, calls: int, rounds: int, device: str, *, cuda_graph: bool) -> None:
    """Report the mean seconds of a call of ``run``, ours and plain, with its copies."""
    session, plain = ours(model, device, cuda_graph=cuda_graph), plain_session(model, device)
    feed, other = feed_of(plain, batch, 1), feed_of(plain, batch, 2)
    for each in (feed, other, feed):
        report("largest error", relative_error(session.run(None, each), plain.run(None, each)))

    actions = {"ours": repeated(session.run, [feed], calls), "plain": repeated(plain.run, [feed], calls)}
    take_turns(actions, calls, rounds)


def repeated(
    run: Callable[..., Any], feeds: list[dict[str, Any]], calls: int, *, keep: bool = False
) -> Callable[[], None]:
    """Return a function that makes the calls. With ``keep`` it holds all results until it returns."""

    def action() -> None:
        deque((run(None, feed) for feed in itertools.islice(itertools.cycle(feeds), calls)), calls if keep else 0)

    return action


def thresholds(
    model: str, summing: str, size: int, threads: list[int], pieces: list[int], rounds: int, device: str
) -> None:
    """Report mean seconds of a call with an array of ``size`` bytes, staged by ``threads`` and ``pieces``, and plain.

    Of the cases that thresholds.py names. "first" is a staged call that has to pin memory; "staged" whether any is.
    """
    from ortgpu.running.cudart import runtime_of
    from ortgpu.running.plain_runs import PlainRunner
    from ortgpu.running.staged_runs import StagedRuns
    from ortgpu.running.staging import StagedRunner

    calls = max(3, min(100, BYTES_OF_A_ROUND // size))
    plain = {path: plain_session(path, device) for path in (model, summing)}
    feeds = [feed_of(plain[model], size // 4, seed) for seed in range(DIFFERENT_FEEDS)]
    actions: dict[str, Callable[[], None]] = {}

    def run_by(session: Any, runner: Any, names: Any, feed: Any) -> Any:
        session._gpu_runner = runner
        return session.run(names, feed)

    for case, path in (("both", model), ("in", summing), ("kept", model)):
        kept = case == "kept"
        session = ours(path, device, pinned_memory_limit=size * 3 // 2 if kept else size * 4)
        run_by(session, PlainRunner(), None, feeds[0])
        runtime = runtime_of(session.device)
        for count, piece in itertools.product(threads, pieces):
            runner = StagedRunner(session, staged_from=1)
            if runtime is not None:
                runner._runs = StagedRuns(session, runtime, 1, count, piece)
            if not actions:
                report("first", timed(functools.partial(run_by, session, runner, None, feeds[0])))
                report("staged", runner._run_staged(session, None, feeds[0]) is not None)
            run = functools.partial(run_by, session, runner)
            actions[f"{case}, {count} x {piece}"] = repeated(run, feeds, calls, keep=kept)
        actions[f"{case}, plain"] = repeated(plain[path].run, feeds, calls, keep=kept)
    take_turns(actions, calls, rounds)


def new_shape(model: str, batch: int, rounds: int, device: str) -> None:
    """Report the seconds of the first run of a shape that no session has seen.

    Kernels stay loaded, so the second session would find those of the same shape. Each round has two batches larger
    than those before, and the sessions take turns with the larger one.
    """
    sessions = {"ours": ours(model, device), "plain": plain_session(model, device)}
    pairs = [(first, first + 1) for first in range(batch, batch + 2 * (rounds + 2), 2)]
    sizes = {
        name: iter([pair[(turn + place) % 2] for turn, pair in enumerate(pairs)]) for place, name in enumerate(sessions)
    }

    def action(name: str) -> Callable[[], float]:
        def seconds() -> float:
            feed = feed_of(sessions[name], next(sizes[name]), 1)
            return timed(lambda: sessions[name].run(None, feed))

        return seconds

    actions = {name: action(name) for name in sessions}
    alternate(actions, 2)
    report_turns(actions, rounds)


def first_run(model: str, batch: int, rounds: int, device: str) -> None:
    """Report the seconds of the first run of a new session, in a process in which others have run."""
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
    alternate(actions, 1)
    report_turns(actions, rounds)


def options(model: str, options: dict[str, str], first: int, batches: list[int], rounds: int, device: str) -> None:
    """Report the seconds of plain sessions with ``options`` ("ours") and without.

    They are those of the constructor, of the first run, of warm runs, and of the first run of a new shape.
    """
    chosen = {"ours": options if device == "cuda" else {}, "plain": {}}
    sessions: dict[str, Any] = {}

    def made(name: str) -> Callable[[], float]:
        def seconds() -> float:
            sessions.pop(name, None)
            gc.collect()
            return timed(lambda: sessions.update({name: plain_session(model, device, options=chosen[name])}))

        return seconds

    def run(name: str, batch: int, calls: int = 1) -> Callable[[], float]:
        def seconds() -> float:
            feed = feed_of(sessions[name], batch, 1)
            return timed(lambda: [sessions[name].run(None, feed) for _ in range(calls)]) / calls

        return seconds

    constructors = {name: made(name) for name in chosen}
    alternate(constructors, 1)
    report_turns(constructors, rounds, name="seconds, constructor")
    firsts: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(3):
        alternate(constructors, 1)
        for name, taken in alternate({name: run(name, first) for name in chosen}, 1).items():
            firsts[name] += taken
    report("seconds, first run", firsts)
    sizes = {name: itertools.count(first + 1) for name in chosen}

    def run_new_shape(name: str) -> float:
        return run(name, next(sizes[name]))()

    report_turns({name: functools.partial(run_new_shape, name) for name in chosen}, rounds)
    for batch in batches:
        actions = {name: run(name, batch, 5) for name in chosen}
        alternate(actions, 2)
        report_turns(actions, rounds, name=f"seconds, batches of {batch}")


def resident(session: Any, feed: dict[str, Any], device: str) -> Any:
    """Return a binding whose inputs are on the device, and whose outputs stay there."""
    import onnxruntime

    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)
    return binding


def take_turns(actions: Mapping[str, Callable[[], object]], count: int, rounds: int, name: str = "seconds") -> None:
    """Report the seconds of each action divided by ``count``, after a round that is not counted."""
    timers = {action: functools.partial(timed, actions[action]) for action in actions}
    alternate(timers, 1)
    gc.collect()
    report_turns(timers, rounds, count=count, name=name)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


WORKERS: dict[str, Callable[..., None]] = {
    "throughput": throughput,
    "reused": reused,
    "concurrency": concurrency,
    "options": options,
    "latency": latency,
    "thresholds": thresholds,
    "new_shape": new_shape,
    "first_run": first_run,
}
