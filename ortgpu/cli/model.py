"""The model that ``demo`` and ``check`` use when the user names none."""

from __future__ import annotations

from itertools import pairwise

from ortgpu.diagnosis.checks.model import onnx_broken
from ortgpu.diagnosis.failure import why_no_module
from ortgpu.environment.inspection import inspect_environment
from ortgpu.provider.runtime import load_runtime

LAYERS = (256, 512, 512, 16)  # features in, hidden, hidden, out
BATCH = 32


def example_model() -> bytes:
    """Return a small network with fixed weights that every supported ONNX Runtime reads.

    Its opset 17 and IR version 8 are old enough for ONNX Runtime 1.18.

    Raises:
        BrokenPackageError: NumPy or onnx cannot be imported.
    """
    try:
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper
    except Exception as error:
        runtime = load_runtime()
        if runtime.module is None:  # ONNX Runtime needs NumPy too
            raise why_no_module(runtime) from error
        said = f"{type(error).__name__}: {error}"
        raise onnx_broken(inspect_environment(), "the example model cannot be made", said) from error

    random = np.random.default_rng(0)
    nodes, weights = [], []
    value = "input"
    for number, (wide, out) in enumerate(pairwise(LAYERS)):
        last = number == len(LAYERS) - 2
        scale = (2 / wide) ** 0.5  # keeps values near one, so that a comparison is meaningful
        weight = (random.standard_normal((wide, out)) * scale).astype(np.float32)
        weights += [
            numpy_helper.from_array(weight, f"weight_{number}"),
            numpy_helper.from_array(np.zeros(out, np.float32), f"bias_{number}"),
        ]
        name = "output" if last else f"layer_{number}"
        nodes.append(helper.make_node("Gemm", [value, f"weight_{number}", f"bias_{number}"], [name], f"gemm_{number}"))
        if not last:
            nodes.append(helper.make_node("Relu", [name], [f"active_{number}"], f"relu_{number}"))
            value = f"active_{number}"
    graph = helper.make_graph(
        nodes,
        "ortgpu_example",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", LAYERS[0]])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", LAYERS[-1]])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())
