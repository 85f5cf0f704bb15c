from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper, parser

LAYERS = (256, 512, 512, 16)  # features in, hidden, hidden, out


def example_model() -> bytes:
    """Return a small network with fixed weights."""
    text = f"""
        <ir_version: 8, opset_import: ["": 17]>
        ortgpu_example (float[batch, {LAYERS[0]}] input) => (float[batch, {LAYERS[-1]}] output)
        {{
            [gemm_0] layer_0 = Gemm (input, weight_0, bias_0)
            [relu_0] active_0 = Relu (layer_0)
            [gemm_1] layer_1 = Gemm (active_0, weight_1, bias_1)
            [relu_1] active_1 = Relu (layer_1)
            [gemm_2] output = Gemm (active_1, weight_2, bias_2)
        }}
    """
    model = parser.parse_model(text)
    random = np.random.default_rng(0)
    for number, (wide, out) in enumerate(pairwise(LAYERS)):
        scale = (2 / wide) ** 0.5  # keeps values near one, so that a comparison is meaningful
        weight = (random.standard_normal((wide, out)) * scale).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"weight_{number}"))
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(out, np.float32), f"bias_{number}"))
    return bytes(model.SerializeToString())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(example_model())
    return path
