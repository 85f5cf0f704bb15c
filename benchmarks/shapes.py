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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import zoo_models
from benchmarks.parts import measure_parts

COUNT = 8  # shapes
KEPT_AT_MOST = 8
ROUNDS = 8
RANDOM = 40  # shapes, of which a session keeps some
_SIDE = 24_000  # of a square matrix of more than 2 GB
_PARTS = 8  # of the time of threads, in whose last half a session has the lanes that it needs
_MIB = 1 << 20


class Mixed(zoo_models.Net):
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

    def features(self, depths: Sequence[int]) -> tuple[str, int]:
        """Return the last value of a residual network of two convolutions a block, and its channels."""
        x, channels = self.relu(self.normed(self.conv("x", 3, 64, 7, 2), 64)), 64
        x = self.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for block in range(depth):
                stride = 2 if stage and not block else 1
                shortcut = x if channels == width else self.normed(self.conv(x, channels, width, 1, stride), width)
                inner = self.relu(self.normed(self.conv(x, channels, width, 3, stride), width))
                x = self.relu(self.op("Add", self.normed(self.conv(inner, width, width, 3), width), shortcut))
                channels = width
        return x, channels


Kind = tuple[bytes | str, Callable[[int], tuple[int, ...]]]


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
    x, _ = net.features((2, 2, 2, 2))
    size = ["batch", 3, "height", "width"]
    return net.content(size, (x, TensorProto.FLOAT)), lambda number: (1, 3, 192 + 64 * number, 192 + 64 * number)


def _resnet50() -> Kind:
    """ResNet-50, for batches of 1 to 8."""
    return str(zoo_models.made("resnet")), lambda number: (1 + number, 3, 224, 224)


def _large() -> Kind:
    """Convolutions before 2.3 GB of weights in another file, for images of 64 to 120 lines."""
    net, side = Mixed(), _SIDE
    x = "x"
    for channels in (3, *[64] * 9):
        x = net.relu(net.conv(x, channels, 64, 3))
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    wide = net.op("MatMul", pooled, net.weight(64, side, scale=0.1))
    last = net.op("MatMul", wide, "large")
    model = onnx.load_from_string(net.content(["batch", 3, "height", 96], (last, TensorProto.FLOAT)))
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    with open(Path(folder.name, "weights"), "wb") as file:
        row = np.random.default_rng(1).standard_normal(side, np.float32) / side
        for number in range(side):
            file.write(np.roll(row, number).tobytes())
    large = model.graph.initializer.add(name="large", data_type=TensorProto.FLOAT, dims=[side, side])
    large.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", "0"), ("length", str(4 * side * side))):
        large.external_data.add(key=key, value=value)
    path = Path(folder.name, "model.onnx")
    path.write_bytes(model.SerializeToString())
    return str(path), lambda number: (1, 3, 64 + 8 * number, 96)


def _detector() -> Kind:
    """A detector whose boxes are chosen by NonMaxSuppression, and sorted by a node on the CPU."""
    net = Mixed()
    x, channels = net.features((1, 1, 1, 1))

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
    net = Mixed()
    last = zoo_models.add_unet(net, (32, 64, 128))
    size = ["batch", 3, "height", "width"]
    return net.content(size, (last, TensorProto.FLOAT)), lambda number: (1, 3, 128 + 32 * number, 256)


KINDS: dict[str, Callable[[], Kind]] = {
    "speech": _speech,
    "pyramid": _pyramid,
    "resnet50": _resnet50,
    "detector": _detector,
    "unet": _unet,
    "large": _large,
}
_folders: list[tempfile.TemporaryDirectory[str]] = []  # of models in files, until the process ends


# One kind, in a process of its own


def timed(run: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    run(*arguments)
    return 1e3 * (time.perf_counter() - start)


def in_threads(run: Callable[..., Any], feeds: Sequence[Any], seconds: float) -> list[float]:
    """Return the runs a second of a thread for each feed, for each of eight parts of the time."""
    counts = [[0] * (_PARTS + 1) for _ in feeds]
    together = threading.Barrier(len(feeds))

    def work(number: int) -> None:
        together.wait()
        start = time.perf_counter()
        part = 0
        while part < _PARTS:
            run(None, feeds[number])
            part = int((time.perf_counter() - start) / seconds * _PARTS)
            counts[number][min(part, _PARTS)] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(feeds))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [sum(count) * _PARTS / seconds for count in list(zip(*counts, strict=True))[:_PARTS]]


