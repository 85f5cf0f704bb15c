"""Small models, one for each form of an operator that may run on cuDNN; and what they did without it on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

_random = np.random.default_rng(11)


@dataclass(frozen=True)
class Form:
    """An operator with its inputs, constants (later inputs) and attributes. ``name`` is unique."""

    name: str
    operator: str
    inputs: Sequence[Any]
    constants: Sequence[Any] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 17
    domain: str = ""
    outputs: int = 1
    skipped: tuple[int, ...] = ()  # positions of inputs that are left out

    def model(self) -> tuple[bytes, dict[str, Any]]:
        """Return the model, and what to feed it."""
        feed = {f"x{number}": np.asarray(array) for number, array in enumerate(self.inputs)}
        weights = {f"c{number}": np.asarray(array) for number, array in enumerate(self.constants)}
        names = [*feed, *weights]
        for position in self.skipped:
            names.insert(position, "")
        results = [f"y{number}" for number in range(self.outputs)]
        node = helper.make_node(self.operator, names, results, "node", domain=self.domain, **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in feed.items()
        ]
        graph = helper.make_graph(
            [node],
            "form",
            inputs,
            [helper.make_empty_tensor_value_info(name) for name in results],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        domains = [helper.make_opsetid("", self.opset)]
        if self.domain:
            domains.append(helper.make_opsetid(self.domain, 1))
        model: bytes = helper.make_model(graph, opset_imports=domains, ir_version=8).SerializeToString()
        return model, feed


def _floats(*shape: int, dtype: Any = np.float32) -> Any:
    return (np.abs(_random.standard_normal(shape)) + 0.1).astype(dtype)


def _numbers(*shape: int, dtype: Any = np.int64) -> Any:
    return _random.integers(1, 4, shape).astype(dtype)


def _whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "float64": np.float64}
_INTEGERS: dict[str, Any] = {"int32": np.int32, "int64": np.int64, "int8": np.int8, "uint8": np.uint8}
_SPATIAL = {1: (9,), 2: (9, 8), 3: (5, 6, 7)}


def _convolutions() -> Iterator[Form]:
    for rank, size in _SPATIAL.items():
        kernel = (3,) * rank
        yield Form(f"Conv {rank}D", "Conv", [_floats(1, 4, *size)], [_floats(6, 4, *kernel)])
        yield Form(f"ConvTranspose {rank}D", "ConvTranspose", [_floats(1, 4, *size)], [_floats(4, 6, *kernel)])
    yield Form("Conv 1x1", "Conv", [_floats(1, 4, 9, 8)], [_floats(6, 4, 1, 1)])
    yield Form("Conv depthwise", "Conv", [_floats(1, 4, 9, 8)], [_floats(4, 1, 3, 3)], {"group": 4})
    yield Form("Conv with bias", "Conv", [_floats(1, 4, 9, 8)], [_floats(6, 4, 3, 3), _floats(6)])
    yield Form("Conv weights as input", "Conv", [_floats(1, 4, 9, 8), _floats(6, 4, 3, 3)])
    for name, dtype in _TYPES.items():
        yield Form(f"Conv {name}", "Conv", [_floats(1, 4, 9, 8, dtype=dtype)], [_floats(6, 4, 3, 3, dtype=dtype)])
    yield Form(
        "FusedConv", "FusedConv", [_floats(1, 4, 9, 8)], [_floats(6, 4, 3, 3)], {"activation": "Relu"},
        domain="com.microsoft",
    )  # fmt: skip
    yield Form(
        "NhwcConv", "NhwcConv", [_floats(1, 9, 8, 4, dtype=np.float16)], [_floats(6, 3, 3, 4, dtype=np.float16)],
        domain="com.microsoft",
    )  # fmt: skip


def _normalisations() -> Iterator[Form]:
    for rank, size in {0: (), **_SPATIAL}.items():
        weights = [_floats(4) for _ in range(4)]
        yield Form(f"BatchNormalization {rank}D", "BatchNormalization", [_floats(2, 4, *size)], weights)
    for name, dtype in _TYPES.items():
        weights = [_floats(4, dtype=dtype) for _ in range(4)]
        yield Form(f"BatchNormalization {name}", "BatchNormalization", [_floats(2, 4, 9, 8, dtype=dtype)], weights)
    yield Form(
        "BatchNormalization training", "BatchNormalization", [_floats(2, 4, 9, 8)], [_floats(4) for _ in range(4)],
        {"training_mode": 1}, outputs=3,
    )  # fmt: skip
    yield Form(
        "BatchNormalization 9", "BatchNormalization", [_floats(2, 4, 9, 8)], [_floats(4) for _ in range(4)], opset=9
    )
    for rank, size in _SPATIAL.items():
        scale = [_floats(4), _floats(4)]
        yield Form(f"InstanceNormalization {rank}D", "InstanceNormalization", [_floats(2, 4, *size)], scale)
    yield Form(
        "InstanceNormalization one image", "InstanceNormalization", [_floats(1, 4, 9, 8)], [_floats(4), _floats(4)]
    )
    yield Form(
        "InstanceNormalization float16", "InstanceNormalization", [_floats(2, 4, 9, 8, dtype=np.float16)],
        [_floats(4, dtype=np.float16), _floats(4, dtype=np.float16)],
    )  # fmt: skip
    for name, dtype in _TYPES.items():
        yield Form(f"LRN {name}", "LRN", [_floats(1, 4, 9, 8, dtype=dtype)], [], {"size": 3})
    yield Form("LayerNormalization", "LayerNormalization", [_floats(2, 8)], [_floats(8)])
    yield Form("LayerNormalization axis 1", "LayerNormalization", [_floats(2, 3, 8)], [_floats(3, 8)], {"axis": 1})
    yield Form("GroupNormalization", "GroupNormalization", [_floats(2, 4, 9, 8)], [_floats(4), _floats(4)],
               {"num_groups": 2}, opset=21)  # fmt: skip
    yield Form("LpNormalization", "LpNormalization", [_floats(2, 8)])
    yield Form("MeanVarianceNormalization", "MeanVarianceNormalization", [_floats(2, 4, 9, 8)])
    for axis in (-1, 0, 1):
        yield Form(f"Softmax axis {axis}", "Softmax", [_floats(2, 5, 6)], [], {"axis": axis})
        yield Form(f"LogSoftmax axis {axis}", "LogSoftmax", [_floats(2, 5, 6)], [], {"axis": axis})
    yield Form("Softmax long", "Softmax", [_floats(2, 5000)], [], {"axis": -1})
    yield Form("Softmax long float64", "Softmax", [_floats(2, 5000, dtype=np.float64)], [], {"axis": -1})
    yield Form("Softmax 11", "Softmax", [_floats(2, 5, 6)], [], {"axis": 1}, opset=11)
    yield Form("Softmax 11 long", "Softmax", [_floats(2, 50, 60)], [], {"axis": 1}, opset=11)
    yield Form("Dropout training", "Dropout", [_floats(2, 8)], [np.float32(0.5), np.bool_(True)])


def _pools() -> Iterator[Form]:
    for rank, size in _SPATIAL.items():
        kernel = {"kernel_shape": [2] * rank}
        yield Form(f"MaxPool {rank}D", "MaxPool", [_floats(1, 4, *size)], [], kernel)
        yield Form(f"MaxPool {rank}D indices", "MaxPool", [_floats(1, 4, *size)], [], kernel, outputs=2)
        yield Form(
            f"MaxPool {rank}D dilated", "MaxPool", [_floats(1, 4, *size)], [], {**kernel, "dilations": [2] * rank}
        )
        yield Form(f"AveragePool {rank}D", "AveragePool", [_floats(1, 4, *size)], [], kernel)
        yield Form(f"GlobalMaxPool {rank}D", "GlobalMaxPool", [_floats(1, 4, *size)])
        yield Form(f"GlobalAveragePool {rank}D", "GlobalAveragePool", [_floats(1, 4, *size)])
        yield Form(f"LpPool {rank}D", "LpPool", [_floats(1, 4, *size)], [], kernel)
        yield Form(f"GlobalLpPool {rank}D", "GlobalLpPool", [_floats(1, 4, *size)])
    window = {"kernel_shape": [2, 2]}
    for name, dtype in {**_TYPES, **_INTEGERS}.items():
        array = _numbers(1, 4, 9, 8, dtype=dtype)
        yield Form(f"MaxPool {name}", "MaxPool", [array], [], window)
        yield Form(f"AveragePool {name}", "AveragePool", [array], [], window)
    yield Form("MaxPool padded", "MaxPool", [_floats(1, 4, 9, 8)], [], {**window, "auto_pad": "SAME_UPPER"})
    yield Form("MaxPool ceil", "MaxPool", [_floats(1, 4, 9, 8)], [], {**window, "ceil_mode": 1, "strides": [2, 2]})
    yield Form("MaxPool column order", "MaxPool", [_floats(1, 4, 9, 8)], [], {**window, "storage_order": 1}, outputs=2)
    yield Form(
        "AveragePool padded", "AveragePool", [_floats(1, 4, 9, 8)], [],
        {**window, "pads": [1, 1, 1, 1], "count_include_pad": 1},
    )  # fmt: skip


def _recurrent() -> Iterator[Form]:
    for operator, gates in {"RNN": 1, "GRU": 3, "LSTM": 4}.items():
        for direction, count in {"forward": 1, "reverse": 1, "bidirectional": 2}.items():
            yield Form(
                f"{operator} {direction}", operator, [_floats(5, 2, 3)],
                [_floats(count, gates * 4, 3), _floats(count, gates * 4, 4)],
                {"hidden_size": 4, "direction": direction}, outputs=2,
            )  # fmt: skip


def _reductions() -> Iterator[Form]:
    cube = _floats(3, 4, 5)
    names = "Min Max Prod L1 L2 LogSum LogSumExp Sum SumSquare Mean"
    operators = [f"Reduce{name}" for name in names.split(" ")]
    for operator in operators:
        old = 12 if operator == "ReduceSum" else 17  # the last in which the axes are an attribute
        for axes in ([2], [1], [0], [0, 1], [1, 2], [0, 2], [0, 1, 2]):
            yield Form(f"{operator} axes {axes}", operator, [cube], [], {"axes": axes}, opset=old)
        yield Form(f"{operator} all", operator, [cube], [], {}, opset=old)
        yield Form(f"{operator} flat", operator, [cube], [], {"axes": [2], "keepdims": 0}, opset=old)
        yield Form(f"{operator} vector", operator, [_floats(5)], [], {"axes": [0]}, opset=old)
        yield Form(f"{operator} size 1", operator, [_floats(3, 1, 5)], [], {"axes": [1]}, opset=old)
        yield Form(f"{operator} rows", operator, [_floats(40, 70)], [], {"axes": [1]}, opset=old)
        yield Form(f"{operator} columns", operator, [_floats(40, 70)], [], {"axes": [0]}, opset=old)
        yield Form(f"{operator} 18", operator, [cube], [_whole(2)], {}, opset=18)
        yield Form(f"{operator} 18 all", operator, [cube], [], {}, opset=18)
        yield Form(f"{operator} 18 nothing", operator, [cube], [], {"noop_with_empty_axes": 1}, opset=18)
        for name, dtype in {**_TYPES, **_INTEGERS}.items():
            array = _numbers(3, 4, 5, dtype=dtype)
            yield Form(f"{operator} {name}", operator, [array], [], {"axes": [2]}, opset=old)
            yield Form(f"{operator} {name} axis 0", operator, [array], [], {"axes": [0]}, opset=old)
            yield Form(f"{operator} {name} all", operator, [array], [], {}, opset=old)
    for operator in ("ArgMax", "ArgMin"):
        for axis in (-1, 2, 1, 0, -3):
            yield Form(f"{operator} axis {axis}", operator, [cube], [], {"axis": axis})
        yield Form(f"{operator} default", operator, [cube])
        yield Form(f"{operator} last flat", operator, [cube], [], {"axis": -1, "keepdims": 0})
        yield Form(f"{operator} last index", operator, [cube], [], {"axis": -1, "select_last_index": 1})
        yield Form(f"{operator} vector", operator, [_floats(5)], [], {"axis": 0})
        yield Form(f"{operator} size 1", operator, [_floats(3, 1, 5)], [], {"axis": 1})
        yield Form(f"{operator} column", operator, [_floats(3, 1)], [], {"axis": 0})
        yield Form(f"{operator} rows 11", operator, [_floats(40, 70)], [], {"axis": 1}, opset=11)
        yield Form(f"{operator} long", operator, [_floats(2, 50000)], [], {"axis": -1})
        for name, dtype in {**_TYPES, **_INTEGERS}.items():
            array = _numbers(3, 4, dtype=dtype)
            yield Form(f"{operator} {name} last", operator, [array], [], {"axis": -1})
            yield Form(f"{operator} {name} first", operator, [array], [], {"axis": 0})


def _products() -> Iterator[Form]:
    pairs = {
        "ij,jk->ik": ([3, 4], [4, 5]),
        "bij,bjk->bik": ([2, 3, 4], [2, 4, 5]),
        "bhid,bhjd->bhij": ([2, 2, 3, 4], [2, 2, 5, 4]),
        "i,j->ij": ([3], [4]),
        "ij,ij->ij": ([3, 4], [3, 4]),
        "ij,ij->": ([3, 4], [3, 4]),
        "ij,kj->i": ([3, 4], [5, 4]),
        "...ij,...jk->...ik": ([2, 3, 4], [2, 4, 5]),
    }
    for equation, shapes in pairs.items():
        attributes = {"equation": equation}
        yield Form(f"Einsum {equation}", "Einsum", [_floats(*shape) for shape in shapes], [], attributes)
    for equation, shape in {
        "ij->ji": [3, 4], "ij->i": [3, 4], "ij->j": [3, 4], "ij->": [3, 4], "ii->i": [3, 3], "ii->": [3, 3],
        "ij->ij": [3, 4],
    }.items():  # fmt: skip
        yield Form(f"Einsum {equation}", "Einsum", [_floats(*shape)], [], {"equation": equation})
    yield Form(
        "Einsum three", "Einsum", [_floats(3, 4), _floats(4, 5), _floats(5, 6)], [], {"equation": "ij,jk,kl->il"}
    )
    yield Form(
        "Einsum float16", "Einsum", [_floats(3, 4, dtype=np.float16), _floats(4, 5, dtype=np.float16)], [],
        {"equation": "ij,jk->ik"},
    )  # fmt: skip
    yield Form("TopK", "TopK", [_floats(3, 40)], [_whole(3)], outputs=2)
    yield Form("CumSum", "CumSum", [_floats(3, 4)], [np.array(1, np.int64)])
    yield Form("DepthToSpace", "DepthToSpace", [_floats(1, 4, 3, 3)], [], {"blocksize": 2})
    yield Form("AffineGrid", "AffineGrid", [_floats(1, 2, 3)], [_whole(1, 1, 4, 4)], opset=20)
    yield Form("GridSample", "GridSample", [_floats(1, 1, 4, 4), _floats(1, 3, 3, 2)], opset=16)
    yield Form(
        "Resize", "Resize", [_floats(1, 1, 4, 4)], [np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"},
        skipped=(1,),
    )  # fmt: skip


def _attention() -> Iterator[Form]:
    ours = "com.microsoft"
    for name, dtype in {"float32": np.float32, "float16": np.float16}.items():
        for heads, size in ((1, 64), (2, 64), (2, 16), (1, 8), (2, 256)):
            query = _floats(1, 4, size, dtype=dtype)
            attributes = {"num_heads": heads}
            label = f"{name} {heads} of {size}"
            yield Form(f"MultiHeadAttention {label}", "MultiHeadAttention", [query] * 3, [], attributes, domain=ours)
            weights = [_floats(size, 3 * size, dtype=dtype), _floats(3 * size, dtype=dtype)]
            yield Form(f"Attention {label}", "Attention", [query], weights, attributes, domain=ours)
            yield Form(
                f"Attention one way {label}", "Attention", [query], weights, {**attributes, "unidirectional": 1},
                domain=ours,
            )  # fmt: skip
            standard = {"q_num_heads": heads, "kv_num_heads": heads}
            yield Form(f"Attention 23 {label}", "Attention", [query] * 3, [], standard, opset=23)
    query = _floats(1, 4, 128, dtype=np.float16)
    lengths = [np.array([3], np.int32), np.array(4, np.int32)]
    yield Form(
        "GroupQueryAttention", "GroupQueryAttention", [query] * 3, lengths, {"num_heads": 2, "kv_num_heads": 2},
        domain=ours, skipped=(3, 4), outputs=3,
    )  # fmt: skip
    yield Form(
        "MultiHeadAttention bias", "MultiHeadAttention", [query] * 3, [_floats(384, dtype=np.float16)],
        {"num_heads": 2}, domain=ours,
    )  # fmt: skip
    yield Form("Gelu 20", "Gelu", [_floats(3, 4)], opset=20)
    yield Form("SkipLayerNormalization", "SkipLayerNormalization", [_floats(1, 3, 8)] * 2, [_floats(8)], domain=ours)
    yield Form("FusedMatMul", "FusedMatMul", [_floats(3, 4), _floats(4, 5)], domain=ours)
    yield Form("FastGelu", "FastGelu", [_floats(3, 4)], domain=ours)
    yield Form("BiasGelu", "BiasGelu", [_floats(3, 4), _floats(4)], domain=ours)
    yield Form(
        "GroupNorm", "GroupNorm", [_floats(1, 4, 4, 32, dtype=np.float16)], [_floats(32), _floats(32)],
        {"groups": 32, "activation": 0}, domain=ours,
    )  # fmt: skip
    for axes in ([1], [0, 2]):
        for shape in ((40, 50, 60), (1, 5, 6), (4, 1, 6), (4, 5, 1)):
            yield Form(f"ReduceMean axes {axes} of {shape}", "ReduceMean", [_floats(*shape)], [], {"axes": axes})
            yield Form(f"ArgMax axis {axes[0]} of {shape}", "ArgMax", [_floats(*shape)], [], {"axis": axes[0]})
    image = _floats(2, 3, 4, 5)
    for axes in ([2, 3], [1], [2], [3], [0, 1], [1, 2], [1, 3], [0, 2, 3], [0, 3]):
        for operator in ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceLogSum"):
            opset = 12 if operator == "ReduceSum" else 17
            yield Form(f"{operator} of images {axes}", operator, [image], [], {"axes": axes}, opset=opset)


FORMS: tuple[Form, ...] = (
    *_convolutions(), *_normalisations(), *_pools(), *_recurrent(), *_reductions(), *_products(), *_attention(),
)  # fmt: skip
