"""Measure what inputs of several shapes cost: GPUSession beside plain ONNX Runtime, with default arguments.

    python -m benchmarks.shapes [--out FILE] [--only KIND ...] [--cpu] [--quick]

Each kind of network runs in a process of its own, plain ONNX Runtime first, with the search for convolutions that a
GPUSession chooses, since other searches may choose other algorithms. ``--cpu`` is to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from benchmarks.zoo_models import Net

COUNT = 8  # shapes
KEPT_AT_MOST = 8
ROUNDS = 12
RANDOM = 40  # shapes, of which a session keeps some
_MIB = 1 << 20


class Mixed(Net):
    """A network with convolutions of one dimension, and with outputs of any shape."""

    def conv1d(self, x: str, inside: int, outside: int, kernel: int) -> str:
        weights = self.weight(outside, inside, kernel, scale=math.sqrt(2 / (inside * kernel)))
        result: str = self.op("Conv", x, weights, self.weight(outside, scale=0.01), pads=[kernel // 2] * 2)
        return result

    def normed(self, x: str, channels: int) -> str:
        spread = self.constant(np.linspace(0.5, 1.5, channels, dtype=np.float32))
        center = self.weight(channels, scale=0.1)
        result: str = self.op("BatchNormalization", x, spread, self.weight(channels, scale=0.1), center, spread)
        return result

    def content(self, source: Sequence[int | str], *results: tuple[str, int]) -> bytes:
        """Return the model. ``results``: names of values, and their types."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(source))
        outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in results]
        graph = helper.make_graph(self._nodes, "shapes", [x], outputs, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        data: bytes = model.SerializeToString()
        return data

    def residual(self, depths: Sequence[int], *, wide: bool) -> tuple[str, int]:
        """Return the last value of a residual network and its channels."""
        x, channels = self.relu(self.normed(self.conv("x", 3, 64, 7, 2), 64)), 64
        x = self.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        for stage, depth in enumerate(depths):
            width = 64 << stage
            outside = 4 * width if wide else width
            for block in range(depth):
                stride = 2 if stage and not block else 1
                shortcut = x
                if stride > 1 or channels != outside:
                    shortcut = self.normed(self.conv(x, channels, outside, 1, stride), outside)
                if wide:
                    inner = self.relu(self.normed(self.conv(x, channels, width, 1), width))
                    inner = self.relu(self.normed(self.conv(inner, width, width, 3, stride), width))
                    inner = self.normed(self.conv(inner, width, outside, 1), outside)
                else:
                    inner = self.relu(self.normed(self.conv(x, channels, width, 3, stride), width))
                    inner = self.normed(self.conv(inner, width, width, 3), width)
                x, channels = self.relu(self.op("Add", inner, shortcut)), outside
        return x, channels


Kind = tuple[bytes, Callable[[int], tuple[int, ...]]]


def _speech() -> Kind:
    """38 convolutions of one dimension, over 200 to 480 steps."""
    net = Mixed()
    x = net.conv1d("x", 80, 256, 3)
    for _ in range(18):
        inner = net.relu(net.normed(net.conv1d(x, 256, 256, 5), 256))
        x = net.relu(net.op("Add", x, net.normed(net.conv1d(inner, 256, 256, 1), 256)))
    last = net.conv1d(x, 256, 40, 1)
    return net.content(["batch", 80, "steps"], (last, TensorProto.FLOAT)), lambda number: (1, 80, 200 + 40 * number)


def _pyramid() -> Kind:
    """The features of ResNet-18, for images of 192 to 640 pixels."""
    net = Mixed()
    x, _ = net.residual((2, 2, 2, 2), wide=False)
    size = ["batch", 3, "height", "width"]
    return net.content(size, (x, TensorProto.FLOAT)), lambda number: (1, 3, 192 + 64 * number, 192 + 64 * number)


def _resnet50() -> Kind:
    """ResNet-50, for batches of 1 to 8."""
    net = Mixed()
    x, channels = net.residual((3, 4, 6, 3), wide=True)
    last = net.classes(x, channels)
    return net.content(["batch", 3, 224, 224], (last, TensorProto.FLOAT)), lambda number: (1 + number, 3, 224, 224)


def _detector() -> Kind:
    """A detector whose boxes are chosen by NonMaxSuppression, and sorted by a node on the CPU."""
    net = Mixed()
    x, channels = net.residual((1, 1, 1, 1), wide=False)

    def rows(x: str, size: int) -> str:
        return net.reshape(x, 1, size, -1)

    scores = net.op("Sigmoid", rows(net.conv(x, channels, 8, 1), 8))
    boxes = net.op("Transpose", rows(net.conv(x, channels, 4, 1), 4), perm=[0, 2, 1])
    limits = [net.constant(np.array([each], kind)) for each, kind in ((20, np.int64), (0.5, "f"), (0.3, "f"))]
    kept = net.op("NonMaxSuppression", boxes, scores, *limits)
    unique = net.op("Unique", net.reshape(kept, -1))
    outputs = ((boxes, TensorProto.FLOAT), (kept, TensorProto.INT64), (unique, TensorProto.INT64))
    return net.content([1, 3, "height", "width"], *outputs), lambda number: (1, 3, 256 + 64 * number, 320)


def _unet() -> Kind:
    """Convolutions and transposed convolutions, for images of 128 to 352 lines."""
    net, widths, skipped = Mixed(), (32, 64, 128), list[tuple[str, int]]()
    x, channels = "x", 3

    def double(x: str, inside: int, outside: int) -> str:
        return net.relu(net.conv(net.relu(net.conv(x, inside, outside, 3)), outside, outside, 3))

    for width in widths:
        x = double(x, channels, width)
        skipped.append((x, width))
        x, channels = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), width
    x, channels = double(x, channels, 256), 256
    for other, width in reversed(skipped):
        weights = net.weight(channels, width, 2, 2, scale=math.sqrt(1 / channels))
        x = net.op("Concat", net.op("ConvTranspose", x, weights, strides=[2, 2]), other, axis=1)
        x, channels = double(x, 2 * width, width), width
    size = ["batch", 3, "height", "width"]
    last = net.conv(x, channels, 2, 1)
    return net.content(size, (last, TensorProto.FLOAT)), lambda number: (1, 3, 128 + 32 * number, 256)


