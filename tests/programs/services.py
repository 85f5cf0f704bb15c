"""Programs that use pools and joined requests in unusual ways, on the CPU; the first argument names the program."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

import ortgpu
from ortgpu import GPUSession, GPUSessionPool
from ortgpu.process import background
from ortgpu.process.threads import Turns
from ortgpu.running.turns import take_turns
from tests.programs import worker_options
from tests.support.children import report

warnings.simplefilter("ignore")
logging.getLogger("ortgpu").addHandler(logging.NullHandler())
logging.getLogger("ortgpu").propagate = False


def model(text: str) -> bytes:
    data: bytes = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString()
    return data


RELU = model("m (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
TWO = model("m (float[n, 4] x) => (float[n, 4] a, float[n, 4] b) { a = Add(x, x)  b = Mul(x, x) }")


def times(factor: float) -> bytes:
    return model(f"m (float[n, 4] x) => (float[n, 4] y) <float f = {{{factor}}}> {{ y = Mul(x, f) }}")


def rows(count: int = 1, value: float = 1.0) -> dict[str, Any]:
    return {"x": np.full((count, 4), value, np.float32)}


def first(outputs: Any) -> float:
    return float(outputs[0].flat[0])


def name_of(action: Callable[[], object]) -> str:
    try:
        return str(action())
    except BaseException as error:
        return type(error).__name__


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def functions_entered() -> None:
    """Count the functions of ortgpu that a request enters in all threads, as a median: others may come."""
    entered: Counter[tuple[str, str]] = Counter()
    watches = False

    def profile(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if watches and event == "call" and "/ortgpu/" in code.co_filename:
            entered[code.co_filename, f"{code.co_name} {code.co_firstlineno}"] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    with (
        GPUSessionPool(RELU, allow_cpu=True) as pool,
        GPUSession(RELU, allow_cpu=True) as session,
        pool.batched() as joined,
        session.batched() as own,
    ):
        ways: dict[str, Callable[[], object]] = {
            "pool.run": lambda: pool.run(None, rows()),
            "pool.batched().submit": lambda: joined.submit(None, rows()).result(),
            "batched().submit": lambda: own.submit(None, rows()).result(),
        }
        for name, way in ways.items():
            for _ in range(20):
                way()
            time.sleep(0.1)
            counts = []
            for _ in range(5):
                entered.clear()
                watches = True
                way()
                time.sleep(0.05)
                watches = False
                counts.append(len(entered))
            report(name, statistics.median(counts))
    sys.setprofile(None)


def names_reused() -> None:
    """A client uses one list of output names for all of its requests."""
    wrong = Counter[str]()
    for isolate in (False, True):
        with GPUSessionPool(TWO, allow_cpu=True, isolate=isolate) as pool, pool.batched(64, max_wait=0.5) as joined:
            joined.run(["a"], rows(8, 5))  # so that the next ones wait for others
            names = ["a"]
            futures = [joined.submit(names, rows(1, 5)), *(joined.submit(["a"], rows(1, 5)) for _ in range(3))]
            names[0] = "b"
            futures += [pool.submit(names, rows(1, 5))]
            names[0] = "a"
            wrong[f"joined {isolate}"] = sum(first(each.result(20)) != 10 for each in futures[:-1])
            wrong[f"submit {isolate}"] = int(first(futures[-1].result(20)) != 25)

            def feeds(names: list[str] = names) -> Any:
                for number in range(20):
                    names[0] = "b" if number else "a"
                    yield rows(1, 5)

            wrong[f"map {isolate}"] = sum(first(each) != 10 for each in pool.map(feeds(), output_names=names))
    with GPUSession(TWO, allow_cpu=True) as session:
        names = ["a"]
        found = []
        for outputs in session.map([rows(1, 5)] * 20, output_names=names):
            names[0] = "b"
            found.append(first(outputs))
        wrong["map of a session"] = sum(each != 10 for each in found)
    report("wrong", dict(wrong))


def arrays_reused() -> None:
    """A client fills its array again as soon as submit has returned."""
    for isolate in (False, True):
        with GPUSessionPool(RELU, allow_cpu=True, isolate=isolate) as pool, pool.batched(8) as joined:
            for size in (1, 8, 40_000):
                array = np.empty((size, 4), np.float32)
                futures = []
                for number in range(20):
                    array[:] = number
                    futures.append(joined.submit(None, {"x": array}))
                array[:] = -1
                values = [sorted(set(each.result(30)[0].flat)) for each in futures]
                report(f"{isolate} {size}", values == [[number] for number in range(20)])


def options_that_stay() -> None:
    """SessionOptions with what ONNX Runtime does not tell of them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name("n", 3)
    report("object", name_of(lambda: GPUSessionPool(RELU, isolate=True, allow_cpu=True, sess_options=options)))
    report("number", name_of(lambda: GPUSessionPool(RELU, isolate=True, allow_cpu=True, sess_options=3)))
    report("of main", name_of(lambda: GPUSessionPool(RELU, isolate=True, allow_cpu=True, sess_options=shapes)))
    for isolate in (True, False):
        with GPUSessionPool(
            RELU, isolate=isolate, allow_cpu=True, sess_options=worker_options.fix_dimension, sessions_per_device=2
        ) as pool:
            report(f"function {isolate}", [pool._workers[0].declared[0][0].shape, first(pool.run(None, rows(3)))])


