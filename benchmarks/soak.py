"""Run at full load for minutes, compare every result, and watch memory.

    python -m benchmarks.soak [--minutes N] [--cpu] [--json FILE]

One way after the other has its share of the time: ``map``, a pool over all GPUs, a CUDA graph. Exit status 1: a result
was wrong, or memory grew. ``--cpu`` runs the first two on the CPU with a tiny model: to see that it works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.figures import made_model
from benchmarks.throughput import ON_THE_CPU
from benchmarks.throughput_workers import ours, relative_error
from benchmarks.workers import feed_of
from ortgpu.testing import LEAK_MARGIN
from tests.support.plain_session import plain_session
from tests.support.this_machine import VisibleGPU, environment_record, find_gpus

BATCHES = (64, 8, 1, 17)
FEEDS_OF_EACH = 3
TOLERANCE = 1e-2  # of the largest value: concurrent runs may be given other convolution algorithms, and TF32
SAMPLES = 40  # of memory, for each way
WARMING = 64  # of the largest batches at the beginning: ONNX Runtime keeps what most runs at a time ever took

Way = Callable[[Iterable[Any]], Iterator[Any]]


def open_map(model: str, device: str, stack: ExitStack) -> tuple[str, Way]:
    return "map", stack.enter_context(ours(model, device)).map


def open_pool(model: str, device: str, stack: ExitStack) -> tuple[str, Way]:
    from ortgpu import GPUSessionPool

    pool = stack.enter_context(GPUSessionPool(model, allow_cpu=device == "cpu"))
    return f"pool of {len(pool)}", pool.map


def open_graph(model: str, device: str, stack: ExitStack) -> tuple[str, Way]:
    session = stack.enter_context(ours(model, device, cuda_graph=True))
    return "graph", lambda feeds: (session.run(None, feed) for feed in feeds)


def soak(
    way: Way, feeds: Sequence[Any], expected: Sequence[Any], seconds: float, gpus: Sequence[VisibleGPU]
) -> dict[str, Any]:
    """Run a way for some seconds. Return the number of results, the largest error, and the bytes in use meanwhile."""
    deque(way([feeds[0]] * WARMING), 0)  # the first is one of the largest
    started = time.monotonic()
    count, wrong, largest = 0, 0, 0.0
    memory: dict[str, list[int]] = {}
    samples = 0
    with closing(way(itertools.cycle(feeds))) as results:  # type: ignore[type-var]  # each is a generator
        for outputs, right in zip(results, itertools.cycle(expected), strict=False):
            error = relative_error(outputs, right)
            count, wrong, largest = (
                count + 1,
                wrong + (not error <= TOLERANCE),
                max(largest, error),
            )  # also NaN is wrong
            passed = time.monotonic() - started
            if passed > seconds:
                break
            if passed >= samples * seconds / SAMPLES:
                samples += 1
                for place, size in bytes_in_use(gpus).items():
                    memory.setdefault(place, []).append(size)
    return {
        "results": count,
        "largest error": largest,
        "wrong": wrong,
        "growth": {place: growth(sizes) for place, sizes in memory.items()},
        "bytes": memory,
    }


def bytes_in_use(gpus: Sequence[VisibleGPU]) -> dict[str, int]:
    """Return the bytes of this process on the host, and of all processes on each GPU: NVML may not tell them apart."""
    from ortgpu.environment.gpu.driver import read_gpu_memory

    used = {"host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    for gpu in gpus:
        memory = read_gpu_memory(gpu.uuid)
        if memory is not None:
            free, total = memory
            used[f"cuda:{gpu.ordinal}"] = total - free
    return used


def growth(sizes: Sequence[int]) -> int:
    """Return the growth from the second quarter, in which all is warm, to the last one."""
    quarter = max(len(sizes) // 4, 1)
    return int(statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter] or sizes))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Full load, every result compared.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all ways together (10)")
    parser.add_argument("--cpu", action="store_true", help="on the CPU with a tiny model: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Otherwise the sessions are on the GPUs of the machine.
    gpus = find_gpus()
    if not options.cpu and not gpus.visible:
        print(f"needs an NVIDIA GPU, or --cpu: {gpus.reason}", file=sys.stderr)
        return 1
    device = "cpu" if options.cpu else "cuda"
    model = made_model(ON_THE_CPU["resnet50"] if options.cpu else "resnet50")
    record = {"benchmark": "soak", **environment_record(gpus), "model": Path(model).name, "minutes": options.minutes}
    plain = plain_session(model, device)
    feeds = [feed_of(plain, batch, seed) for batch in BATCHES for seed in range(FEEDS_OF_EACH)]
    expected = [plain.run(None, feed) for feed in feeds]
    del plain
    failed = False
    record["ways"] = found = {}
    openers = (open_map, open_pool) if options.cpu else (open_map, open_pool, open_graph)
    for opener in openers:
        name = opener.__name__.removeprefix("open_")
        try:
            with ExitStack() as stack:
                name, way = opener(model, device, stack)
                seconds = options.minutes * 60 / len(openers)
                outcome = soak(way, feeds, expected, seconds, () if options.cpu else gpus.visible)
        except Exception as error:  # the others have their turn all the same
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            failed = True
            print(f"{name}: {found[name]['error']}", flush=True)
        else:
            found[name] = outcome
            grown = {kind: size for kind, size in outcome["growth"].items() if size > LEAK_MARGIN}
            failed = failed or bool(outcome["wrong"] or grown)
            told = ", ".join(f"{kind} {size / 2**20:+.1f} MiB" for kind, size in outcome["growth"].items())
            print(
                f"{name}: {outcome['results']} results, {outcome['wrong']} wrong, largest relative error "
                f"{outcome['largest error']:.1e}; memory {told or 'not sampled'}",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    print("FAILED" if failed else "OK")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