KINDS: dict[str, Callable[[], Kind]] = {
    "speech": _speech,
    "pyramid": _pyramid,
    "resnet50": _resnet50,
    "detector": _detector,
    "unet": _unet,
}


# One kind, in a process of its own


def timed(run: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    run(*arguments)
    return 1e3 * (time.perf_counter() - start)


def medians(run: Callable[..., Any], feeds: Sequence[Any], rounds: int) -> list[float]:
    """Return the median time of each feed, in ms, of runs in turn."""
    return [
        statistics.median(times)
        for times in zip(*[[timed(run, None, each) for each in feeds] for _ in range(rounds)], strict=True)
    ]


def in_threads(run: Callable[..., Any], feeds: Sequence[Any], seconds: float) -> float:
    """Return the runs a second of a thread for each feed."""
    counts, spans = [0] * len(feeds), [0.0] * len(feeds)
    together = threading.Barrier(len(feeds))

    def work(number: int) -> None:
        for _ in range(5):
            run(None, feeds[number])
        together.wait()
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            run(None, feeds[number])
            counts[number] += 1
        spans[number] = time.perf_counter() - start

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(feeds))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(count / span for count, span in zip(counts, spans, strict=True))


def used_memory(device: Any) -> int:
    """Return the bytes of the GPU that are in use, by all processes."""
    from ortgpu.environment.gpu.driver import read_gpu_memory

    memory = read_gpu_memory(device.uuid) if device.uuid is not None else None
    return memory[1] - memory[0] if memory is not None else 0


