"""The model of a command: one that the user names, or the built-in one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click

from ortgpu.errors import GPUError

LAYERS = (256, 512, 512, 16)  # features in, hidden, hidden, out
BATCH = 32

inputs_option = click.option(
    "--inputs",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run on these inputs, of a file that numpy.savez wrote, by their names (.npz).",
)


def example_model() -> bytes:
    """Return a small network with fixed weights, old enough for every supported ONNX Runtime."""
    try:
        import numpy as np
        from onnx import numpy_helper, parser
    except Exception as error:
        from ortgpu.diagnosis.checks.model import onnx_broken
        from ortgpu.diagnosis.failure import why_no_module
        from ortgpu.environment.inspection import inspect_environment
        from ortgpu.provider.runtime import load_runtime

        runtime = load_runtime()
        if runtime.module is None:  # ONNX Runtime needs NumPy too
            raise why_no_module(runtime) from error
        said = f"{type(error).__name__}: {error}"
        raise onnx_broken(inspect_environment(), "the example model cannot be made", said) from error

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


def known_of(model: Path | None, problem: Exception) -> tuple[GPUError, ...]:
    """Return what our own reader finds wrong with a model that ONNX Runtime refused."""
    if model is None or isinstance(problem, GPUError):
        return ()
    from ortgpu.diagnosis.checks.model import judge_file
    from ortgpu.model.contents import read_model

    return judge_file(read_model(model))
