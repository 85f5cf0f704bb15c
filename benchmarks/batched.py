"""Measure ``batched()`` with requests of one image, beside plain ONNX Runtime with its best number of threads.

    python -m benchmarks.batched [--out FILE] [--seconds SECONDS] [--tune SECONDS] [--pool] [--cpu]

Prints JSON, the figure that is worst by its bar first. ``images a second`` has 256 requests outstanding, by tasks of an
event loop, by threads and by futures; plain is one session, with a loop over ``run`` in each of some threads. ``p99``
is that of requests that arrive at random, at 70 % of the rate by futures, in times of one full batch. ``--tune`` tunes
the model first, for as long, and has a bar of its own. ``--pool`` serves by a pool over all GPUs. ``--cpu`` takes a
tiny model, to see that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.figures import made_model
from benchmarks.throughput import ON_THE_CPU
from tests.support.plain_session import plain_session
from tests.support.this_machine import environment_record, find_gpus

OUTSTANDING = 256
THREADS = (1, 2, 3, 4, 6, 8, 16)
SHARE = 0.7  # of the best rate
BARS = {"untuned": 3.0, "tuned": 4.0}  # speed-ups
P99 = 2.3  # times one full batch
ALONE = 1.3  # times plain
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Requests of one image, joined by batched().")
    parser.add_argument("--out", type=Path, help="a file for the JSON too")
    parser.add_argument("--seconds", type=float, default=60, help="for all measurements together")
    parser.add_argument("--tune", type=float, default=0, help="seconds to tune the model for, first")
    parser.add_argument("--pool", action="store_true", help="serve by a GPUSessionPool over all GPUs")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="on the CPU with a tiny model: to see that it works")
    options = parser.parse_args(arguments)
    name = ON_THE_CPU["resnet50"] if options.cpu else "resnet50"
    found = measured(made_model(name), options)
    of_machine = environment_record(find_gpus())
    record = {"benchmark": "batched", **of_machine, "model": f"{name}: {models.recipe_of(name)}", **found}
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps({key: value for key, value in record.items() if key not in of_machine}, indent=1))
    return 0


def measured(model: str, options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    import ortgpu

    if not options.cpu:
        ortgpu.preload()  # else a plain session that comes first takes other libraries than a record was made with
    record = tuned_record(model, options) if options.tune else None
    plain = plain_session(model, "cpu" if options.cpu else "cuda")
    kind_of_target: Any = ortgpu.GPUSessionPool if options.pool else ortgpu.GPUSession
    opened = kind_of_target(model, allow_cpu=options.cpu, tuned=record or False)
    session = opened.sessions[0] if options.pool else opened
    if record is not None and record not in str(session.options_chosen):
        raise RuntimeError(f"the session does not use the record {record}")
    (taken,) = plain.get_inputs()
    shape = [each if isinstance(each, int) else 1 for each in taken.shape]
    images = [np.random.default_rng(seed).random(shape, np.float32) for seed in range(64)]
    feeds = [{taken.name: image} for image in images]
    full = {taken.name: np.concatenate([images[number % 64] for number in range(options.max_batch)])}
    expected = [plain.run(None, feed)[0] for feed in feeds]
    began = time.perf_counter()
    service = opened.batched(max_batch=options.max_batch)
    took = time.perf_counter() - began
    one = options.seconds / (len(THREADS) * 0.5 + ROUNDS * 4 + 6)  # seconds of a measurement

    found = [future.result()[0] for future in [service.submit(None, feed) for feed in feeds * 4]]
    error = max(
        float(abs(each - right).max() / abs(right).max()) for each, right in zip(found, expected * 4, strict=True)
    )
    sweep = {count: by_threads(plain.run, feeds, count, one / 2) for count in THREADS}
    best = max(sweep, key=lambda count: sweep[count])
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: by_threads(plain.run, feeds, best, one),
        "tasks": lambda: asyncio.run(by_tasks(service, feeds, one)),
        "threads": lambda: by_threads(service.run, feeds, OUTSTANDING, one),
        "futures": lambda: by_futures(service, feeds, one),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, way) in itertools.product(range(ROUNDS), ways.items()):
        rates[name].append(way())
    medians = {name: statistics.median(taken) for name, taken in rates.items()}
    batch = statistics.median(timed(lambda: session.run(None, full)) for _ in range(15))
    gc.collect()
    gc.freeze()  # as services do: else garbage is looked for in all that the program imported, while all threads stop
    latencies = [at_random(service, feeds, SHARE * medians["futures"], 2 * one) for _ in range(2)]
    worst = max(latencies, key=lambda each: each[-1])
    alone = {
        "plain": statistics.median(timed(lambda: plain.run(None, feeds[0])) for _ in range(50)),
        "ours": statistics.median(timed(lambda: service.run(None, feeds[0])) for _ in range(50)),
    }
    service.close()
    kind = "tuned" if options.tune else "untuned"
    figures = [
        *(
            {
                "figure": f"images a second, {OUTSTANDING} outstanding by {name}, {kind}, speed-up",
                "value": round(medians[name] / medians["plain"], 2),
                "bar": BARS[kind],
                "by bar": medians[name] / medians["plain"] / BARS[kind],
            }
            for name in ("tasks", "threads", "futures")
        ),
        {
            "figure": f"p99 at {SHARE:.0%} of {medians['futures']:.0f} images a second, times one full batch",
            "value": round(worst[1] / batch, 2),
            "bar": P99,
            "by bar": P99 * batch / worst[1],
        },
        {
            "figure": f"seconds of a request alone, {kind}, over plain's",
            "value": round(alone["ours"] / alone["plain"], 2),
            "bar": ALONE,
            "by bar": ALONE * alone["plain"] / alone["ours"],
        },
    ]
    return {
        "figures": sorted(figures, key=lambda each: float(str(each["by bar"]))),
        "images a second": {name: [round(each) for each in taken] for name, taken in rates.items()},
        "plain by threads": {count: round(rate) for count, rate in sweep.items()},
        "ms at random: median, p99, most": [[round(1e3 * each, 2) for each in taken] for taken in latencies],
        "ms of a full batch": round(1e3 * batch, 2),
        "ms alone": {name: round(1e3 * each, 2) for name, each in alone.items()},
        "sizes": service._joining.sizes,
        "seconds to create the service": round(took, 2),
        "largest error": error,
        "ms by size: as the run before, and after another size": shapes(session, full),
    }


def tuned_record(model: str, options: argparse.Namespace) -> str:
    """Tune the model, and return the path of the record."""
    import ortgpu

    record = f"{model}-batched.json"
    tuning = ortgpu.tune(model, objective="throughput", batches=[options.max_batch], budget=options.tune, record=record)
    if tuning.record is None:
        raise RuntimeError(tuning.no_record)
    print(tuning.automatic, file=sys.stderr)
    return record


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def by_threads(run: Callable[..., object], feeds: Sequence[Any], count: int, seconds: float) -> float:
    """Return the requests a second of so many threads, which each wait for their result."""
    ends, answered = time.perf_counter() + seconds, [0] * count

    def ask(number: int) -> None:
        while time.perf_counter() < ends:
            run(None, feeds[number % len(feeds)])
            answered[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]

    def all_of_them() -> None:
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    took = timed(all_of_them)
    return sum(answered) / took


async def by_tasks(service: Any, feeds: Sequence[Any], seconds: float) -> float:
    start, answered = time.perf_counter(), 0

    async def ask(number: int) -> None:
        nonlocal answered
        while time.perf_counter() < start + seconds:
            await service.arun(None, feeds[number % len(feeds)])
            answered += 1

    await asyncio.gather(*[ask(number) for number in range(OUTSTANDING)])
    return answered / (time.perf_counter() - start)


def by_futures(service: Any, feeds: Sequence[Any], seconds: float) -> float:
    room, start, answered = threading.Semaphore(OUTSTANDING), time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        room.acquire()
        service.submit(None, feeds[answered % len(feeds)]).add_done_callback(lambda _: room.release())
        answered += 1
    for _ in range(OUTSTANDING):
        room.acquire()
    return answered / (time.perf_counter() - start)


def at_random(service: Any, feeds: Sequence[Any], rate: float, seconds: float) -> tuple[float, float, float]:
    """Return median, 99th percentile and the most of the seconds from when a request was due to its result."""
    chance, taken, asked = random.Random(1), list[float](), 0
    due = start = time.perf_counter()

    def answered(when: float) -> Callable[[object], None]:
        return lambda _: taken.append(time.perf_counter() - when)

    while due < start + seconds:
        due += chance.expovariate(rate)
        wait = due - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        # The future is not kept: with each 20,000 of them the garbage collector stops all threads for 50 ms.
        service.submit(None, feeds[asked % len(feeds)]).add_done_callback(answered(due))
        asked += 1
    while len(taken) < asked:
        time.sleep(0.01)
    cuts = statistics.quantiles(taken, n=100)
    return cuts[49], cuts[98], max(taken)


def shapes(session: Any, full: Any) -> dict[int, list[float]]:
    """Return the milliseconds of runs of some sizes, in a row and each after a run of another size."""
    count = len(next(iter(full.values())))
    found = {}
    for size in (1, count // 8 or 1, count // 2 or 1):
        part = {name: array[:size] for name, array in full.items()}
        in_a_row = [timed(lambda part=part: session.run(None, part)) for _ in range(8)][3:]  # type: ignore[misc]
        after = []
        for _ in range(4):
            session.run(None, full)
            after.append(timed(lambda part=part: session.run(None, part)))  # type: ignore[misc]
        found[size] = [round(1e3 * statistics.median(each), 2) for each in (in_a_row, after)]
    return found


if __name__ == "__main__":
    sys.exit(main())