def measure(kind: str, *, on_cpu: bool, quick: bool) -> dict[str, Any]:
    """Return the figures of one kind."""
    import onnxruntime

    import ortgpu
    from ortgpu import GPUSession

    onnxruntime.set_default_logger_severity(4)
    model, shape_of = KINDS[kind]()
    random = np.random.default_rng(1)
    rounds, seconds = (2, 0.2) if quick else (ROUNDS, 1.5)

    def feed(number: int) -> dict[str, Any]:
        return {"x": random.standard_normal(shape_of(number), np.float32)}

    feeds = [feed(number) for number in range(2 if quick else COUNT)]
    largest = feeds[-1]
    heuristic = {"cudnn_conv_algo_search": "HEURISTIC"}
    plain_providers: list[Any] = ["CPUExecutionProvider"]
    if not on_cpu:
        ortgpu.preload()
        plain_providers.insert(0, ("CUDAExecutionProvider", heuristic))
    # The first session of a process makes the CUDA context.
    device = GPUSession(model, cpu_nodes="allow", allow_cpu=on_cpu).device
    gc.collect()
    before = used_memory(device)
    plain = onnxruntime.InferenceSession(model, providers=plain_providers)
    for _ in range(2):
        plain.run(None, largest)
    plain_memory = used_memory(device) - before
    expected = [plain.run(None, each) for each in feeds]
    repeated = []
    for each in feeds:
        plain.run(None, each)
        repeated.append(statistics.median(timed(plain.run, None, each) for _ in range(rounds)))
    in_turn = medians(plain.run, feeds, 1 if quick else 3)
    middle = feeds[len(feeds) // 2]
    for _ in range(3):
        plain.run(None, middle)
    plain_rate = in_threads(plain.run, [middle] * len(feeds), seconds)
    others = [] if quick else [feed(8 + number % 32) for number in range(RANDOM - COUNT)]
    order = [int(each) for each in random.integers(0, RANDOM, 60)] if others else []
    plain_random = sum(timed(plain.run, None, (feeds + others)[each]) for each in order)
    del plain
    gc.collect()
    left = used_memory(device) - before  # by libraries, which are loaded once

    session = GPUSession(model, cpu_nodes="allow", allow_cpu=on_cpu)
    for _ in range(3):
        for each in feeds:
            session.run(None, each)
    deadline = time.monotonic() + 20
    while not session.shapes.kept and session.shapes.why_none is None and time.monotonic() < deadline and not on_cpu:
        for each in feeds:
            session.run(None, each)
    for each in feeds * 2:
        session.run(None, each)
    ours = medians(session.run, feeds, rounds)
    memory = used_memory(device) - before - left
    equal = all(
        all(
            np.array_equal(one, other, equal_nan=True)
            for one, other in zip(session.run(None, each), wanted, strict=True)
        )
        for each, wanted in zip(feeds, expected, strict=True)
    )
    rate = in_threads(session.run, feeds, seconds)
    list(session.map(feeds * 2))
    map_in_turn = timed(lambda: list(session.map(feeds * 6)))
    list(session.map([middle] * 8))
    map_of_one = timed(lambda: list(session.map([middle] * 6 * len(feeds))))
    result = {
        "shapes": str(session.shapes),
        "repeated, plain": repeated,
        "in turn, plain": in_turn,
        "in turn": ours,
        "in turn over repeated, worst": max(one / other for one, other in zip(ours, repeated, strict=True)),
        "equal": equal,
        "memory over plain's": memory / max(1, plain_memory),
        "MiB": [memory / _MIB, plain_memory / _MIB, (session.memory.plans or 0) / _MIB],
        "threads over plain's": rate / plain_rate,
        "map in turn over map of one": map_of_one / map_in_turn,
    }
    session.close()
    if order:
        session = GPUSession(model, cpu_nodes="allow", allow_cpu=on_cpu)
        session.warm(feeds)
        result["random over plain's"] = (
            sum(timed(session.run, None, (feeds + others)[each]) for each in order) / plain_random
        )
        session.close()
    session = GPUSession(model, cpu_nodes="allow", allow_cpu=on_cpu)
    result["warm, ms"] = timed(session.warm, feeds)
    first = [timed(session.run, None, each) for each in feeds]
    result["first after warm over repeated, worst"] = max(
        one / other for one, other in zip(first, repeated, strict=True)
    )
    session.close()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes", description="Measure inputs of several shapes."
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=sorted(KINDS), metavar="KIND")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, to see that it works")
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        figures = measure(options.only[0], on_cpu=options.cpu, quick=options.quick)
        Path(options.child).write_text(json.dumps(figures))
        return 0
    results: dict[str, Any] = {}
    for kind in options.only:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [sys.executable, "-m", "benchmarks.shapes", "--only", kind, "--child", str(report)]
            command += [flag for flag, wanted in (("--cpu", options.cpu), ("--quick", options.quick)) if wanted]
            child = subprocess.run(command, timeout=300, check=False)
            results[kind] = json.loads(report.read_text()) if report.is_file() else {"failed": child.returncode}
        print(kind)
        for name, value in results[kind].items():
            print(f"  {name:40s}", [round(each, 2) for each in value] if isinstance(value, list) else value, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))
    return int(any("failed" in figures for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
