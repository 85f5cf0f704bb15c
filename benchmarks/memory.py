"""Measure the promises about GPU memory: budgets, what they cost, trimming, many models, and what ``fit`` says.

    python -m benchmarks.memory [--out FILE] [--parts PART ...] [--runs N] [--limit S] [--seconds S]

Each part runs in a process of its own. Memory is that of the whole GPU, so nothing else may use it. On a host with two
GPUs, run half of the parts on each: CUDA_VISIBLE_DEVICES names one. Except in ``fit``, the memory that a process takes
before its first session of a part, CUDA's context and common kernels, is not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from benchmarks import shapes, zoo_models
from benchmarks.parts import measure_parts
from benchmarks.shapes import timed
from ortgpu.running.made_inputs import make_inputs

_MIB = 1 << 20
_TOLERANCE = 2e-2  # of the largest value: other convolution algorithms, and TF32
_CUDA = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]

Feed = dict[str, np.ndarray[Any, Any]]
_SIZE = 256  # of an item of a sequence


def _sequence() -> bytes:
    """Four layers of a transformer over sequences of any length, without convolutions."""
    net, x = shapes.Mixed(), "x"
    for _ in range(4):
        x = net.transformer(x, 0, _SIZE, 4)
    return net.content(["batch", "steps", _SIZE], (x, TensorProto.FLOAT))


MODELS: Mapping[str, Callable[[], Any]] = {
    "pyramid": lambda: shapes.KINDS["pyramid"]()[0],
    "unet": lambda: shapes.KINDS["unet"]()[0],
    "sequence": _sequence,
}
_KINDS = tuple(MODELS)


def random_feed(kind: str, random: np.random.Generator) -> Feed:
    """Return an input of a random shape."""
    shape: tuple[int, ...]
    if kind == "sequence":
        shape = (int(random.integers(1, 17)), 16 * int(random.integers(2, 60)), _SIZE)
    else:
        most = 25 if kind == "pyramid" else 17
        height, width = (32 * int(each) for each in random.integers(4, most, 2))
        shape = (int(random.integers(1, 9)), 3, height, width)
    return {"x": random.standard_normal(shape, dtype=np.float32)}


def small_feed(kind: str) -> Feed:
    return {"x": np.ones((1, 32, _SIZE) if kind == "sequence" else (1, 3, 128, 128), np.float32)}


def sample(result: np.ndarray[Any, Any]) -> list[float]:
    flat = result.ravel()
    return [float(each) for each in flat[:: max(1, flat.size // 50)]]


def is_close(found: Sequence[float], expected: Sequence[float]) -> bool:
    largest = max(map(abs, expected))
    return len(found) == len(expected) and bool(
        np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * largest)
    )


class Device:
    """The first GPU, with a context and the libraries loaded."""

    def __init__(self) -> None:
        from ortgpu import GPUSession

        for kind in _KINDS:
            with GPUSession(MODELS[kind]()) as session:
                session.run(None, small_feed(kind))
            self.device = session.__dict__["device"]
        self.before = self.used()

    def used(self) -> int:
        from ortgpu.environment.gpu.driver import read_gpu_memory

        known = read_gpu_memory(self.device.uuid)
        assert known is not None
        return known[1] - known[0]

    def taken(self) -> int:
        return self.used() - self.before


def plain_session(model: bytes) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model, providers=_CUDA)


def measure_budgets(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs of random shapes, unlimited and with budgets of parts of the unlimited peak."""
    from ortgpu import GPUSession

    device = Device()
    model = MODELS[kind]()
    plain = plain_session(model)
    random = np.random.default_rng(1)
    expected, peak, until = list[list[float]](), 0, time.monotonic() + options.limit
    while len(expected) < options.runs and time.monotonic() < until:
        expected.append(sample(plain.run(None, random_feed(kind, random))[0]))
        peak = max(peak, device.taken())
    (small,) = plain.run(None, small_feed(kind))
    del plain
    figures: dict[str, Any] = {"peak MiB": peak / _MIB, "left after plain MiB": device.taken() / _MIB}
    for part in (0.3, 0.5, 1.0):
        budget = int(part * peak)
        device.before = device.used()
        try:
            session = GPUSession(model, memory=budget)
        except MemoryError as error:
            figures[str(part)] = {"budget MiB": budget / _MIB, "does not open": str(error).splitlines()[0]}
            continue
        random = np.random.default_rng(1)
        outcomes = {"right": 0, "wrong": 0, "out of memory": 0}
        highest, until = device.taken(), time.monotonic() + options.limit
        for want in expected:
            if time.monotonic() > until:
                break
            try:
                found = sample(session.run(None, random_feed(kind, random))[0])
                outcomes["right" if is_close(found, want) else "wrong"] += 1
            except MemoryError:
                outcomes["out of memory"] += 1
            highest = max(highest, device.taken())
        last = is_close(sample(session.run(None, small_feed(kind))[0]), sample(small))
        arena = session.memory.arena or 0
        figures[str(part)] = {
            "budget MiB": budget / _MIB,
            "highest MiB": highest / _MIB,
            "above MiB": (highest - budget) / _MIB,
            "outside at the end MiB": (device.taken() - arena) / _MIB,
            **outcomes,
            "small run right": last,
        }
        session.close()
    return figures


