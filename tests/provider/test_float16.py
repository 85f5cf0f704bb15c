"""The conversion of a model to float16 in a child process."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

from ortgpu.environment.child_process import ChildProcess
from ortgpu.provider.float16 import halve
from tests.programs.child_functions import note_loads_of_the_runtime, noted

MODEL = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }'


def test_the_libraries_that_onnxruntime_needs_are_loaded_before_it() -> None:
    """Where the dynamic linker finds none of them, ``import onnxruntime`` would fail in the child."""
    with ChildProcess() as child:
        child.ask(note_loads_of_the_runtime, timeout=60)
        half = child.ask(halve, onnx.parser.parse_model(MODEL).SerializeToString(), timeout=60)
        assert child.ask(noted, timeout=60) == ["before onnxruntime"]
    graph = onnx.load_model_from_string(half).graph
    assert [onnx.numpy_helper.to_array(each).dtype for each in graph.initializer] == [np.float16]
    assert [each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)] == [onnx.TensorProto.FLOAT] * 2