def replaced_file() -> None:
    """A deployment renames a new model over the file, or removes it, and then workers die."""
    folder = Path(tempfile.mkdtemp())
    for kind in ("one file", "weights beside it"):
        path = folder / "model.onnx"
        save(path, 2, kind)
        with GPUSessionPool(path, isolate=True, allow_cpu=True) as pool:
            told: list[list[float]] = []
            for change in ("replaced", "removed"):
                if change == "replaced":
                    save(folder / "new.onnx", 3, kind)
                    for each in folder.glob("new.onnx*"):
                        os.replace(each, folder / each.name.replace("new", "model"))
                else:
                    for each in folder.iterdir():
                        each.unlink()
                deaths = len(told) + 1
                for worker in pool.health():
                    os.kill(worker.pid or 0, signal.SIGKILL)
                until(lambda: all(each.state == "ready" and each.restarts == deaths for each in pool.health()))
                told.append([first(pool.run(None, rows()))])
            report(kind, told)


def save(path: Path, factor: float, kind: str) -> None:
    made = onnx.load_from_string(
        model("m (float[n, 4] x) => (float[n, 4] y) <float[4] f = {1, 1, 1, 1}> { y = Mul(x, f) }")
    )
    made.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.full(4, factor, np.float32), "f"))
    beside = kind != "one file"
    onnx.save_model(made, path, save_as_external_data=beside, location=f"{path.name}.data", size_threshold=0)


class Bomb(str):
    def __reduce__(self) -> Any:
        return os._exit, (9,)


def deadly_feed() -> None:
    """A request ends each process that unpickles it."""
    with GPUSessionPool(RELU, isolate=True, allow_cpu=True, sessions_per_device=2) as pool:
        report("bomb", name_of(lambda: pool.run([Bomb("y")], rows())))
        report("others", [first(pool.submit(None, rows(1, n)).result(30)) for n in range(5)])
        until(lambda: all(each.state == "ready" for each in pool.health()))
        report("restarts", sum(each.restarts for each in pool.health()))


class Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError("a context variable that is not set in this thread")


