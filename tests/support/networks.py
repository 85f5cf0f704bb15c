"""Convolutional networks of random operators, as ONNX models: the same number makes the same network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

CHANNELS = 16
SIZE = 24  # pixels, high and wide
CLASSES = 10


class Network:
    """A graph that grows: ``current`` is the name of its last value, an image of CHANNELS channels.

    Args:
        number: of the network.
        dtype: of all that it computes with.
    """

    def __init__(self, number: int, dtype: type = np.float32) -> None:
        self._random = np.random.default_rng(number)
        self.dtype = np.dtype(dtype)
        self._nodes: list[Any] = []
        self._weights: dict[str, Any] = {}
        self.inputs: list[tuple[str, list[str | int | None]]] = [("x", ["batch", CHANNELS, SIZE, SIZE])]
        self.current = "x"

    def weights(self, *shape: int, scale: float = 1.0, around: float = 0.0) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = (around + scale * self._random.standard_normal(shape)).astype(self.dtype)
        return name

    def constant(self, array: Any) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = array
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The name of the node's output, which is the network's last value from now on."""
        self.current = f"v{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(operator, list(inputs), [self.current], f"n{len(self._nodes)}", **attributes)
        )
        return self.current

    def conv(self, source: str | None = None, *, inside: int = CHANNELS, kernel: int = 3, **attributes: Any) -> str:
        """A convolution that keeps the size of its image, with biases, to CHANNELS channels."""
        group = attributes.get("group", 1)
        fan_in = inside // group * kernel**2
        names = [source or self.current, self.weights(CHANNELS, inside // group, kernel, kernel, scale=fan_in**-0.5)]
        names.append(self.weights(CHANNELS))
        return self.add("Conv", *names, **{"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, **attributes})

    def model(self) -> bytes:
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in self.inputs]
        initializers = [numpy_helper.from_array(array, name) for name, array in self._weights.items()]
        outputs = [helper.make_tensor_value_info(self.current, kind, None)]
        graph = helper.make_graph(self._nodes, "network", inputs, outputs, initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        data: bytes = model.SerializeToString()
        return data


def _residual(network: Network) -> None:
    before = network.current
    network.conv()
    network.add("Relu", network.current)
    network.add("Add", network.conv(), before)


def _squeezed(network: Network) -> None:
    before = network.current
    network.add("GlobalAveragePool", before)
    network.add("Sigmoid", network.conv(kernel=1))
    network.add("Mul", before, network.current)


def _normalised(network: Network) -> None:
    names = [network.weights(CHANNELS, scale=0.1, around=1.0), network.weights(CHANNELS), network.weights(CHANNELS)]
    network.add("Relu", network.current)  # else it is folded into the convolution before it
    network.add("BatchNormalization", network.current, *names, network.constant(np.full(CHANNELS, 1.5, network.dtype)))


def _concatenated(network: Network) -> None:
    before = network.current
    network.add("Concat", before, network.conv(), axis=1)
    network.conv(inside=2 * CHANNELS, kernel=1)


def _sliced(network: Network) -> None:
    bounds = [network.constant(np.array([number])) for number in (4, 12, 1)]
    network.conv(network.add("Slice", network.current, *bounds), inside=8)


def _pooled(network: Network) -> None:
    before = network.current
    network.add("MaxPool", before, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
    pooled = network.current
    network.add("AveragePool", before, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=1)
    network.add("Add", network.current, pooled)


def _resized(network: Network) -> None:
    before = network.current
    network.add("MaxPool", before, kernel_shape=[2, 2], strides=[2, 2])
    scales = network.constant(np.array([1, 1, 2, 2], np.float32))
    way = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    network.add("Resize", network.current, "", scales, **way)
    network.add("Add", network.current, before)


BLOCKS: tuple[Callable[[Network], object], ...] = (
    _residual,
    _squeezed,
    _normalised,
    _concatenated,
    _sliced,
    _pooled,
    _resized,
    lambda network: network.conv(kernel=1),
    lambda network: network.conv(kernel=5),
    lambda network: network.conv(dilations=[2, 2], pads=[2, 2, 2, 2]),
    lambda network: network.conv(group=4),
    lambda network: network.conv(group=2, kernel=1),
    lambda network: network.add("LeakyRelu", network.conv(), alpha=0.1),
    lambda network: network.add("PRelu", network.conv(), network.weights(CHANNELS, 1, 1)),
    lambda network: network.add("Clip", network.conv(), network.number(-1.0), network.number(1.0)),
    lambda network: network.add("Add", network.current, network.weights(CHANNELS, 1, 1)),
)


def random_network(number: int, dtype: type = np.float32) -> bytes:
    """Convolutions with a dozen blocks in between, then a classifier."""
    network = Network(number, dtype)
    order = np.random.default_rng(number).permutation(len(BLOCKS))[:12]
    for each in order:
        network.conv()
        network.add("Relu", network.current)
        BLOCKS[each](network)
    network.add("GlobalAveragePool", network.conv())
    network.add("Flatten", network.current)
    network.add("Gemm", network.current, network.weights(CHANNELS, CLASSES), network.weights(CLASSES))
    return network.model()


def length_delimited(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message that holds a message, text or bytes."""
    return as_varint(number << 3 | 2) + as_varint(len(content)) + content


def as_varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
