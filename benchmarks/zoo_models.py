"""Networks of many kinds with random weights, made on the spot by onnx.helper: images in, but for the last ones.

The batch is a free dimension. Sizes are those of the small published networks of each kind.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks import models

VERSION = 1  # raise it when a kind changes, so that kept models are made again


class Net:
    """A graph under construction. Each method adds nodes and returns the name of their output."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(models.SEED)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def op(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        """Add a node; with ``count`` return the names of as many outputs."""
        name = f"{kind}{len(self._nodes)}"
        outputs = [name] if count == 1 else [f"{name}_{number}" for number in range(count)]
        self._nodes.append(helper.make_node(kind, list(inputs), outputs, name, **attributes))
        return outputs[0] if count == 1 else outputs

    def constant(self, array: Any) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int, scale: float) -> str:
        return self.constant(self._random.standard_normal(shape, np.float32) * np.float32(scale))

    def conv(
        self, x: str, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1, gain: float = 1.0
    ) -> str:
        scale = gain * math.sqrt(2 * groups / (inside * kernel * kernel))
        weights = self.weight(outside, inside // groups, kernel, kernel, scale=scale)
        bias = self.weight(outside, scale=0.01)
        pads = [kernel // 2] * 4 if kernel != stride else [0] * 4
        result: str = self.op("Conv", x, weights, bias, group=groups, strides=[stride] * 2, pads=pads)
        return result

    def relu(self, x: str) -> str:
        result: str = self.op("Relu", x)
        return result

    def swish(self, x: str) -> str:
        result: str = self.op("Mul", x, self.op("Sigmoid", x))
        return result

    def gelu(self, x: str) -> str:
        half, one = self.constant(np.float32(0.5)), self.constant(np.float32(1))
        inner = self.op("Add", self.op("Erf", self.op("Mul", x, self.constant(np.float32(math.sqrt(0.5))))), one)
        result: str = self.op("Mul", self.op("Mul", x, inner), half)
        return result

    def linear(self, x: str, inside: int, outside: int, gain: float = 1.0) -> str:
        product = self.op("MatMul", x, self.weight(inside, outside, scale=gain / math.sqrt(inside)))
        result: str = self.op("Add", product, self.weight(outside, scale=0.01))
        return result

    def norm(self, x: str, size: int) -> str:
        scale = self.constant(np.ones(size, np.float32))
        result: str = self.op("LayerNormalization", x, scale, self.weight(size, scale=0.01), axis=-1)
        return result

    def reshape(self, x: str, *shape: int) -> str:
        result: str = self.op("Reshape", x, self.constant(np.array(shape, np.int64)))
        return result

    def attention(self, x: str, length: int, size: int, heads: int) -> str:
        """Return self-attention over sequences of ``length``, in (batch, length, size)."""
        parts = self.reshape(self.linear(x, size, 3 * size), -1, length, 3, heads, size // heads)
        split = self.op("Split", self.op("Transpose", parts, perm=[2, 0, 3, 1, 4]), count=3, axis=0)
        axis = self.constant(np.array([0], np.int64))
        query, key, value = (self.op("Squeeze", each, axis) for each in split)
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(np.float32((size / heads) ** -0.5)))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        return self.linear(self.reshape(self.op("Transpose", mixed, perm=[0, 2, 1, 3]), -1, length, size), size, size)

    def transformer(
        self, x: str, length: int, size: int, heads: int, attend: Callable[[str], str] | None = None
    ) -> str:
        """Return a layer of a transformer."""
        normed = self.norm(x, size)
        mixed = attend(normed) if attend is not None else self.attention(normed, length, size, heads)
        x = self.op("Add", x, mixed)
        inner = self.gelu(self.linear(self.norm(x, size), size, 4 * size))
        result: str = self.op("Add", x, self.linear(inner, 4 * size, size, gain=0.3))
        return result

    def classes(self, x: str, channels: int) -> str:
        pooled = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.linear(pooled, channels, 1000)

    def save(self, path: Path, source: Sequence[int | str], result: str, shape: Sequence[int | str]) -> None:
        self._nodes.append(helper.make_node("Identity", [result], ["y"], "last"))
        x, y = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims))
            for name, dims in (("x", source), ("y", shape))
        )
        graph = helper.make_graph(self._nodes, path.stem, [x], [y], self._weights)
        opset = helper.make_opsetid("", models.OPSET)
        path.write_bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())


IMAGE = ("batch", 3, 224, 224)


def _squeeze_excite(path: Path) -> None:
    """Depthwise convolutions with squeeze-and-excite, like EfficientNet-B0."""
    net, channels = Net(), 32
    x = net.swish(net.conv("x", 3, channels, 3, 2))
    for expand, outside, count, stride, kernel in (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    ):  # fmt: skip
        for number in range(count):
            wide = channels * expand
            inner = net.swish(net.conv(x, channels, wide, 1)) if expand > 1 else x
            inner = net.swish(net.conv(inner, wide, wide, kernel, stride if number == 0 else 1, groups=wide))
            less = max(1, channels // 4)
            weight = net.swish(net.conv(net.op("GlobalAveragePool", inner), wide, less, 1))
            inner = net.op("Mul", inner, net.op("Sigmoid", net.conv(weight, less, wide, 1)))
            inner = net.conv(inner, wide, outside, 1, gain=0.5)
            x = net.op("Add", x, inner) if number else inner
            channels = outside
    x = net.swish(net.conv(x, channels, 1280, 1))
    net.save(path, IMAGE, net.classes(x, 1280), ("batch", 1000))


def _large_kernels(path: Path) -> None:
    """Depthwise 7x7 convolutions with LayerNorm, like ConvNeXt-Tiny."""
    net, channels = Net(), 96

    def normed(x: str, size: int) -> str:
        back = net.norm(net.op("Transpose", x, perm=[0, 2, 3, 1]), size)
        result: str = net.op("Transpose", back, perm=[0, 3, 1, 2])
        return result

    x = normed(net.conv("x", 3, channels, 4, 4), channels)
    for stage, count in enumerate((3, 3, 9, 3)):
        if stage:
            x = net.conv(normed(x, channels), channels, 2 * channels, 2, 2)
            channels *= 2
        for _ in range(count):
            inner = net.op("Transpose", net.conv(x, channels, channels, 7, groups=channels), perm=[0, 2, 3, 1])
            inner = net.gelu(net.linear(net.norm(inner, channels), channels, 4 * channels))
            inner = net.linear(inner, 4 * channels, channels, gain=0.3)
            x = net.op("Add", x, net.op("Transpose", inner, perm=[0, 3, 1, 2]))
    net.save(path, IMAGE, net.classes(x, channels), ("batch", 1000))


def _vision_transformer(path: Path) -> None:
    net, size, length = Net(), 384, 196
    x = net.reshape(net.conv("x", 3, size, 16, 16), 0, size, length)
    x = net.op("Add", net.op("Transpose", x, perm=[0, 2, 1]), net.weight(1, length, size, scale=0.1))
    for _ in range(12):
        x = net.transformer(x, length, size, 6)
    x = net.op("ReduceMean", net.norm(x, size), axes=[1], keepdims=0)
    net.save(path, IMAGE, net.linear(x, size, 1000), ("batch", 1000))


def _windowed_transformer(path: Path) -> None:
    """Attention in windows that are shifted every other layer, like Swin-Tiny."""
    net, size, side, window = Net(), 96, 56, 7
    x = net.op("Transpose", net.conv("x", 3, size, 4, 4), perm=[0, 2, 3, 1])

    def roll(x: str, by: int) -> str:
        for axis in (1, 2):
            one, at, end = (net.constant(np.array([n], np.int64)) for n in (axis, by % side, side))
            zero = net.constant(np.array([0], np.int64))
            x = net.op("Concat", net.op("Slice", x, at, end, one), net.op("Slice", x, zero, at, one), axis=axis)
        return x

    def in_windows(x: str, shift: int, heads: int) -> str:
        x = roll(x, shift) if shift else x
        count = side // window
        x = net.op("Transpose", net.reshape(x, -1, count, window, count, window, size), perm=[0, 1, 3, 2, 4, 5])
        x = net.attention(net.reshape(x, -1, window * window, size), window * window, size, heads)
        x = net.op("Transpose", net.reshape(x, -1, count, count, window, window, size), perm=[0, 1, 3, 2, 4, 5])
        x = net.reshape(x, -1, side, side, size)
        return roll(x, -shift) if shift else x

    for stage, count in enumerate((2, 2, 6, 2)):
        if stage:
            x = net.op("Transpose", net.reshape(x, -1, side // 2, 2, side // 2, 2, size), perm=[0, 1, 3, 2, 4, 5])
            side //= 2
            x = net.linear(net.norm(net.reshape(x, -1, side, side, 4 * size), 4 * size), 4 * size, 2 * size)
            size *= 2
        for number in range(count):
            shift = window // 2 if number % 2 and side > window else 0
            x = net.transformer(x, 0, size, 0, functools.partial(in_windows, shift=shift, heads=size // 32))
    x = net.op("ReduceMean", net.norm(x, size), axes=[1, 2], keepdims=0)
    net.save(path, IMAGE, net.linear(x, size, 1000), ("batch", 1000))


def _residual(path: Path, groups: int, depths: Sequence[int], widths: Sequence[int], wider: int) -> None:
    net = Net()
    x = net.relu(net.conv("x", 3, 64, 7, 2))
    x, channels = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 64
    for stage, (width, count) in enumerate(zip(widths, depths, strict=True)):
        for number in range(count):
            stride = 2 if stage and not number else 1
            shortcut = x if number else net.conv(x, channels, wider * width, 1, stride)
            inner = net.relu(net.conv(x, channels, width, 1))
            inner = net.relu(net.conv(inner, width, width, 3, stride, groups=groups))
            x = net.relu(net.op("Add", shortcut, net.conv(inner, width, wider * width, 1, gain=0.3)))
            channels = wider * width
    net.save(path, IMAGE, net.classes(x, channels), ("batch", 1000))


def _resnet(path: Path) -> None:
    _residual(path, 1, (3, 4, 6, 3), (64, 128, 256, 512), 4)


def _grouped(path: Path) -> None:
    """Grouped convolutions, like ResNeXt-50."""
    _residual(path, 32, (3, 4, 6, 3), (128, 256, 512, 1024), 2)


def _shuffle(path: Path) -> None:
    """Small depthwise convolutions between shuffles of the channels, like ShuffleNet."""
    net, channels, side = Net(), 24, 56
    x = net.relu(net.conv("x", 3, channels, 3, 2))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for outside, count in ((116, 4), (232, 8), (464, 4)):
        half, side = outside // 2, side // 2
        for number in range(count):
            if number:
                kept, inner = net.op("Split", x, count=2, axis=1)
                inner = net.relu(net.conv(inner, half, half, 1))
            else:
                kept = net.relu(net.conv(net.conv(x, channels, channels, 3, 2, channels), channels, half, 1))
                inner = net.relu(net.conv(x, channels, half, 1))
            inner = net.conv(inner, half, half, 3, 1 if number else 2, half)
            x = net.op("Concat", kept, net.relu(net.conv(inner, half, half, 1)), axis=1)
            x = net.op("Transpose", net.reshape(x, -1, 2, half, side, side), perm=[0, 2, 1, 3, 4])
            x = net.reshape(x, -1, outside, side, side)
        channels = outside
    net.save(path, IMAGE, net.classes(net.relu(net.conv(x, channels, 1024, 1)), 1024), ("batch", 1000))


def _dense(path: Path) -> None:
    """Dense blocks, like DenseNet-121."""
    net, channels = Net(), 64

    def normed(x: str, size: int) -> str:
        ones, zeros = net.constant(np.ones(size, np.float32)), net.constant(np.zeros(size, np.float32))
        return net.relu(net.op("BatchNormalization", x, ones, zeros, net.weight(size, scale=0.1), ones))

    x = net.relu(net.conv("x", 3, channels, 7, 2))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            x = net.conv(normed(x, channels), channels, channels // 2, 1)
            x, channels = net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), channels // 2
        for _ in range(count):
            inner = net.conv(normed(x, channels), channels, 128, 1)
            x = net.op("Concat", x, net.conv(normed(inner, 128), 128, 32, 3, gain=0.5), axis=1)
            channels += 32
    net.save(path, IMAGE, net.classes(normed(x, channels), channels), ("batch", 1000))


def add_unet(net: Net, widths: Sequence[int]) -> str:
    """Add an encoder and a decoder with transposed convolutions to ``x``. Return the last value, with two channels."""
    kept = list[tuple[str, int]]()
    x, channels = "x", 3

    def double(x: str, inside: int, outside: int) -> str:
        return net.relu(net.conv(net.relu(net.conv(x, inside, outside, 3)), outside, outside, 3))

    for width in widths:
        x = double(x, channels, width)
        kept.append((x, width))
        x, channels = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), width
    x, channels = double(x, channels, 2 * channels), 2 * channels
    for skipped, width in reversed(kept):
        weights = net.weight(channels, width, 2, 2, scale=math.sqrt(1 / channels))
        x = net.op("Concat", net.op("ConvTranspose", x, weights, strides=[2, 2]), skipped, axis=1)
        x, channels = double(x, 2 * width, width), width
    return net.conv(x, channels, 2, 1)


def _unet(path: Path) -> None:
    """An encoder and decoder with transposed convolutions, whose output is as large as the image."""
    net = Net()
    net.save(path, ("batch", 3, 256, 256), add_unet(net, (32, 64, 128, 256)), ("batch", 2, 256, 256))


def _enlarging(path: Path) -> None:
    """A network that makes images larger, so that most of a run is its copy out."""
    net = Net()
    x = net.relu(net.conv(net.relu(net.conv("x", 3, 64, 5)), 64, 32, 3))
    x = net.op("DepthToSpace", net.conv(x, 32, 27, 3), blocksize=3, mode="CRD")
    net.save(path, ("batch", 3, 160, 160), x, ("batch", 3, 480, 480))


def _recurrent(path: Path) -> None:
    """Two layers of a bidirectional LSTM over sequences of 100."""
    net, features, hidden, length = Net(), 64, 128, 100
    x = net.op("Transpose", "x", perm=[1, 0, 2])
    for inside in (features, 2 * hidden):
        weights = [net.weight(2, 4 * hidden, size, scale=size**-0.5) for size in (inside, hidden)]
        x = net.op("LSTM", x, *weights, hidden_size=hidden, direction="bidirectional")
        x = net.reshape(net.op("Transpose", x, perm=[0, 2, 1, 3]), length, -1, 2 * hidden)
    x = net.linear(net.op("Transpose", x, perm=[1, 0, 2]), 2 * hidden, 32)
    net.save(path, ("batch", length, features), x, ("batch", length, 32))


def _perceptron(path: Path) -> None:
    """Three small matrix products: a run is nothing but overhead."""
    net, x = Net(), "x"
    for inside, outside in ((64, 256), (256, 256)):
        x = net.relu(net.linear(x, inside, outside))
    net.save(path, ("batch", 64), net.linear(x, 256, 16), ("batch", 16))


def _elementwise(path: Path) -> None:
    """A few operators over a megabyte for each item, as much out as in."""
    save_chain(path, 6, ("batch", 1 << 18))


def save_chain(path: Path, operators: int, shape: Sequence[int | str], wider: int = 1) -> None:
    """Save a chain of elementwise operators. Each item of the last axis becomes ``wider`` items first."""
    net, x, last = Net(), "x", int(shape[-1])
    if wider > 1:
        x = net.op("Concat", *[x] * wider, axis=len(shape) - 1)
    for number in range(operators):
        x = net.op(("Sigmoid", "Neg")[number % 2], x)
    net.save(path, shape, x, (*shape[:-1], wider * last))


def save_sized(path: Path, size: int, *, is_large_in: bool) -> None:
    """Save ten small operators with ``size`` bytes out, and as many in if ``is_large_in``, else one KiB."""
    net, rows = Net(), min(256, size // 4)
    columns = size // 4 // rows
    x = "x"
    if not is_large_in:
        for number in range(9):
            x = net.op(("Sigmoid", "Neg")[number % 2], x)
        x = net.op("Mul", x, net.weight(1, columns, scale=1))
    else:
        x = net.op("Neg", x)
    net.save(path, (rows, columns if is_large_in else 1), x, (rows, columns))


KINDS: dict[str, Callable[[Path], None]] = {
    "squeeze-excite": _squeeze_excite,
    "large-kernels": _large_kernels,
    "vision-transformer": _vision_transformer,
    "windowed-transformer": _windowed_transformer,
    "grouped": _grouped,
    "shuffle": _shuffle,
    "unet": _unet,
    "enlarging": _enlarging,
    "dense": _dense,
    "resnet": _resnet,
    "recurrent": _recurrent,
    "perceptron": _perceptron,
    "elementwise": _elementwise,
}


def made(kind: str, folder: Path | None = None) -> Path:
    """Return the path of the model of a kind, which is kept in a folder."""
    path = (folder or models.folder()) / f"zoo-{kind}-v{VERSION}.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            new = Path(scratch, path.name)
            KINDS[kind](new)
            new.replace(path)
    return path