def used_memory(device: Any) -> int:
    """Return the bytes of the GPU that are in use, by all processes."""
    from ortgpu.environment.gpu.driver import read_gpu_memory

    memory = read_gpu_memory(device.uuid) if device.uuid is not None else None
    return memory[1] - memory[0] if memory is not None else 0


class Sessions:
    """Opens sessions of one model, plain ones and ours, and reads the memory that they take."""

    def __init__(self, model: bytes | str, *, on_cpu: bool) -> None:
        import ortgpu

        self._model, self._on_cpu = model, on_cpu
        self._providers: list[Any] = ["CPUExecutionProvider"]
        if not on_cpu:
            ortgpu.preload()
            self._providers.insert(0, ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}))
        # The first session of a process makes the CUDA context.
        self._device = self.ours().device
        gc.collect()

    def plain(self) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(self._model, providers=self._providers)

    def ours(self) -> Any:
        from ortgpu import GPUSession

        return GPUSession(self._model, cpu_nodes="allow", allow_cpu=self._on_cpu)

    def used(self) -> int:
        """Return the bytes of the GPU that are in use, by all processes."""
        return used_memory(self._device)


def measure_one_shape(sessions: Sessions, feed: Any, rounds: int) -> dict[str, Any]:
    """Return what ours costs over a plain session with one shape: constructor, run and memory."""
    opened: dict[str, list[float]] = {"plain": [], "ours": []}
    ran: dict[str, list[float]] = {"plain": [], "ours": []}
    taken = {}
    ways = {"plain": sessions.plain, "ours": sessions.ours}
    for _ in range(rounds):
        for name, way in ways.items():
            opened[name].append(timed(way))
            gc.collect()
    for name, way in ways.items():
        before = sessions.used()
        session = way()
        for _ in range(5):
            session.run(None, feed)
        taken[name] = sessions.used() - before
        del session
        gc.collect()
    both = {name: way() for name, way in ways.items()}
    for number in range(10 * rounds):
        for name, session in both.items():
            took = timed(session.run, None, feed)
            if number > rounds:
                ran[name].append(took)
    return {
        "constructor": statistics.median(opened["ours"]) / statistics.median(opened["plain"]),
        "run": statistics.median(ran["ours"]) / statistics.median(ran["plain"]),
        "memory": taken["ours"] / max(1, taken["plain"]),
        "shapes": str(both["ours"].shapes),
    }