def measure_cost() -> dict[str, Any]:
    """Median runs with a budget that is not reached over those without, alternately, by five pairs of sessions.

    The medians of two equal sessions may differ by a tenth, whatever the number of their runs.
    """
    from ortgpu import GPUSession

    figures: dict[str, Any] = {}
    for kind in _KINDS:
        model, feed = MODELS[kind](), small_feed(kind)
        pairs = []
        for pair in range(5):
            sessions = [GPUSession(model, memory=memory) for memory in ((None, "8GiB") if pair % 2 else ("8GiB", None))]
            sessions = sessions if pair % 2 else sessions[::-1]
            times: list[list[float]] = [[], []]
            for turn in range(300):
                for each in (0, 1) if turn % 2 else (1, 0):
                    milliseconds = timed(sessions[each].run, None, feed)
                    if turn > 50:
                        times[each].append(milliseconds)
            pairs.append([statistics.median(each) for each in times])
            for session in sessions:
                session.close()
        ratios = [within / without for without, within in pairs]
        figures[kind] = {"without and within ms": pairs, "ratio": statistics.median(ratios), "worst": max(ratios)}
    return figures


def measure_trim() -> dict[str, Any]:
    """Memory after trim() over that after the first small run, unlimited sessions."""
    from ortgpu import GPUSession

    device, figures = Device(), dict[str, Any]()
    for kind in _KINDS:
        device.before = device.used()
        session = GPUSession(MODELS[kind]())
        session.run(None, small_feed(kind))
        first = device.taken()
        random = np.random.default_rng(2)
        for _ in range(20):
            session.run(None, random_feed(kind, random))
        grown = device.taken()
        milliseconds = timed(session.trim)
        trimmed = device.taken()
        session.run(None, small_feed(kind))
        figures[kind] = {
            "first MiB": first / _MIB,
            "grown MiB": grown / _MIB,
            "trimmed MiB": trimmed / _MIB,
            "ratio": trimmed / first,
            "small run again MiB": device.taken() / _MIB,
            "trim ms": milliseconds,
            "memory": str(session.memory).splitlines(),
        }
        session.close()
    return figures


BATCHES = (1, 8, 32)
FIT_KINDS = (
    "resnet", "vision-transformer", "unet", "recurrent", "dense", "grouped", "squeeze-excite", "windowed-transformer",
    "perceptron", "enlarging",
)  # fmt: skip


def use_model(path: str, batch: int) -> tuple[float, float]:
    """Return the MiB of this process, which has no other session, after the first run and after later runs."""
    from ortgpu import GPUSession
    from ortgpu.environment.gpu.cuda import initialise
    from ortgpu.provider.devices import choose_visible
    from tests.support.gpu_memory import used_bytes

    uuid = choose_visible(None, initialise()).uuid
    assert uuid is not None

    before = used_bytes(uuid)
    session = GPUSession(path, cpu_nodes="allow")
    feed = make_inputs(session.get_inputs(), batch)
    session.run(None, feed)
    first = used_bytes(uuid) - before
    session.trim()
    for _ in range(5):
        session.run(None, feed)
    return first / _MIB, (used_bytes(uuid) - before) / _MIB


