"""Choose further options for a session by its model: image layout, cuDNN handles, CPU threads.

**cuDNN handles**: a provider that finds cuDNN creates cuDNN handles for each session, whatever the model is. With cuDNN
9.19 on an H200 this took half of the time to open a small session (2.7 of 5.5 ms). It also leaked 10 KB of GPU memory
for each session, in plain ONNX Runtime too, because cudnnDestroy does not free it.

**CPU threads**: ONNX Runtime starts one thread less than the machine has cores, for each session. If all compute nodes
are on the GPU, these threads only serve ``run_async``.

**Layout**: channels-last (NHWC) with fused biases, for models that run faster with them. Measured on an H200 with the
networks of torchvision, in batches of 64 (benchmarks/layouts.py measures again): ResNet, ResNeXt, VGG, GoogLeNet,
Inception, DenseNet and RegNet take 0.54 to 0.81 of the time. Networks with depthwise convolutions (MobileNet,
EfficientNet, ConvNeXt) take up to 2.6 times as long. Those that reshape or transpose inside (ShuffleNet, ViT, Swin)
take up to 1.8 times as long.

So the choice is narrow, and only for models that ONNX Runtime 1.31 converts in full. If it does not know the rank of an
image or the version of the operators, it leaves convolutions as they are (layout_transformation.cc). With fused biases
these give wrong results, since their output is cleared on another stream (cudaMemset in conv.cc). Constant weights are
converted when a session opens (PrePack in conv.cc). BatchNormalization in this layout takes images only
(batch_norm.cc). Convolutions of doubles do not open. Those of float16 with fused biases ended in an illegal instruction
(error 715, cuDNN 9.19).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import onnxruntime

from ...errors import LibraryNotFoundError, ProviderOptionError, manual
from ...model.outline import STANDARD, UNREADABLE, Graph, GraphOutline, Node, Tensor, names
from ...provider.options import config_entry, may_record
from ...provider.placement import Placement, cudnn_operators
from ...provider.requests import CPU, CUDA, ProviderList
from ...provider.settings import FEW_THREADS, THREADS

HANDLES = "enable_cudnn"  # the option
_WHY_NO_HANDLES = (
    "no operator of this model uses cuDNN, whose handles took half of the time of a small session on an H200"
)
NO_HANDLES = {HANDLES: ("0", _WHY_NO_HANDLES)}

_WHY_FEW_THREADS = (
    "all nodes that compute are on the GPU; a thread for each of 32 cores took a fifth of the time to open an MLP"
)
_FEW_THREADS = {THREADS: (str(FEW_THREADS), _WHY_FEW_THREADS)}

_RELEASE = (1, 31)  # the first of ONNX Runtime with which they were measured

# Operators of the standard domain whose results are bitwise equal with and without cuDNN
# (tests/gpu/test_cudnn_handles.py). Fusions of these do not need cuDNN either. Softmax and the parts of normalisations
# are left out: ONNX Runtime fuses them into attention, which may use cuDNN.
WITHOUT_CUDNN = names(
    "MatMul Gemm",
    "Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Gelu Sigmoid HardSigmoid HardSwish Tanh Softplus Softsign Erf",
    "Add Sub Mul Div Neg Abs Reciprocal Sqrt Exp Log Sin Cos Floor Ceil Round Sign Clip",
    "Equal Less Greater LessOrEqual GreaterOrEqual Not And Or Xor Where",
    "Shape Reshape Flatten Squeeze Unsqueeze Transpose Concat Split Slice Gather Expand Tile",
    "Cast Identity Constant ConstantOfShape",
)
# Standard operators that are on the GPU for usual types. If one is not after all, the session is made again.
ON_GPU = WITHOUT_CUDNN | names(
    "Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool BatchNormalization Resize Dropout",
    "Softmax LogSoftmax LayerNormalization Pow ReduceMean ReduceSum",
)
_MOST_PARTS_OF_A_SMALL_MODEL = 250  # nodes and initializers, about 2 ms; a larger model gains too little


def choose(
    requested: ProviderList,
    options: Any,
    release: tuple[int, ...],
    capability: tuple[int, int] | None,
    outline: GraphOutline,
) -> dict[str, tuple[str, str]]:
    """Return the options that suit the model, each with its value and the reason.

    They are options of the CUDA provider, and ``THREADS`` of the session. Nothing is chosen for a model that cannot be
    read: ONNX Runtime says what is wrong with it.

    Args:
        requested: the providers that the caller asked for, with the caller's options.
        options: the caller's SessionOptions, or None.
        release: of ONNX Runtime.
        capability: the compute capability of the GPU.
    """
    if release < _RELEASE or not {CUDA, CPU}.issuperset(requested.names):
        return {}
    chosen: dict[str, tuple[str, str]] = {}
    try:
        if _layout_is_open(requested, options, capability) and gains_channels_last(outline):
            chosen |= LAYOUT_OPTIONS
        elif HANDLES not in requested.options_of(CUDA) and may_record(options) and has_only(outline, WITHOUT_CUDNN):
            chosen |= NO_HANDLES  # only where ``unfit`` can tell
        # ONNX Runtime counts physical cores, and ignores how many the process may use
        if (
            options is None
            and (os.cpu_count() or 1) > 2 * FEW_THREADS
            and ("prefer_nhwc" in chosen or has_only(outline, ON_GPU))
        ):
            chosen |= _FEW_THREADS
    except UNREADABLE:
        return {}
    return chosen


def unfit(chosen: Collection[str], placement: Placement) -> set[str]:
    """Return the names of the chosen options that do not suit the model as ONNX Runtime placed it."""
    placed = ((node.op_type, node.domain) for node in placement.nodes if node.provider == CUDA)
    fits = {
        HANDLES: placement.known and not cudnn_operators(placed),
        THREADS: placement.known and not placement.cpu_compute_nodes,
    }
    return {name for name, fit in fits.items() if name in chosen and not fit}


def has_only(outline: GraphOutline, operators: Collection[bytes]) -> bool:
    """Return True if all nodes of a model are of these ``operators`` of ONNX's own domain.

    False for a model with functions, which may have the name of an operator, and for a large one.
    """
    graph = outline.graph
    if outline.functions or graph.size > _MOST_PARTS_OF_A_SMALL_MODEL:
        return False
    return all(node.operator in operators and node.domain in STANDARD for node in graph.nodes)


def with_a_handle(error: LibraryNotFoundError) -> ProviderOptionError:
    """Return the error for a session without a handle that needed one after all. Then WITHOUT_CUDNN is wrong."""
    return ProviderOptionError(
        "the model reached an operator that needs cuDNN, and this session was opened without a handle of it",
        evidence=[f"chosen for speed: {HANDLES}=0", *error.evidence],
        fixes=[manual(f'open it with one: GPUSession(model, providers=[("{CUDA}", {{"{HANDLES}": "1"}})])')],
        provider=CUDA,
        option=HANDLES,
        value="0",
    )


_REASON = "batches of a ResNet-50 took 0.58 of the time on an H200, with results equal within the precision of TF32"
LAYOUT_OPTIONS = {"prefer_nhwc": ("1", _REASON), "fuse_conv_bias": ("1", _REASON)}

_CAPABILITY = (9, 0)  # the only one that was measured
_FEWEST_CONVOLUTIONS = 8
_FEWEST_CHANNELS = 4  # of a group

# Options of the caller that do not affect how convolutions are computed
_UNRELATED = frozenset(
    ("device_id", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream", "enable_cuda_graph")
)
# Entries of session options that keep weights unconverted, or with which nothing was measured
_CONTRARY_ENTRIES = ("session.disable_prepacking", "optimization.disable_specified_optimizers")

_OPERATOR_SETS = range(11, 22)  # Conv and the pools have other versions before and after

# Operators that are converted, with images as input and output
_CONVERTED = names("Conv MaxPool AveragePool GlobalMaxPool GlobalAveragePool BatchNormalization")
_SAME_RANK = names("Relu LeakyRelu PRelu Clip Sigmoid Mul Add Concat Resize Slice Identity Dropout")
# Allowed only after the last convolution
_HEAD = names("Flatten Reshape Squeeze ReduceMean Gemm MatMul Softmax")
_OPERATORS = _CONVERTED | _SAME_RANK | _HEAD | names("Shape Gather Unsqueeze Constant")  # of a model that gains
_FLOAT = 1  # TensorProto.DataType
_RANK_OF_IMAGES = 4
_CHANNELS_OF_A_PICTURE = 3
_MOST_PARTS = 10_000  # nodes and initializers, which take a tenth of a second


def _layout_is_open(requested: ProviderList, options: Any, capability: tuple[int, int] | None) -> bool:
    """Return True on the GPUs that were measured, unless the caller chose how convolutions are computed."""
    if capability != _CAPABILITY or not _UNRELATED.issuperset(requested.options_of(CUDA)):
        return False
    if options is None:
        return True
    if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL:
        return False
    if any(config_entry(options, key) not in (None, "", "0") for key in _CONTRARY_ENTRIES):
        return False
    return not options.optimized_model_filepath  # it would hold operators that only sessions with this layout have


def gains_channels_last(outline: GraphOutline) -> bool:
    """Return True if a model gains by channels-last images.

    This takes a few milliseconds for a network whose session takes a hundred to open.
    """
    graph = outline.graph
    versions = [version for domain, version in outline.opsets if domain in STANDARD]
    if outline.functions or len(versions) != 1 or versions[0] not in _OPERATOR_SETS:  # functions can be named Conv
        return False
    if graph.size > _MOST_PARTS or outline.count(b"Conv") < _FEWEST_CONVOLUTIONS:
        return False
    if any(value.data_type != _FLOAT or value.shape is None for value in graph.inputs):
        return False
    if not all(node.operator in _OPERATORS and node.domain in STANDARD for node in graph.nodes):
        return False
    return _nodes_gain(graph)


def _nodes_gain(graph: Graph) -> bool:
    """Return True if there are enough convolutions, and ONNX Runtime can convert all of them.

    It must know the rank of their inputs. It does not know the rank after operators of the head, or after Unsqueeze
    with computed axes. Nodes are read in the order of the file, and a tensor used before its node is unknown.
    """
    inputs = {value.name: value.shape or () for value in graph.inputs}
    constants = {tensor.name: tensor for tensor in graph.initializers if tensor.name not in inputs}
    fixed = {b"", *constants}  # b"": an input that is left out
    known = {*fixed, *inputs}
    images = {name for name, shape in inputs.items() if len(shape) == _RANK_OF_IMAGES}
    convolutions, is_head = 0, False
    for node in graph.nodes:
        if node.operator == b"Resize" and node.attribute(b"mode").text not in (b"", b"nearest"):
            return False  # not measured
        if node.operator in _CONVERTED and not _is_padded_alike(node):
            return False
        is_known = known.issuperset(node.inputs)
        if node.operator in _HEAD:
            is_head, is_known = True, False
        elif node.operator == b"Conv":
            if is_head or not is_known or not _convolution_gains(node, constants.get(node.inputs[1])):
                return False
            convolutions += 1
        elif node.operator in _CONVERTED and (not is_known or node.inputs[0] not in images):
            return False
        elif node.operator == b"Unsqueeze":
            is_known = is_known and fixed.issuperset(node.inputs[1:])
        elif node.operator == b"Constant":
            fixed.update(node.outputs)
        if is_known:
            known.update(node.outputs)
            if node.operator in _CONVERTED or (node.operator in _SAME_RANK and not images.isdisjoint(node.inputs)):
                images.update(node.outputs)
    return convolutions >= _FEWEST_CONVOLUTIONS


def _convolution_gains(node: Node, weights: Tensor | None) -> bool:
    """Return True for a convolution of images with constant weights and channels like those measured.

    It is neither depthwise nor nearly so, and its numbers of channels are even; three input channels are allowed too.
    """
    if weights is None or weights.data_type != _FLOAT or len(weights.shape) != _RANK_OF_IMAGES:
        return False
    outputs, inputs = weights.shape[:2]  # the input channels of a group
    if outputs % 2 != 0 or (inputs % 2 != 0 and inputs != _CHANNELS_OF_A_PICTURE):
        return False
    return node.attribute(b"group").integer in (0, 1) or inputs >= _FEWEST_CHANNELS


def _is_padded_alike(node: Node) -> bool:
    """Return True if the padding is symmetric. Otherwise cuDNN's plans fail during a run (issue 26274)."""
    pads = node.attribute(b"pads").integers
    half = len(pads) // 2
    return pads[:half] == pads[half:] and node.attribute(b"auto_pad").text in (b"", b"NOTSET", b"VALID")