def measure(kind: str, *, on_cpu: bool, quick: bool) -> dict[str, Any]:
    """Return the figures of one kind."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    model, shape_of = KINDS[kind]()
    random = np.random.default_rng(1)
    rounds, seconds = (2, 0.4) if quick else (ROUNDS, 4)

    def feed(number: int) -> dict[str, Any]:
        return {"x": random.standard_normal(shape_of(number), np.float32)}

    feeds = [feed(number) for number in range(2 if quick else COUNT)]
    others = [] if quick else [feed(8 + number % 32) for number in range(RANDOM - COUNT)]
    order = [int(each) for each in random.integers(0, RANDOM, 40)] if others else []
    sessions = Sessions(model, on_cpu=on_cpu)
    result: dict[str, Any] = {"one shape, over plain": measure_one_shape(sessions, feeds[-1], rounds)}

    before = sessions.used()
    plain = sessions.plain()
    for _ in range(2):
        plain.run(None, feeds[-1])
    plain_memory = sessions.used() - before
    expected = [plain.run(None, each) for each in feeds]
    in_turn = [timed(plain.run, None, each) for each in feeds]

    before = sessions.used()
    session = sessions.ours()
    for _ in range(3):
        for each in feeds:
            session.run(None, each)
    deadline = time.monotonic() + 20
    while not session.shapes.kept and session.shapes.why_none is None and time.monotonic() < deadline and not on_cpu:
        for each in feeds:
            session.run(None, each)
    for _ in range(3):
        for each in feeds:
            session.run(None, each)
    memory = sessions.used() - before
    several = [sessions.plain() for _ in feeds]  # a session for each shape: what runs in turn cost without any planning
    for _ in range(3):
        for one, each in zip(several, feeds, strict=True):
            one.run(None, each)
    ways = {
        "repeated, plain": [plain.run] * len(feeds),
        "repeated": [session.run] * len(feeds),
        "in turn, a plain session for each": [one.run for one in several],
        "in turn": [session.run] * len(feeds),
    }
    times: dict[str, list[list[float]]] = {name: [[] for _ in feeds] for name in ways}
    for _ in range(rounds // 2):  # one after the other, since the clock of a GPU changes
        for name, runs in ways.items():
            numbers = list(range(len(feeds)))
            in_order = [[number] * 6 for number in numbers] if "repeated" in name else [numbers] * 5
            for order_of_runs in in_order:
                for turn, number in enumerate(order_of_runs):
                    took = timed(runs[number], None, feeds[number])
                    if turn > 1 or "repeated" not in name:
                        times[name][number].append(took)
    medians = {name: [statistics.median(each) for each in lists] for name, lists in times.items()}
    del several, ways
    gc.collect()
    usual, several_in_turn = medians["repeated, plain"], medians["in turn, a plain session for each"]
    result |= {
        "shapes": str(session.shapes),
        "in turn, plain": in_turn,
        **medians,
        "in turn over repeated, worst": worst(medians["in turn"], usual),
        "a plain session for each, in turn over repeated, worst": worst(several_in_turn, usual),
        "in turn over a plain session for each, worst": worst(medians["in turn"], several_in_turn),
        "equal": all(
            np.array_equal(one, other, equal_nan=True)
            for each, wanted in zip(feeds, expected, strict=True)
            for one, other in zip(session.run(None, each), wanted, strict=True)
        ),
        "memory over plain's": memory / max(1, plain_memory),
        "MiB": [memory / _MIB, plain_memory / _MIB, (session.memory.plans or 0) / _MIB],
    }
    middle = feeds[len(feeds) // 2]
    for _ in range(3):
        plain.run(None, middle)
    plain_rate = statistics.mean(in_threads(plain.run, [middle] * len(feeds), seconds / 2)) or math.inf
    rates = in_threads(session.run, feeds, seconds)
    maps: dict[str, list[float]] = {"in turn": [], "of each": []}
    for _ in range(5):
        maps["in turn"].append(timed(lambda: list(session.map(feeds * 24))))
        maps["of each"].append(sum(timed(lambda one=each: list(session.map([one] * 24))) for each in feeds))
    result |= {
        "threads over plain's": statistics.mean(rates[_PARTS // 2 :]) / plain_rate,
        "threads over plain's from the start": [rate / plain_rate for rate in rates],
        "map in turn over map of one": statistics.median(maps["of each"]) / statistics.median(maps["in turn"]),
        "MiB after threads": (sessions.used() - before) / _MIB,
    }
    session.close()
    if order:
        del plain  # Its arena has the memory of eight threads: a new session takes memory as ours does.
        gc.collect()
        plain = sessions.plain()
        for each in feeds * 2:
            plain.run(None, each)
        plain_random = sum(timed(plain.run, None, (feeds + others)[each]) for each in order)
        session = sessions.ours()
        session.warm(feeds)
        ours_random = sum(timed(session.run, None, (feeds + others)[each]) for each in order)
        result["random over plain's"] = ours_random / plain_random
        session.close()
    firsts: list[list[float]] = []
    for _ in range(3):
        session = sessions.ours()
        result["warm, ms"] = timed(session.warm, feeds)
        firsts.append([timed(session.run, None, each) for each in feeds])
        session.close()
    first = [statistics.median(each) for each in zip(*firsts, strict=True)]
    session = sessions.ours()
    result["warm for eight runs at a time, ms"] = timed(lambda: session.warm(feeds, runs=8))
    rates = in_threads(session.run, feeds, seconds / 2)
    result["threads over plain's from the start, warmed for eight"] = [rate / plain_rate for rate in rates]
    result["threads over plain's, warmed for eight"] = statistics.mean(rates) / plain_rate
    session.close()
    session = sessions.ours()
    session.warm(feeds, runs=4)
    map_in_turn = timed(lambda: list(session.map(feeds * 24)))
    map_of_each = sum(timed(lambda one=each: list(session.map([one] * 24))) for each in feeds)
    result["map in turn over map of one, from the start, warmed for four"] = map_of_each / map_in_turn
    session.close()
    result["first after warm over repeated, worst"] = worst(first, usual)
    result["first after warm over a plain session for each, in turn, worst"] = worst(first, several_in_turn)
    return result


def worst(times: Sequence[float], others: Sequence[float]) -> float:
    return max(one / other for one, other in zip(times, others, strict=True))


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
    more = [flag for flag, wanted in (("--cpu", options.cpu), ("--quick", options.quick)) if wanted]
    return measure_parts("benchmarks.shapes", "--only", options.only, more, options.out)


if __name__ == "__main__":
    sys.exit(main())
