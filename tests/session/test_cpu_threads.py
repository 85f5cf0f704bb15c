"""Sessions with few threads for the CPU: which get them, and that no node that computes there is left with so few.

On the real provider, over libraries of CUDA that compute nothing; the number of processors is pretended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.provider.placement import UNKNOWN
from ortgpu.provider.runtime import load_runtime
from ortgpu.provider.settings import FEW_THREADS, THREADS
from ortgpu.session.chosen import ON_FEW_THREADS, ON_GPU, unfit
from tests.lab.fixtures import Lab
from tests.session.test_cudnn_handles import chain
from tests.support.cudnn_operators import CASES, model_of

pytestmark = pytest.mark.skipif(load_runtime().release < (1, 31), reason="measured with ONNX Runtime 1.31")

IMAGE: list[str | int | None] = ["batch", 4, 8, 8]
SCALES = np.array([1, 1, 2, 2], np.float32)
PER_CHANNEL = [np.ones(4, np.float32)] * 4

# Operator: what it takes beside a float32 image, and its attributes
OTHERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Conv": ([np.ones((4, 4, 3, 3), np.float32)], {}),
    "MaxPool": ([], {"kernel_shape": [2, 2]}),
    "AveragePool": ([], {"kernel_shape": [2, 2]}),
    "GlobalMaxPool": ([], {}),
    "GlobalAveragePool": ([], {}),
    "BatchNormalization": (PER_CHANNEL, {}),
    "Resize": ([None, SCALES], {"mode": "nearest"}),
    "Dropout": ([], {}),
    "ReduceMean": ([np.array([2, 3])], {}),
    "ReduceSum": ([np.array([2, 3])], {}),
    "Softmax": ([], {}),
    "LogSoftmax": ([], {}),
    "LayerNormalization": ([np.ones(8, np.float32)], {"axis": -1}),
    "Pow": ([np.array(2, np.float32)], {}),
}


def other_model(operator: str) -> bytes:
    constants, attributes = OTHERS[operator]
    weights = {f"c{number}": array for number, array in enumerate(constants) if array is not None}
    names = ["x", *(f"c{number}" if array is not None else "" for number, array in enumerate(constants))]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x0"], ["x"]), helper.make_node(operator, names, ["y"], **attributes)],
        operator,
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, IMAGE)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(made.SerializeToString())


PLACE = "session.cpu_threads.place"


def test_few_threads_of_a_record_stay_wherever_the_nodes_are() -> None:
    """A session opened with them, and once more without, each time."""
    assert unfit(ON_FEW_THREADS, UNKNOWN) == {THREADS}
    assert not unfit({THREADS: ("4", "threads few: speed-up 1.11, from r.json")}, UNKNOWN)


def test_each_operator_is_on_the_gpu(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    assert {name.decode() for name in ON_GPU} == set(CASES) | set(OTHERS)
    for operator in CASES:
        (folder / f"{operator}.onnx").write_bytes(model_of(operator)[0])
    for operator in OTHERS:
        (folder / f"{operator}.onnx").write_bytes(other_model(operator))
    machine = lab.machine_that_places(provider_library)
    assert machine.run_program(PLACE, str(folder), timeout=100).ok().json == []


def opened(
    lab: Lab, provider_library: str, model: bytes, processors: int = 64, arguments: str = "cpu_nodes='allow'"
) -> Any:
    path = lab.folder / "model.onnx"
    path.write_bytes(model)
    machine = lab.machine_that_places(provider_library)
    done = machine.run_program("session.cpu_threads.opened", str(path), str(processors), arguments).ok()
    # ONNX Runtime warns of an entry that is set for the second time: only those of a caller are.
    assert "overwritten" not in done.stderr or "options" in arguments
    return done.json


def test_a_session_has_few_and_says_so(lab: Lab, provider_library: str) -> None:
    found = opened(lab, provider_library, chain("Relu", "Tanh"))
    assert found["constructed"] == [FEW_THREADS]
    assert found["started"] == FEW_THREADS - 1  # who calls run is the other one
    assert found["says"] == FEW_THREADS
    assert found["chosen"][0] == str(FEW_THREADS)


@pytest.mark.parametrize(
    ("processors", "arguments"),
    [
        pytest.param(2 * FEW_THREADS, "", id="few processors"),
        pytest.param(64, "options", id="options of the caller"),
        pytest.param(64, "disabled_optimizers=['ConstantFolding']", id="another graph"),
    ],
)
def test_others_are_left_as_they_are(lab: Lab, provider_library: str, processors: int, arguments: str) -> None:
    found = opened(lab, provider_library, chain("Relu", "Tanh"), processors, arguments)
    assert found["constructed"] == [0]
    assert found["says"] == 0
    assert found["chosen"] is None


def test_a_model_that_may_compute_on_the_cpu_is_opened_once(lab: Lab, provider_library: str) -> None:
    found = opened(lab, provider_library, chain("Relu", "Hardmax"))
    assert found["constructed"] == [0]
    assert found["chosen"] is None


def test_a_node_that_computes_on_the_cpu_has_all_the_threads(lab: Lab, provider_library: str) -> None:
    """Equal has no kernel for this type. What else was chosen stays."""
    model = onnx.load_from_string(model_of("Equal")[0])
    for each in model.graph.input:
        each.type.tensor_type.elem_type = TensorProto.UINT16
    found = opened(lab, provider_library, model.SerializeToString())
    assert found["computing"] == ["Equal"]
    assert found["constructed"] == [FEW_THREADS, 0]
    assert found["alive"] == [0, 0]  # the GPU need not have room for two
    assert found["says"] == 0
    assert found["chosen"] is None
    assert found["cudnn"][0] == "0"