def log_filters() -> None:
    """A filter of the program raises in each thread of the pools."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Filter())
    logging.getLogger("ortgpu").setLevel(logging.WARNING)
    with (
        GPUSessionPool(RELU, isolate=True, allow_cpu=True) as isolated,
        GPUSessionPool(RELU, allow_cpu=True) as pool,
        pool.batched(4) as joined,
    ):
        logging.getLogger("ortgpu").addHandler(handler)
        os.kill(isolated.health()[0].pid or 0, signal.SIGKILL)
        until(lambda: isolated.health()[0].restarts == 1 and isolated.health()[0].state == "ready")
        report("isolated", first(isolated.run(None, rows(1, 7))))

        def end(_: Future[Any]) -> None:
            raise SystemExit(1)

        called: list[int] = []
        for submit in (pool.submit, joined.submit):
            for number in range(5):
                future = submit(None, rows(1, number))
                future.add_done_callback(end)
                future.add_done_callback(lambda _, number=number: called.append(number))  # type: ignore[misc]
                future.result(20)
        report("threads", [first(pool.run(None, rows(1, 7))), pool.health()[0].state])
        until(lambda: len(called) == 10)
        logging.getLogger("ortgpu").removeHandler(handler)


def lost_while_others_open() -> None:
    """A worker is given up while another one still opens."""
    from ortgpu.session.pool import isolated

    isolated._GIVEN_UP, isolated._BACK_OFF = 0.2, (0.01, 0.02)
    isolated.SERVE = "tests.programs.services:serve_in_turn"
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    path.write_bytes(RELU)
    os.environ["TURNS"] = str(path.parent)
    with GPUSessionPool(path, isolate=True, allow_cpu=True, sessions_per_device=2) as pool:
        report("opened", [len(pool), [each.state for each in pool.health()]])
        os.kill(pool.health()[1].pid or 0, signal.SIGKILL)
        until(lambda: not len(pool))
        report("over", [name_of(lambda: pool.submit(None, rows()).result(20)), len(pool.lost)])


def serve_in_turn(*opening: Any) -> Any:
    """Open the first process's session, which ends itself; the second's, seconds later; none after that."""
    from ortgpu.session.pool import worker_process

    folder = Path(os.environ["TURNS"])
    turn = len(list(folder.glob("turn*")))
    (folder / f"turn{turn}").touch()
    if turn == 1:
        (folder / "second").touch()
        time.sleep(4)
    elif turn > 1:
        raise OSError("no more")
    opened = worker_process.serve(*opening)
    if turn == 0:

        def end() -> None:
            until(lambda: (folder / "second").exists())
            os._exit(3)

        threading.Thread(target=end, daemon=True).start()
    return opened


def stopped_worker(end: str) -> None:
    """A worker process that was stopped has a request when the pool, or the program, ends."""
    from ortgpu.environment import child_process
    from ortgpu.session.pool import isolated

    pool = GPUSessionPool(RELU, isolate=True, allow_cpu=True)
    pool.run(None, rows())
    pid = pool.health()[0].pid or 0
    os.kill(pid, signal.SIGSTOP)
    until(lambda: all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()))
    future = pool.submit(None, rows())
    until(lambda: pool.health()[0].in_flight == 1)
    isolated._DEATH = child_process._DEATH = 1.0  # it will not answer
    since = pool.health()[0].running_since
    report("since", since is not None and abs(time.time() - since) < 20)
    report("drain", name_of(lambda: pool.drain(0.2)))
    started = time.monotonic()
    if end == "close":
        pool.close()
        report("future", name_of(lambda: future.result(1)))
        report("left", [each.name for each in threading.enumerate() if each.name.startswith("ortgpu")])
        report("seconds", time.monotonic() - started)


def _state(task: Path) -> str:
    return (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def long_run() -> None:
    """Runs outlast the limit of close(): a process is killed, a thread is left and closes the sessions later."""
    from ortgpu.session.pool import isolated, serving

    isolated.SERVE = "tests.support.deadly_worker:serve"
    pool = GPUSessionPool(RELU, isolate=True, allow_cpu=True)
    future = pool.submit(None, rows(1, -1))  # which hangs
    until(lambda: pool.health()[0].in_flight == 1)
    time.sleep(0.3)
    started = time.monotonic()
    pool.close(0.5)
    report("isolated", [time.monotonic() - started < 12, name_of(lambda: future.result(1))])
    soon = Fraction(1, 4)
    with GPUSessionPool(RELU, isolate=True, allow_cpu=True, deadline=soon, first_deadline=soon) as pool:  # type: ignore[arg-type]  # a real number
        report("deadline", name_of(lambda: pool.run(None, rows(1, -1))))
        report("no number", [name_of(lambda: pool.drain("x")), name_of(lambda: pool.close("x"))])  # type: ignore[arg-type]
        until(lambda: pool.health()[0].state == "ready")
        report("goes on", first(pool.run(None, rows(1, 3))))
    with GPUSessionPool(RELU, isolate=True, allow_cpu=True, first_deadline=0.25) as pool:
        report("first deadline alone", name_of(lambda: pool.run(None, rows(1, -1))))
    serving._ENDING = 0.2  # the run waits for an event
    pool = GPUSessionPool(RELU, allow_cpu=True)
    (session,) = pool.sessions
    opened = threading.Event()
    inner = session._sess

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def run(self, *arguments: Any) -> Any:
            opened.wait(30)
            return inner.run(*arguments)

    session._sess = Slow()
    future = pool.submit(None, rows())
    until(lambda: pool.health()[0].in_flight == 1)
    report("threads", name_of(lambda: pool.close(0.2)))
    opened.set()
    report("result", first(future.result(10)))
    until(lambda: name_of(lambda: session.run(None, rows())) == "ExecutionError")
    pool.close()


def hung_at_exit(isolate: str) -> None:
    """A run hangs when the program ends, which waits for a limited time."""
    from ortgpu.session.pool import isolated, serving

    vars(serving)["AT_EXIT"] = 1.0
    isolated.SERVE = "tests.support.deadly_worker:serve"
    pool = GPUSessionPool(RELU, allow_cpu=True, isolate=bool(isolate))
    if not isolate:
        serving._ENDING = 0.2
        pool.sessions[0]._sess = Hanging(pool.sessions[0]._sess)
    pool.submit(None, rows(1, -1))
    until(lambda: pool.health()[0].in_flight == 1)
    time.sleep(0.3)
    report("pid", pool.health()[0].pid)


class Hanging:
    """The C++ session of a session whose runs hang."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *_: object) -> None:
        threading.Event().wait()