def measure_fit(kind: str) -> dict[str, Any]:
    """What ``ortgpu.fit`` says of a batch, with CUDA's context, beside NVML's figure of a process that runs it."""
    import ortgpu

    with tempfile.TemporaryDirectory() as folder:
        path = str(zoo_models.made(kind, Path(folder)))
        began = time.perf_counter()
        found = ortgpu.fit(path, BATCHES)
        figures: dict[str, Any] = {"seconds of fit": time.perf_counter() - began}
        for row in found.models[0].rows:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                nvml = pool.submit(use_model, path, row.batch or 1).result()
            told = [((size or 0) + (found.context or 0)) / _MIB for size in (row.peak, row.steady)]
            within = [abs(a - b) <= max(32, 0.05 * b) for a, b in zip(told, nvml, strict=True)]
            figures[str(row.batch)] = {"fit MiB": told, "NVML MiB": nvml, "within": within}
    return figures


def measure_models(seconds: float) -> dict[str, Any]:
    """Twelve models in a third of what they take together, in eight threads."""
    from ortgpu import GPUModels, GPUSession

    device = Device()
    with tempfile.TemporaryDirectory() as folder:
        paths, feeds, expected, sizes = [], [], [], []
        for number in range(12):
            kind = _KINDS[number % len(_KINDS)]
            path = Path(folder, f"{number}.onnx")
            path.write_bytes(MODELS[kind]())
            random = np.random.default_rng(number)
            own = [small_feed(kind), *(random_feed(kind, random) for _ in range(2))]
            before = device.used()
            with GPUSession(path) as session:
                wanted = [sample(session.run(None, feed)[0]) for feed in own]
                sizes.append(device.used() - before)
            paths.append(path)
            feeds.append(own)
            expected.append(wanted)
        budget = sum(sizes) // 3
        device.before = device.used()
        models = GPUModels(budget=budget)
        counts = {"right": 0, "wrong": 0, "lost": 0, "out of memory": 0}
        errors: list[str] = []
        until, lock, highest = time.monotonic() + seconds, threading.Lock(), 0

        def use(seed: int) -> None:
            order = np.random.default_rng(seed)
            while time.monotonic() < until:
                model, feed = int(order.integers(12)), int(order.choice(3, p=[0.8, 0.1, 0.1]))
                try:
                    found = sample(models[paths[model]].run(None, feeds[model][feed])[0])
                    outcome = "right" if is_close(found, expected[model][feed]) else "wrong"
                except MemoryError as error:
                    outcome = "out of memory"
                    errors.append(str(error).splitlines()[0])
                except Exception as error:
                    outcome = "lost"
                    errors.append(repr(error)[:200])
                with lock:
                    counts[outcome] += 1

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            highest = max(highest, device.taken())
            time.sleep(0.002)
        opened = sum(each.opened for each in models.health())
        model = models[paths[0]]
        model.run(None, feeds[0][0])
        with model.session() as session:
            times: list[list[float]] = [[], [], []]
            name, small = str(paths[0]), feeds[0][0]

            # Each way within a function, so that its call costs all of them the same.
            def run_session() -> None:
                session.run(None, small)

            def run_model() -> None:
                model.run(None, small)

            def run_by_path() -> None:
                models[name].run(None, small)

            for _ in range(500):
                for each, run in enumerate((run_session, run_model, run_by_path)):
                    times[each].append(timed(run))
        without, *hits = map(statistics.median, times)
        models.close()
        return {
            "sum MiB": sum(sizes) / _MIB,
            "budget MiB": budget / _MIB,
            "highest MiB": highest / _MIB,
            "above MiB": (highest - budget) / _MIB,
            **counts,
            "opened": opened,
            "hit costs us, and by its path": [1e3 * (hit - without) for hit in hits],
            "errors": sorted(set(errors))[:5],
            "left MiB": device.taken() / _MIB,
        }


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    **{f"budget-{kind}": lambda options, kind=kind: measure_budgets(kind, options) for kind in _KINDS},
    **{f"fit-{kind}": lambda options, kind=kind: measure_fit(kind) for kind in FIT_KINDS},
    "cost": lambda options: measure_cost(),
    "trim": lambda options: measure_trim(),
    "models": lambda options: measure_models(options.seconds),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Measure GPU memory.")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--runs", type=int, default=300, help="runs of random shapes for each budget")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the runs of each budget")
    parser.add_argument("--seconds", type=float, default=300.0, help="of many models in threads")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        Path(options.child).write_text(json.dumps(PARTS[options.parts[0]](options)))
        return 0
    more = ["--runs", str(options.runs), "--limit", str(options.limit), "--seconds", str(options.seconds)]
    return measure_parts("benchmarks.memory", "--parts", options.parts, more, options.out)


if __name__ == "__main__":
    sys.exit(main())
