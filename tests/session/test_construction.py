"""A session is opened with what suits its model: what a caller, a signal's handler and a log notice of it.

And a file that a writer changes meanwhile ends no process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.provider.runtime import load_runtime
from tests.lab.fixtures import Lab
from tests.support.cpu_session import child
from tests.support.networks import CHANNELS, Network

since_131 = pytest.mark.skipif(load_runtime().release < (1, 31), reason="options are chosen since ONNX Runtime 1.31")


def matrix_model(side: int, operator: str = "MatMul") -> Any:
    """A product of the input with a matrix; a session on CUDA needs no cuDNN for it, which is an option to choose."""
    matrix = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "m"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", side])],
        [numpy_helper.from_array(matrix, "m")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a-model-of-this-test.onnx"
    onnx.save(matrix_model(4), path)
    return path


@since_131
@pytest.mark.parametrize("kind", ["Exception", "OSError"])
def test_what_a_handler_of_a_signal_raises_is_not_lost(path: Path, kind: str) -> None:
    """The time limit of a job: without it the model would be opened again, without one."""
    found = child("session.construction.what_a_handler_of_a_signal_raises_is_not_lost", str(path), kind)
    assert found == {"type": "TimeLimit", "text": "of the job"}


@since_131
def test_a_log_that_keeps_its_records_keeps_nothing_of_a_session(tmp_path: Path) -> None:
    """As those of test runners and error trackers do."""
    path = tmp_path / "a-wrong-model-of-this-test.onnx"
    onnx.save(matrix_model(4), path)
    found = child("session.construction.a_log_that_keeps_its_records_keeps_nothing_of_a_session", str(path))
    assert found == [None, True, False]


@since_131
@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_chosen_for_a_file_is_not_for_the_one_that_replaces_it(tmp_path: Path, replaced: bool) -> None:
    """A layout that suits the old model can make wrong results of the new one, whose weights are computed."""
    path, new, record = tmp_path / "model.onnx", tmp_path / "new.onnx", tmp_path / "record.json"
    network = Network(0)
    network.conv()
    path.write_bytes(network.model())
    network.add("Conv", "x", network.add("Mul", network.weights(CHANNELS, CHANNELS, 1, 1), network.number(2)))
    new.write_bytes(network.model())
    found = child(
        "session.construction.what_is_chosen_for_a_file_is_not_for_the_one_that_replaces_it",
        str(path),
        str(new),
        str(record),
        "replaced" * replaced,
    )
    assert found == [not replaced, not replaced]


CAPTURING = "session.construction.capturing"


@pytest.mark.parametrize("is_asked", [True, False], ids=["cuda_graph", "by the record alone"])
def test_a_session_that_does_not_open_as_chosen_has_no_stream_of_before(
    path: Path, tmp_path: Path, is_asked: bool
) -> None:
    """The handle of a stream that is gone would be given to ONNX Runtime; or one that nothing uses would be kept."""
    calls, has_stream = child(CAPTURING, str(path), str(tmp_path / "record.json"), str(is_asked).lower())
    assert calls == [[True, True], [is_asked, True]]
    assert has_stream is is_asked


OPEN_AND_REWRITE = "session.construction_on_gpus.open_and_rewrite"


@pytest.mark.parametrize("openings", [30, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_sessions_open_while_the_file_is_written(
    lab: Lab, provider_library: str, tmp_path: Path, openings: int
) -> None:
    """What a session raises is ONNX Runtime's, and nothing ends the process."""
    for name in ("model.onnx", "model.onnx.new"):
        onnx.save(matrix_model(4096), tmp_path / name)
    machine = lab.machine_that_places(provider_library)
    arguments = [str(tmp_path / "model.onnx"), str(openings)]
    opened, raised = machine.run_program(OPEN_AND_REWRITE, *arguments, timeout=1700).ok().json
    assert opened + sum(raised.values()) == openings
    assert raised.keys() <= {"InvalidProtobuf", "InvalidGraph", "Fail", "InvalidArgument"}, raised


MAPPINGS = "session.construction_on_gpus.mappings"


def test_no_file_is_mapped(lab: Lab, provider_library: str, path: Path) -> None:
    """Nor are libraries, to be looked at: a writer that cuts one short would end the process as well."""
    machine = lab.machine_that_places(provider_library)
    assert machine.run_program(MAPPINGS, str(path)).ok().json == []