def ended_threads() -> None:
    """Something of the program raises in a thread of a pool until it ends, as libraries for time limits do."""
    with GPUSessionPool(RELU, allow_cpu=True) as pool:
        while all(thread.is_alive() for thread in pool._service.threads):
            *_, last = [pool.submit(None, rows()) for _ in range(50)]
            last.add_done_callback(raise_at_each_step)
            time.sleep(0.1)
        report("state", pool.health()[0].state)
        report("others", [first(pool.run(None, rows(1, number))) for number in range(5)])
    report("closed", pool.health()[0].state)


def raise_at_each_step(_: object) -> None:
    """Raise SystemExit at each line of this thread's functions, and at each call, if it is a thread of a pool.

    A tracing function is unset once it raises. This one has the interpreter raise, and consists of C alone, since the
    interpreter would raise in Python code of it: ``print`` writes to ``PyThreadState_SetAsyncExc``, with one argument
    more than that takes.
    """
    if threading.current_thread() is threading.main_thread():
        return  # The future was done before it had this callback.
    ident = threading.get_ident()
    set_exception = functools.partial(
        ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(ident), ctypes.py_object(SystemExit)
    )
    trace: Any = functools.partial(print, file=types.SimpleNamespace(write=set_exception))
    frame = sys._getframe().f_back
    while frame is not None:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)


def interrupted() -> None:
    """Ctrl-C comes amid runs that the main thread asks for: by batched(), and in a handler that came amid a lock."""
    for isolate in (False, True):
        with GPUSessionPool(RELU, isolate=isolate, allow_cpu=True) as pool:

            def join(pool: GPUSessionPool = pool) -> None:
                pool.batched(8).close()

            def run_amid_a_lock(pool: GPUSessionPool = pool) -> None:
                with background.this_thread.holds:
                    for _ in range(100):
                        pool.run(None, rows(1, 3))

            def limit(*_: object) -> None:
                raise TimeoutError("a time limit of the program")

            wrong = 0
            signal.signal(signal.SIGINT, signal.default_int_handler)  # A program started in the background ignores it.
            signal.signal(signal.SIGUSR1, limit)
            for action in [*[join] * 8, run_amid_a_lock, run_amid_a_lock]:
                interrupt_once_busy(pool, action)
                wrong += sum(first(pool.run(None, rows(1, value))) != value for value in (1, 2) * 4)
            for _ in range(2):
                interrupt_once_busy(pool, run_amid_a_lock, signal.SIGUSR1)
                wrong += sum(first(pool.run(None, rows(1, value))) != value for value in (1, 2) * 4)
            report("isolated" if isolate else "threads", [wrong, pool.health()[0].in_flight])


def interrupt_once_busy(pool: GPUSessionPool, action: Callable[[], object], by: int = signal.SIGINT) -> None:
    while pool.health()[0].in_flight:  # A run of the action before this one would bring the interrupt too early.
        time.sleep(0.001)
    is_over = threading.Event()

    def interrupt() -> None:
        while not pool.health()[0].in_flight and not is_over.is_set():
            pass
        os.kill(os.getpid(), by)

    watch = threading.Thread(target=interrupt)
    watch.start()
    try:
        action()
        is_over.set()
        watch.join()
        time.sleep(30)
    except (KeyboardInterrupt, TimeoutError):
        watch.join()


def ways_to_ask(joined: Any, pool: GPUSessionPool) -> list[Callable[[Any], Any]]:
    """Return functions that run a feed, each in another way."""
    return [
        lambda feed: joined.run(None, feed),
        lambda feed: joined.submit(None, feed).result(20),
        lambda feed: pool.run(None, feed),
        lambda feed: pool.submit(None, feed).result(20),
    ]


