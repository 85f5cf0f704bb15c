"""Let the worker processes of pools die under load, and account for every request.

    python -m benchmarks.chaos [--minutes N] [--kill SECONDS] [--spoil SECONDS] [--cpu] [--json FILE]

Clients send batches to a pool with ``isolate=True`` over all GPUs and compare each result. Meanwhile a worker process
is killed every few seconds, requests to a second pool hang or poison its CUDA contexts, and storms of requests are
cancelled. Then one worker alone is killed, and the time to the first result of its successor is taken.

Exit status 1: a result was wrong, a request had neither result nor typed error, a process was left, or memory or
descriptors grew. ``--cpu`` has small models on the CPU, where a sticky error is only raised: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import made_model
from benchmarks.soak import SAMPLES, TOLERANCE, bytes_in_use, growth
from benchmarks.throughput import ON_THE_CPU
from benchmarks.throughput_workers import relative_error
from benchmarks.workers import feed_of
from ortgpu import GPUError, GPUSessionPool
from ortgpu.session.pool import isolated
from ortgpu.testing import LEAK_MARGIN
from tests.support import deadly_worker
from tests.support.children import run_child
from tests.support.plain_session import plain_session
from tests.support.this_machine import environment_record, find_gpus

BATCHES = (1, 2, 4, 8)
CLIENTS = 8
STORM = 64  # requests, most of which are cancelled
LATE = 120.0  # seconds after which a request counts as lost
DEADLINE = 2.0  # seconds of a run of the pool in which some hang
RECOVERIES = 5


def save_expected(model: str, device: str, file: str) -> None:
    """Save feeds and plain ONNX Runtime's results. In a process of its own: that of the pool is to have no CUDA."""
    session = plain_session(model, device)
    arrays = {}
    for batch in BATCHES:
        ((name, array),) = feed_of(session, batch, seed=batch).items()
        arrays |= {f"in{batch}": array, f"out{batch}": session.run(None, {name: array})[0], "name": np.array(name)}
    np.savez(file, **arrays)


# A feed and its result
Pair = tuple[dict[str, Any], Any]


def read_expected(file: str) -> dict[int, Pair]:
    with np.load(file) as saved:
        name = str(saved["name"])
        return {batch: ({name: saved[f"in{batch}"]}, saved[f"out{batch}"]) for batch in BATCHES}


def _feed_of(value: float) -> dict[str, Any]:
    return {"x": np.full(4, value, np.float32)}


