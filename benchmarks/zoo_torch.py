"""A network of the zoo as a module of PyTorch: the same graph, operator by operator, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.nn import functional

AHEAD = 2  # batches at work at the same time, each with a stream and pinned arrays of its own


def _conv(x: Any, weight: Any, bias: Any, *, group: int, strides: list[int], pads: list[int]) -> Any:
    return functional.conv2d(x, weight, bias, strides, pads[:2], groups=group)


def _reshape(x: Any, shape: list[int]) -> Any:
    return x.reshape([size or x.shape[axis] for axis, size in enumerate(shape)])


def _slice(x: Any, start: list[int], end: list[int], axes: list[int]) -> Any:
    return x.narrow(axes[0], start[0], min(end[0], x.shape[axes[0]]) - start[0])


def _batch_norm(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    return functional.batch_norm(x, mean, variance, scale, bias, eps=1e-5)


# The operators of zoo_models.py with the attributes that it uses. Lists are constants of integers.
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "AveragePool": lambda x, kernel_shape, strides: functional.avg_pool2d(x, kernel_shape, strides),
    "BatchNormalization": _batch_norm,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Conv": _conv,
    "ConvTranspose": lambda x, weight, strides: functional.conv_transpose2d(x, weight, stride=strides),
    "DepthToSpace": lambda x, blocksize, mode: functional.pixel_shuffle(x, blocksize),
    "Erf": torch.erf,
    "Flatten": lambda x: x.flatten(1),
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "Identity": lambda x: x,
    "LayerNormalization": lambda x, scale, bias, axis: functional.layer_norm(x, scale.shape, scale, bias),
    "MatMul": torch.matmul,
    "MaxPool": lambda x, kernel_shape, strides, pads=(0, 0): functional.max_pool2d(x, kernel_shape, strides, pads[:2]),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "ReduceMean": lambda x, axes, keepdims: x.mean(axes, keepdim=bool(keepdims)),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "Sigmoid": torch.sigmoid,
    "Slice": _slice,
    "Softmax": lambda x, axis: torch.softmax(x, axis),
    "Squeeze": lambda x, axes: x.squeeze(axes[0]),
    "Transpose": lambda x, perm: x.permute(perm),
}


class Network(torch.nn.Module):
    """A model of the zoo. Raises NotImplementedError for an operator that is not in OPERATORS."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        graph = onnx.load(str(path)).graph
        unknown = {node.op_type for node in graph.node} - OPERATORS.keys() - {"Split"}
        if unknown:
            raise NotImplementedError(f"not made of PyTorch: {', '.join(sorted(unknown))}")
        self._constants: dict[str, Any] = {}
        for each in graph.initializer:
            array = numpy_helper.to_array(each)
            if array.dtype == np.int64:
                self._constants[each.name] = array.tolist()
            else:
                self.register_buffer(each.name, torch.from_numpy(array.copy()))
        self._weights = [each.name for each in graph.initializer if each.name not in self._constants]
        self._nodes = [
            (
                node.op_type,
                list(node.input),
                list(node.output),
                {each.name: helper.get_attribute_value(each) for each in node.attribute},
            )
            for node in graph.node
        ]
        self._output = graph.output[0].name

    def forward(self, x: Any) -> Any:
        values = {"x": x, **self._constants, **{name: getattr(self, name) for name in self._weights}}
        for operator, inputs, outputs, attributes in self._nodes:
            given = [values[name] for name in inputs]
            if operator == "Split":
                parts = given[0].chunk(len(outputs), attributes["axis"])
                values.update(zip(outputs, parts, strict=True))
            else:
                values[outputs[0]] = OPERATORS[operator](*given, **attributes)
        return values[self._output]


class Pipeline:
    """torch.compile from arrays to arrays as ``map`` does it: TF32, channels-last, pinned memory, two at a time."""

    def __init__(self, path: Path, device: str, *, compiled: bool = True) -> None:
        torch.set_float32_matmul_precision("high")  # TF32, which ONNX Runtime uses too
        torch.backends.cudnn.allow_tf32 = True
        module = Network(path).eval().to(device, memory_format=torch.channels_last)
        self._run = torch.compile(module) if compiled else module
        self._device = device

    def _compute(self, x: Any) -> Any:
        x = x.to(self._device, non_blocking=True)
        return self._run(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x)

    def map(self, feeds: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield the output for each feed."""
        with torch.inference_mode():
            if self._device == "cpu":
                for feed in feeds:
                    yield self._compute(torch.from_numpy(feed["x"])).contiguous().numpy()
                return
            slots: list[_Slot] = []
            for number, feed in enumerate(feeds):
                if number < AHEAD:
                    slots.append(_Slot(feed["x"]))
                else:
                    yield slots[number % AHEAD].result()
                slots[number % AHEAD].begin(self._compute, feed["x"])
            for number in range(len(feeds), len(feeds) + len(slots)):
                yield slots[number % len(slots)].result()


class _Slot:
    """A batch at work."""

    def __init__(self, array: Any) -> None:
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
        self._given = torch.empty(array.shape, dtype=torch.float32, pin_memory=True)
        self._found: Any = None

    def begin(self, compute: Callable[[Any], Any], array: Any) -> None:
        self._given.copy_(torch.from_numpy(array))
        with torch.cuda.stream(self._stream):
            found = compute(self._given)
            if self._found is None:
                self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._found.copy_(found.contiguous(), non_blocking=True)
            self._done.record(self._stream)

    def result(self) -> Any:
        self._done.synchronize()
        return self._found.numpy().copy()
