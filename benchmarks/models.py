"""The models that benchmarks and GPU tests run, made on demand and kept.

    python -m benchmarks.models [--folder FOLDER] [--by-hand] NAME...

Run as a program, in a process of its own: exporters import half of PyTorch and warn a great deal.
Weights are random with a fixed seed; what is measured and compared does not depend on training.
The folder is $ORTGPU_TEST_MODELS, else one in the temporary folder. Next to each model stands how it was made.
"""

from __future__ import annotations

import argparse
import functools
import getpass
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.children import report

OPSET = 17  # the newest that every supported ONNX Runtime runs on CUDA in full
SEED = 20
VISION = (
    "resnext50_32x4d", "vgg11", "regnet_y_400mf", "densenet121", "googlenet", "inception_v3", "squeezenet1_1",
    "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "shufflenet_v2_x1_0", "vit_b_16", "swin_t",
)  # fmt: skip
RECIPE_VERSION = 1  # raise it when a recipe changes, so that kept models are made again


def folder() -> Path:
    """Return the folder in which models are kept."""
    given = os.environ.get("ORTGPU_TEST_MODELS")
    return Path(given) if given else Path(tempfile.gettempdir(), f"ortgpu-models-{getpass.getuser()}")


def path_of(name: str, where: Path | None = None) -> Path:
    return (where or folder()) / f"{name}-v{RECIPE_VERSION}.onnx"


# Small models, from onnx.helper


def _save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any]) -> None:
    import onnx
    from onnx import helper, numpy_helper

    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def make_mlp(path: Path) -> str:
    """Return two small matrix products, which are nothing but overhead and need no cuDNN."""
    import numpy as np
    from onnx import TensorProto, helper

    random = np.random.default_rng(SEED)
    weights = {
        "w1": random.standard_normal((16, 32), dtype=np.float32),
        "b1": random.standard_normal(32, dtype=np.float32),
        "w2": random.standard_normal((32, 8), dtype=np.float32),
        "b2": random.standard_normal(8, dtype=np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["m1"], "first"),
        helper.make_node("Add", ["m1", "b1"], ["a1"], "first_bias"),
        helper.make_node("Relu", ["a1"], ["r1"], "relu"),
        helper.make_node("MatMul", ["r1", "w2"], ["m2"], "second"),
        helper.make_node("Add", ["m2", "b2"], ["y"], "second_bias"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])
    _save(path, nodes, [x], [y], weights)
    return "onnx.helper"


def make_negate(path: Path) -> str:
    """Return one operator that computes almost nothing, so a run is its copies. ``batch`` is the number of floats."""
    return _make_of_one_node(path, "Neg", "batch")


def make_sum(path: Path) -> str:
    """Return ``negate`` with one element out, so a run is its copy in."""
    return _make_of_one_node(path, "ReduceSum", 1)


def _make_of_one_node(path: Path, operator: str, out: int | str) -> str:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [n]) for name, n in (("x", "batch"), ("y", out)))
    _save(path, [helper.make_node(operator, ["x"], ["y"])], [x], [y], {})
    return "onnx.helper"


def make_conv(path: Path) -> str:
    """Return one convolution, the smallest model that needs cuDNN."""
    import numpy as np
    from onnx import TensorProto, helper

    random = np.random.default_rng(SEED)
    weights = {
        "w": random.standard_normal((4, 3, 3, 3), dtype=np.float32),
        "b": random.standard_normal(4, dtype=np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4, 8, 8])
    _save(path, nodes, [x], [y], weights)
    return "onnx.helper"


def make_resnet50_by_hand(path: Path) -> str:
    """Return ResNet-50's graph with its normalisation folded into the convolutions, for machines without PyTorch."""
    import numpy as np
    from onnx import TensorProto, helper

    random = np.random.default_rng(SEED)
    nodes: list[Any] = []
    weights: dict[str, Any] = {}

    def conv(source: str, inside: int, outside: int, kernel: int, stride: int, gain: float = 1.0) -> str:
        name = f"conv{len(nodes)}"
        scale = np.float32(gain * (2.0 / (inside * kernel * kernel)) ** 0.5)
        weights[f"{name}_w"] = random.standard_normal((outside, inside, kernel, kernel), dtype=np.float32) * scale
        weights[f"{name}_b"] = np.zeros(outside, np.float32)
        inputs = [source, f"{name}_w", f"{name}_b"]
        strides, pads = [stride] * 2, [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", inputs, [name], name, pads=pads, strides=strides))
        return name

    def relu(source: str) -> str:
        nodes.append(helper.make_node("Relu", [source], [f"{source}_relu"], f"{source}_relu"))
        return f"{source}_relu"

    current = relu(conv("x", 3, 64, 7, 2))
    pool: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes.append(helper.make_node("MaxPool", [current], ["pool"], "pool", **pool))
    current, channels = "pool", 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            shortcut = conv(current, channels, 4 * width, 1, stride) if block == 0 else current
            inner = relu(conv(current, channels, width, 1, 1))
            inner = conv(relu(conv(inner, width, width, 3, stride)), width, 4 * width, 1, 1, gain=0.3)
            total = f"sum{len(nodes)}"
            nodes.append(helper.make_node("Add", [inner, shortcut], [total], total))
            current, channels = relu(total), 4 * width
    weights["fc_w"] = random.standard_normal((2048, 1000), dtype=np.float32) / np.float32(2048**0.5)
    weights["fc_b"] = np.zeros(1000, np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [current], ["mean"], "mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], "flat"),
        helper.make_node("Gemm", ["flat", "fc_w", "fc_b"], ["y"], "fc"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 224, 224])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1000])
    _save(path, nodes, [x], [y], weights)
    return "onnx.helper, normalisation folded"


# Exported models


