"""Models with branches: what the branches share, and what each has a copy of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from ortgpu.model.branches import STATEFUL, NotBranchableError, build_branches, read_model

CHANNELS_LAST = "com.ms.internal.nhwc"
WEIGHTS = np.random.default_rng(0).standard_normal((64, 16, 3, 3)).astype(np.float32)
BIASES = np.arange(64, dtype=np.float32)


def node(operator: str = "Conv", *inputs: str, domain: str = CHANNELS_LAST, output: str = "y") -> Any:
    return helper.make_node(
        operator, ["x", *(inputs or ("w", "b"))], [output], output, domain=domain, kernel_shape=[3, 3]
    )


def model(*nodes: Any, inputs: tuple[str, ...] = ("x",), **weights: Any) -> ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*inputs, "y")]
    arrays = weights or {"w": WEIGHTS, "b": BIASES}
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(list(nodes), "g", values[:-1], values[-1:], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CHANNELS_LAST, 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def branches_of(graph: GraphProto) -> list[GraphProto]:
    """Return the graphs at the ends of the tree."""
    inner = [attribute.g for node in graph.node if node.op_type == "If" for attribute in node.attribute]
    return [end for each in inner for end in branches_of(each)] if inner else [graph]


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    "nodes",
    [
        [node()],
        [node("Conv", "w")],
        [node("ConvTranspose")],
        [node("FusedConv")],
        [node(output="c"), node(), helper.make_node("Add", ["c", "y"], ["z"])],
    ],
    ids=["biases", "no biases", "transposed", "fused", "shared weights"],
)
def test_weights_of_channels_last_convolutions_are_in_each_branch(
    tmp_path: Path, nodes: list[Any], in_file: bool
) -> None:
    """ONNX Runtime did not find them further out, found the biases, and computed with weights of another order."""
    path = tmp_path / "model.onnx"
    onnx.save(model(*nodes), path, save_as_external_data=in_file, location="weights", size_threshold=0)
    new, selectors, copied = build_branches(read_model(str(path)), 4)
    ends = branches_of(new.graph)
    assert (len(ends), len(selectors)) == (4, 2)
    used = {name for each in nodes for name in each.input[1:] if each.domain == CHANNELS_LAST}
    assert not used & {tensor.name for tensor in new.graph.initializer}
    for end in ends:
        constants = {tensor.name: numpy_helper.to_array(tensor, str(tmp_path)) for tensor in end.initializer}
        for each in end.node:
            if each.domain == CHANNELS_LAST:
                for name, array in zip(each.input[1:], (WEIGHTS, BIASES), strict=False):
                    assert np.array_equal(constants[name], array)
    assert WEIGHTS.nbytes <= copied < WEIGHTS.nbytes + 2 * BIASES.nbytes


def test_channels_first_weights_are_shared() -> None:
    new, _, copied = build_branches(model(node(domain="")), 2)
    assert [tensor.name for tensor in new.graph.initializer] == ["w", "b"]
    assert np.array_equal(numpy_helper.to_array(new.graph.initializer[0]), WEIGHTS)
    assert copied == 0


def test_what_a_run_may_replace_is_shared() -> None:
    """Constants it is not, so it is transposed nowhere."""
    new, _, _ = build_branches(model(node(), inputs=("x", "w")), 2, ("w",))
    assert [tensor.name for tensor in new.graph.initializer] == ["w"]


def test_weights_of_the_convolutions_of_a_subgraph_are_in_each_branch() -> None:
    inner = helper.make_graph([node()], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    outer = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    new, _, _ = build_branches(model(outer, inputs=("x", "c")), 2)
    assert not new.graph.initializer


def test_operators_that_are_random_are_in_no_branch() -> None:
    """Each copy of such a node would go on with a state of its own. ONNX gives all of them a seed."""
    schemas = onnx.defs.get_all_schemas_with_history()
    assert {schema.name for schema in schemas if "seed" in schema.attributes} == STATEFUL
    for operator in STATEFUL:
        random = helper.make_node(operator, ["x"], ["y"])
        with pytest.raises(NotBranchableError, match=f"its {operator} nodes keep a state between runs"):
            build_branches(model(random), 2)
