"""Programs of ``tests/running/test_memory.py``."""

from __future__ import annotations

import os

import numpy as np

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, outcome, report


def weights_are_those_of_the_file_until_it_changes() -> None:
    import tempfile

    import onnx
    from onnx import helper, numpy_helper

    here = tempfile.TemporaryDirectory()
    os.chdir(here.name)

    def saved(rows, path):
        w = numpy_helper.from_array(np.ones((rows, 4), np.float16), "w")
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 10, ["n", rows])],
            [helper.make_tensor_value_info("y", 10, ["n", 4])],
            [w],
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)

    saved(500, "a.onnx")
    first = GPUSession("a.onnx")
    sizes = [first.memory.weights]
    second = GPUSession("a.onnx")
    saved(900, "b.onnx")
    os.replace("b.onnx", "a.onnx")
    sizes += [first.memory.weights, second.memory.weights, GPUSession("a.onnx").memory.weights]
    sizes.append(GPUSession(open("a.onnx", "rb").read()).memory.weights)
    report(sizes)


def a_closed_session_has_no_memory_to_tell_of() -> None:
    session = GPUSession(NEG)
    session.close()
    report([outcome(lambda: session.memory), outcome(session.trim)])


def a_subclass_may_have_a_memory_of_its_own() -> None:
    class Named(GPUSession):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.memory = "of names"

    report(Named(NEG).memory)