def _export(model: Any, sample: Any, path: Path) -> str:
    """Export with a dynamic batch axis, by PyTorch's older exporter if that works here, else by the newer one."""
    torch: Any = importlib.import_module("torch")
    names = {"input_names": ["x"], "output_names": ["y"]}
    axes = {"x": {0: "batch"}, "y": {0: "batch"}}
    shapes = ({0: torch.export.Dim("batch", min=1, max=1024)},)
    attempts: dict[str, dict[str, Any]] = {
        "dynamo=False": {"dynamo": False, "opset_version": OPSET, "dynamic_axes": axes},
        # its operators begin at 18
        "dynamo=True": {"dynamo": True, "opset_version": 18, "dynamic_shapes": shapes, "external_data": False},
    }
    failures = []
    for recipe, options in attempts.items():
        try:
            with torch.no_grad():
                torch.onnx.export(model, (sample,), str(path), **names, **options)
            _compare(model, sample, path)
        except Exception as error:  # any failure of an exporter leads to the next one; all are told if none is left
            failures.append(f"{recipe}: {type(error).__name__}: {error}")
        else:
            return f"exported with {recipe}"
    raise RuntimeError("\n".join(failures))


def _compare(model: Any, sample: Any, path: Path) -> None:
    """Check the exported file against the model, for other batch sizes too, since exporters may fix the sample's."""
    import onnxruntime

    torch: Any = importlib.import_module("torch")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        x = torch.rand(batch, *sample.shape[1:])
        with torch.no_grad():
            expected = model(x).numpy()
        (found,) = session.run(None, {"x": x.numpy()})
        if found.shape != expected.shape or abs(found - expected).max() > 1e-3 * abs(expected).max():
            raise RuntimeError(f"the exported model is wrong for a batch of {batch}")


def torch_resnet50() -> tuple[Any, Any]:
    """Return PyTorch's module and an input of it."""
    torch: Any = importlib.import_module("torch")
    torchvision: Any = importlib.import_module("torchvision")
    torch.manual_seed(SEED)
    return torchvision.models.resnet50(weights=None).eval(), torch.rand(2, 3, 224, 224)


def make_resnet50(path: Path) -> str:
    """Return torchvision's ResNet-50, or the same graph by hand without torchvision or a working exporter."""
    try:
        return f"torchvision, {_export(*torch_resnet50(), path)}"
    except Exception as error:  # a model by hand is better than none, and the recipe says which it is
        print(f"resnet50: not exported ({type(error).__name__}: {error})", file=sys.stderr)
        return make_resnet50_by_hand(path)


def torch_encoder() -> tuple[Any, Any]:
    """Return a transformer encoder of four layers, and an input of 64 positions of 256 features."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(SEED)
    torch.backends.mha.set_fastpath_enabled(False)  # a fused operator that no exporter knows
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, activation="gelu")
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    for weight in model.parameters():
        if weight.dim() > 1:  # the layers begin as copies of one another, and equal weights are stored once
            torch.nn.init.xavier_uniform_(weight)
    return model, torch.rand(2, 64, 256)


def make_encoder(path: Path) -> str:
    return f"torch.nn.TransformerEncoder, {_export(*torch_encoder(), path)}"


def make_vision(path: Path, name: str) -> str:
    """Return a network of torchvision by its name, with normalisation statistics that are not all alike."""
    torch: Any = importlib.import_module("torch")
    torchvision: Any = importlib.import_module("torchvision")
    torch.manual_seed(SEED)
    # Of these two, whose default is about to change, torchvision asks
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(weights=None, **options).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    size = 299 if name == "inception_v3" else 224
    return f"torchvision, {_export(model, torch.rand(2, 3, size, size), path)}"


# What was exported, to be run by PyTorch itself
TORCH: dict[str, Callable[[], tuple[Any, Any]]] = {"resnet50": torch_resnet50, "encoder": torch_encoder}

RECIPES: dict[str, Callable[[Path], str]] = {
    "mlp": make_mlp,
    "negate": make_negate,
    "sum": make_sum,
    "conv": make_conv,
    "resnet50": make_resnet50,
    "encoder": make_encoder,
    **{name: functools.partial(make_vision, name=name) for name in VISION},
}


def kept(name: str, where: Path | None = None) -> bool:
    path = path_of(name, where)
    return path.is_file() and path.with_suffix(".txt").is_file()


def recipe_of(name: str, where: Path | None = None) -> str:
    """Return how a kept model was made."""
    return path_of(name, where).with_suffix(".txt").read_text().strip()


def make(name: str, where: Path, *, by_hand: bool = False) -> tuple[Path, str]:
    """Return the model's path and how it was made. Makes it if it is not kept; no process sees half a file."""
    path = path_of(name, where)
    if kept(name, where):
        return path, recipe_of(name, where)
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        new = Path(scratch, path.name)
        build = make_resnet50_by_hand if by_hand and name == "resnet50" else RECIPES[name]
        recipe = build(new)
        path.with_suffix(".txt").write_text(recipe + "\n")
        new.replace(path)
    return path, recipe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="Make models and keep them.")
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--folder", type=Path, default=None, help="where to keep them (default: $ORTGPU_TEST_MODELS)")
    parser.add_argument("--by-hand", action="store_true", help="make resnet50 without PyTorch")
    options = parser.parse_args()
    failed = False
    for name in options.names:
        started = time.monotonic()
        try:
            path, recipe = make(name, options.folder or folder(), by_hand=options.by_hand)
        except Exception as error:  # the next model may still be made
            failed = True
            report(name, {"error": f"{type(error).__name__}: {error}"})
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            report(name, {"path": str(path), "recipe": recipe})
            print(f"{name}: {path} ({recipe}, {time.monotonic() - started:.1f} s)", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