def asked_with_the_next_turn() -> None:
    """A signal handler amid the wait for a turn asks services of that session, whose runs wait for a later turn."""
    with GPUSessionPool(RELU, allow_cpu=True) as pool:
        (session,) = pool.sessions
        turns = Turns()
        take_turns(session._gpu_runner, turns)
        free, answers = turns.lock, []
        with session.batched() as joined:
            ways = [*ways_to_ask(joined, pool), lambda feed: next(iter(list(session.map([feed] * 2))))]

            class Asking:
                """A lock in whose wait a handler comes."""

                def acquire(self, *arguments: Any, **named: Any) -> bool:
                    if threading.current_thread() is threading.main_thread():
                        at_work.set()
                        if ways:
                            answers.append(first(ways.pop()(rows(1, 3))))
                    return free.acquire(*arguments, **named)

                def release(self) -> None:
                    free.release()

            has_begun, at_work = threading.Event(), threading.Event()
            other = threading.Thread(target=turns.run, args=(lambda: (has_begun.set(), at_work.wait(20)),))
            other.start()
            has_begun.wait(20)
            turns.lock = Asking()  # type: ignore[assignment]  # a stand-in
            answers.append(first(session.run(None, rows(1, 2))))
            other.join(20)
        report("answers", answers)


def asked_amid_a_turn() -> None:
    """A signal handler amid a run in turns, as of a session with ``memory=``, asks services of that session."""
    with GPUSessionPool(RELU, allow_cpu=True) as pool:
        (session,) = pool.sessions
        take_turns(session._gpu_runner, Turns())
        inner = session._sess
        answers = []
        with session.batched() as joined:
            ways = ways_to_ask(joined, pool)

            def ask(*_: object) -> None:
                way = ways.pop()
                session._sess = inner
                answers.append(first(way(rows(1, 3))))

            class Interrupted:
                def __getattr__(self, name: str) -> Any:
                    return getattr(inner, name)

                def run(self, *arguments: Any) -> Any:
                    signal.raise_signal(signal.SIGUSR1)
                    return inner.run(*arguments)

            signal.signal(signal.SIGUSR1, ask)
            while ways:
                session._sess = Interrupted()
                answers.append(first(session.run(None, rows(1, 2))))
        report("answers", answers)


def shapes() -> None:
    """Each request has another shape, so that none can be joined."""
    any_shape = model("m (float[n, 3, h, w] x) => (float[n, 3, h, w] y) { y = Relu(x) }")
    with GPUSession(any_shape, allow_cpu=True) as session, session.batched(64) as joined:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(12):
            joined.submit(None, {"x": np.ones((1, 3, 500, 500 + number), np.float32)}).result(30)
        grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        report("megabytes", grew >> 10)  # 64 items of one shape are 192


def no_standard_input() -> None:
    with GPUSessionPool(RELU, isolate=True, allow_cpu=True) as pool:
        report("value", first(pool.run(None, rows(1, 3))))


def sigpipe_at_default() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with GPUSessionPool(RELU, isolate=True, allow_cpu=True) as pool:
        for _ in range(4):
            first(pool.run(None, rows()))
            pid = pool.health()[0].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    pool._workers[0]._current.exchanges[0].send("x" * 100_000)  # type: ignore[attr-defined]
        report("survived", True)


def limits() -> None:
    """Too few descriptors, files that are too large, and arguments that mean nothing, end in typed errors."""

    def under(limit: int, value: int, action: Callable[[], object]) -> str:
        soft, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value, hard))
        try:
            return name_of(action)
        finally:
            resource.setrlimit(limit, (soft, hard))

    def opened(data: bytes = RELU, **options: Any) -> float:
        with GPUSessionPool(data, isolate=True, allow_cpu=True, **options) as pool:
            return first(pool.run(None, rows(1, 3)))

    here = len(os.listdir("/proc/self/fd"))
    report("descriptors", [under(resource.RLIMIT_NOFILE, here + more, opened) for more in (0, 1, 4, 9)])
    report("file size", under(resource.RLIMIT_FSIZE, 10, opened))
    report("empty model", name_of(lambda: opened(b"")))
    report("deadline", [name_of(lambda: opened(deadline=each)) for each in ("1", True, None, 1e300)])
    report("first deadline", name_of(lambda: opened(deadline=5, first_deadline=9.5)))
    report("iterator", name_of(lambda: opened(devices=iter([0]))))
    report("left", [len(os.listdir("/proc/self/fd")) - here, len(ortgpu.sessions())])


if __name__ == "__main__":
    from tests.programs import no_search  # noqa: F401 - tests import this module, and search a GPU

    globals()[sys.argv[1]](*sys.argv[2:])
