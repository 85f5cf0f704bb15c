"""For which models a session does without a handle of cuDNN; that they compute the same is for a GPU to show."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.model.outline import UNREADABLE, GraphOutline
from ortgpu.provider.runtime import load_runtime
from ortgpu.session.chosen import NO_HANDLES, WITHOUT_CUDNN, operators_of_small
from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, Cuda
from tests.session.test_chosen_options import WATCHED
from tests.support.cudnn_operators import CASES, model_of

since_131 = pytest.mark.skipif(load_runtime().release < (1, 31), reason="measured with ONNX Runtime 1.31")

CUDA = "CUDAExecutionProvider"


def needs_no_cudnn(model: Any) -> bool:
    """Return what is said of a model by its outline; False for one that cannot be read."""
    try:
        operators = operators_of_small(GraphOutline(model))
    except UNREADABLE:
        return False
    return operators is not None and operators <= WITHOUT_CUDNN


def chain(*operators: str, functions: tuple[Any, ...] = (), domain: str = "") -> bytes:
    """Operators of one input each, one behind the other."""
    names = [f"v{number}" for number in range(len(operators) + 1)]
    nodes = [
        helper.make_node(operator, [names[number]], [names[number + 1]], domain=domain)
        for number, operator in enumerate(operators)
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info(names[0], TensorProto.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, ["rows", 4])],
    )
    domains = [helper.make_opsetid(name, 20 if not name else 1) for name in dict.fromkeys(("", domain))]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10, functions=functions)
    return bytes(model.SerializeToString())


def test_each_operator_has_a_case() -> None:
    assert {name.decode() for name in WITHOUT_CUDNN} == set(CASES)


@pytest.mark.parametrize("operator", sorted(CASES))
def test_an_operator_alone(operator: str) -> None:
    model, feed = model_of(operator)
    assert needs_no_cudnn(model)
    assert onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)


@pytest.mark.parametrize(
    "operator", ["Conv", "MaxPool", "Softmax", "LayerNormalization", "ReduceMean", "ReduceMax", "LSTM", "Einsum", "If"]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_other_operator_is_enough(operator: str, place: int) -> None:
    operators = ["Relu", "Tanh"]
    operators.insert(place, operator)
    assert needs_no_cudnn(chain("Relu", "Tanh"))
    assert not needs_no_cudnn(chain(*operators))


def test_the_name_alone_is_not_enough() -> None:
    assert needs_no_cudnn(chain("Relu", domain="ai.onnx"))
    assert not needs_no_cudnn(chain("Relu", domain="com.example"))
    body = helper.make_node("GlobalMaxPool", ["x"], ["y"])
    function = helper.make_function("", "Relu", ["x"], ["y"], [body], [helper.make_opsetid("", 20)])
    assert not needs_no_cudnn(chain("Relu", functions=(function,)))


def test_what_is_no_model_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    model = chain("Relu", "Relu")
    path = tmp_path / "model.onnx"
    path.write_bytes(model)
    assert needs_no_cudnn(str(path))
    assert needs_no_cudnn(path)
    given: tuple[Any, ...] = (b"", b"this is no model", model[:-3], tmp_path, str(tmp_path / "none"), io.BytesIO(model))
    assert [needs_no_cudnn(each) for each in given] == [False] * len(given)


def test_a_model_of_very_many_parts_is_not_read_to_its_end() -> None:
    assert needs_no_cudnn(chain(*["Relu"] * 100))
    assert not needs_no_cudnn(chain(*["Relu"] * 2000))


def test_weights_are_not_read() -> None:
    model = onnx.load_from_string(model_of("MatMul")[0])
    wide = np.zeros((70, 100_000), np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(wide, "c0"))
    assert needs_no_cudnn(model.SerializeToString())


# Sessions, with a stub of the driver: what ONNX Runtime is asked for


def asked_for(lab: Lab, model: bytes, code: str, before: str = "") -> Any:
    path = lab.folder / "model.onnx"
    path.write_bytes(model)
    machine = lab.machine(cuda=Cuda(devices=(GPU(),)))
    report = f"report([each.get('enable_cudnn') for each in {code}[0]])"
    return machine.run_program(f"{before}\n{report}", str(path), behind=WATCHED).ok().json


@since_131
def test_a_session_does_without(lab: Lab) -> None:
    assert asked_for(lab, model_of("MatMul")[0], "ask()") == [NO_HANDLES["enable_cudnn"][0]]


@since_131
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param(f"ask([({CUDA!r}, {{'enable_cudnn': 1}})])", ["1"], id="the caller chose"),
        pytest.param("ask(disabled_optimizers=['ConstantFolding'])", [None], id="the graph is another"),
    ],
)
def test_a_caller_who_chose(lab: Lab, code: str, expected: list[str | None]) -> None:
    assert asked_for(lab, model_of("MatMul")[0], code) == expected


@since_131
def test_where_placement_is_not_recorded_it_could_not_be_verified(lab: Lab) -> None:
    options = (
        "options = onnxruntime.SessionOptions()\n"
        "options.add_session_config_entry('session.record_ep_graph_assignment_info', '0')\n"
        "def ask_with(options):\n"
        "    try:\n"
        "        ortgpu.GPUSession(MODEL, options)\n"
        "    except ortgpu.GPUError:\n"
        "        pass\n"
        "    return [given]"
    )
    assert asked_for(lab, model_of("MatMul")[0], "ask_with(options)", options) == [None]


@since_131
def test_a_session_whose_nodes_became_others_is_made_again(lab: Lab) -> None:
    """As a release to come may fuse what this one does not: here ONNX Runtime says that it made a convolution."""
    fused = f"""
from types import SimpleNamespace
node = SimpleNamespace(name="n", op_type="FusedConv", domain="com.microsoft")
part = SimpleNamespace(ep_name={CUDA!r}, get_nodes=lambda: [node])
from onnxruntime.capi.onnxruntime_pybind11_state import InferenceSession as Inner
Inner.get_provider_graph_assignment_info = lambda self: [part]
"""
    assert asked_for(lab, model_of("MatMul")[0], "ask()", fused) == ["0", None]