class Account:
    """What became of all requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.worst = 0.0

    def add(self, future: Future[Any], expected: Any) -> None:
        """Wait for a request and count its end."""
        try:
            error = relative_error(future.result(LATE), [expected])
            end = "right" if error <= TOLERANCE else "wrong"  # also NaN is wrong
            with self._lock:
                self.worst = max(self.worst, error)
        except LateError:
            end = "lost"
        except CancelledError:
            end = "cancelled"
        except GPUError as error:
            end = type(error).__name__
        except Exception as error:  # no typed error: a fault
            end = f"lost: {type(error).__name__}: {error}"
        with self._lock:
            self.ends[end] += 1

    @property
    def faults(self) -> int:
        return sum(count for end, count in self.ends.items() if end == "wrong" or end.startswith("lost"))


class Pools:
    """The two pools, and what happens to them until :attr:`ended` is set."""

    def __init__(self, model: str, device: str, gpus: int, pairs: dict[int, Pair]) -> None:
        common: dict[str, Any] = {"isolate": True, "allow_cpu": device == "cpu", "cpu_nodes": "allow"}
        each = 1 if gpus > 1 else 2
        self.ended = threading.Event()
        self.account = Account()
        self.seen: set[int] = set()  # all processes of workers
        self.killed = 0
        self.spoilt: Counter[str] = Counter()  # what a request ended in that poisons or hangs
        self.failed: list[str] = []
        self._pairs, self._pick = pairs, random.Random(0)
        self.load = GPUSessionPool(model, sessions_per_device=each, **common)
        isolated.SERVE = "tests.support.deadly_worker:serve"
        self.spoiling = GPUSessionPool(made_model("negate"), sessions_per_device=2, deadline=DEADLINE, **common)
        self.all = [self.load, self.spoiling]

    def _submitted(self) -> tuple[Future[Any], Any]:
        feed, expected = self._pairs[self._pick.choice(BATCHES)]
        return self.load.submit(None, feed), expected

    def request(self) -> None:
        self.account.add(*self._submitted())

    def storm(self) -> None:
        """Submit many requests and cancel most of them."""
        requests = [self._submitted() for _ in range(STORM)]
        for future, _ in requests[:: -1 if self._pick.random() < 0.5 else 1][: STORM - 4]:
            future.cancel()
        for future, expected in requests:
            self.account.add(future, expected)

    def kill(self) -> None:
        self.notice()
        ready = [each.pid for each in self.load.health() if each.state == "ready" and each.pid]
        if ready:
            with suppress(ProcessLookupError):
                os.kill(self._pick.choice(ready), signal.SIGKILL)
                self.killed += 1

    def spoil(self) -> None:
        """Have a request hang, and one poison the context. The pool must go on afterwards."""
        for value in (deadly_worker.HANGS, deadly_worker.STICKY):
            for each in [self.spoiling.submit(None, _feed_of(1)) for _ in range(8)]:
                each.result(LATE)  # all workers know the shape then: the deadline holds
            self.notice()
            try:
                self.spoiling.submit(None, _feed_of(value)).result(LATE)
                self.failed.append(f"a request that is deadly ({value}) had a result")
            except GPUError as error:
                self.spoilt[f"{type(error).__name__}: {getattr(error, 'cause', error.summary)}"] += 1
            if self.spoiling.submit(None, _feed_of(1)).result(LATE)[0][0] != -1:
                self.failed.append("a result was wrong after a worker was lost")

    def notice(self) -> None:
        for pool in self.all:
            self.seen |= {each.pid for each in pool.health() if each.pid}

    def until_the_end(self, action: Callable[[], object], pause: float = 0.0) -> Callable[[], None]:
        def repeat() -> None:
            while not self.ended.wait(pause):
                try:
                    action()
                except Exception as error:
                    self.failed.append(f"{getattr(action, '__name__', action)}: {type(error).__name__}: {error}")
                    return

        return repeat

    def close(self) -> None:
        for pool in self.all:
            pool.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def recoveries(model: str, device: str, feed: dict[str, Any]) -> list[float]:
    """Return the seconds from the death of the only worker to the first result of its successor."""
    found = []
    devices = "all" if device == "cpu" else [0]
    with GPUSessionPool(model, devices, isolate=True, allow_cpu=device == "cpu") as pool:
        pool.run(None, feed)
        for _ in range(RECOVERIES):
            (worker,) = pool.health()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            started = time.perf_counter()
            pool.run(None, feed)
            found.append(time.perf_counter() - started)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="Workers die; no request is lost.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (10)")
    parser.add_argument("--kill", type=float, default=5.0, metavar="SECONDS", help="between two killed workers (5)")
    parser.add_argument(
        "--spoil", type=float, default=30.0, metavar="SECONDS", help="between two poisoned contexts (30)"
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU with small models: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--expected", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.expected:
        save_expected(*options.expected)
        return 0
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Otherwise the sessions are on the GPUs of the machine.
    gpus = find_gpus()
    if not options.cpu and not gpus.visible:
        print(f"needs an NVIDIA GPU, or --cpu: {gpus.reason}", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")  # of the CPU
    device = "cpu" if options.cpu else "cuda"
    model = made_model(ON_THE_CPU["resnet50"] if options.cpu else "resnet50")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "expected.npz")
        run_child([sys.executable, "-m", "benchmarks.chaos", "--expected", model, device, file], deadline=300).ok()
        pairs = read_expected(file)
    pools = Pools(model, device, len(gpus.visible), pairs)
    threads = [threading.Thread(target=pools.until_the_end(pools.request), daemon=True) for _ in range(CLIENTS)]
    threads += [
        threading.Thread(target=pools.until_the_end(action, pause), daemon=True)
        for action, pause in ((pools.storm, 3.0), (pools.kill, options.kill), (pools.spoil, options.spoil))
    ]
    memory: dict[str, list[int]] = {}
    for thread in threads:
        thread.start()
    seconds = 60 * options.minutes
    for _ in range(SAMPLES):
        time.sleep(seconds / SAMPLES)
        sampled = {**bytes_in_use(() if options.cpu else gpus.visible), "descriptors": descriptors()}
        for place, size in sampled.items():
            memory.setdefault(place, []).append(size)
    pools.ended.set()
    for thread in threads:
        thread.join(3 * LATE)
    pools.notice()
    restarts = sum(each.restarts for pool in pools.all for each in pool.health())
    pools.close()
    orphans = [pid for pid in pools.seen if is_there(pid)]
    grown = {place: growth(sizes) for place, sizes in memory.items()}
    # Descriptors and GPU memory go up and down with the workers that are just being replaced
    too_much = {place: size for place, size in grown.items() if size > (64 if place == "descriptors" else LEAK_MARGIN)}
    stuck = sum(thread.is_alive() for thread in threads)
    recovered = recoveries(model, device, pairs[1][0])
    record = {
        "benchmark": "chaos",
        **environment_record(gpus),
        "minutes": options.minutes,
        "requests": dict(pools.account.ends),
        "largest error": pools.account.worst,
        "killed": pools.killed,
        "restarts": restarts,
        "spoilt": dict(pools.spoilt),
        "failed": pools.failed,
        "stuck": stuck,
        "orphans": orphans,
        "growth": grown,
        "samples": memory,
        "seconds from a death to the first result": recovered,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"requests: {dict(pools.account.ends)}; largest relative error {pools.account.worst:.1e}")
    print(f"killed {pools.killed}, restarted {restarts}; hanging and poisoning: {dict(pools.spoilt)}")
    print(f"left {len(orphans)}, stuck {stuck}, growth {grown}")
    print(
        f"from a death to the first result: median {statistics.median(recovered):.2f} s, worst {max(recovered):.2f} s"
    )
    for line in pools.failed:
        print(line)
    failed = bool(pools.account.faults or pools.failed or orphans or too_much or stuck or not pools.killed)
    print("FAILED" if failed else "OK")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
