"""Models with ONNX Runtime's collective operators, which no published package can run: refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from onnx import TensorProto, helper

import ortgpu
from ortgpu.diagnosis.checks.classifier import explain_opening
from ortgpu.diagnosis.facts import Facts, Observed, Request
from ortgpu.environment.inspection import inspect_environment
from ortgpu.errors import CollectiveOpsUnavailableError, DeviceNotFoundError
from ortgpu.model.contents import read_collective_operators
from ortgpu.model.outline import GraphOutline
from tests.lab.fixtures import Lab

COLLECTIVE = ("AllReduce", "AllGather", "AllToAll")


def model_with(operator: str, domain: str = "com.microsoft") -> bytes:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=domain)], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)] if domain else [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def test_no_published_build_has_them() -> None:
    """What the extension itself says; the text of errors and of the documentation rests on it."""
    from onnxruntime.capi import onnxruntime_pybind11_state as extension

    assert extension.has_collective_ops() is False
    assert ortgpu.distributed.has_collective_ops() is False


@pytest.mark.parametrize("operator", COLLECTIVE)
def test_session_is_refused_whatever_else_is_wrong(operator: str) -> None:
    """On a machine without a GPU too: a driver would not mend it, and the error says so before one is installed."""
    with pytest.raises(CollectiveOpsUnavailableError, match=operator) as caught:
        ortgpu.GPUSession(model_with(operator))
    assert caught.value.fixes


def test_the_cpu_would_not_mend_it() -> None:
    with pytest.raises(CollectiveOpsUnavailableError):
        ortgpu.GPUSession(model_with("AllReduce"), allow_cpu=True)


@pytest.mark.parametrize("operator", COLLECTIVE)
def test_onnxruntime_says_it_in_the_words_that_are_known(operator: str) -> None:
    """What it raises where a GPU is there: the same text as on the CPU."""
    with pytest.raises(Exception, match="is not a registered function/op") as caught:
        onnxruntime.InferenceSession(model_with(operator), providers=["CPUExecutionProvider"])
    facts = Facts(inspect_environment(), Request(collective_operators=(operator,)), Observed(has_collective_ops=False))
    assert isinstance(explain_opening(str(caught.value), facts), CollectiveOpsUnavailableError)
    others = Facts(facts.environment)
    assert explain_opening(str(caught.value), others) is None, "an operator of somebody else stays ONNX Runtime's error"


def test_diagnosis_names_them_first(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model_with("AllReduce"))
    assert isinstance(ortgpu.diagnose(path).problems[0], CollectiveOpsUnavailableError)
    assert not ortgpu.diagnose(path).ok


def test_through_a_session_that_reaches_the_driver(lab: Lab) -> None:
    path = lab.folder / "model.onnx"
    path.write_bytes(model_with("AllReduce"))
    outcome = lab.machine().open_session(path)
    assert outcome.error is not None
    assert outcome.error.type == "CollectiveOpsUnavailableError"
    assert "DriverNotFoundError" in outcome.error.other_types


@pytest.mark.parametrize(
    ("operator", "domain", "expected"),
    [
        ("AllReduce", "com.microsoft", ("AllReduce",)),
        ("DistributedMatMul", "com.microsoft", ("DistributedMatMul",)),
        ("AllReduce", "my.own", ()),
        ("Relu", "", ()),
    ],
)
def test_operators_of_a_model(tmp_path: Path, operator: str, domain: str, expected: tuple[str, ...]) -> None:
    model = model_with(operator, domain)
    assert read_collective_operators(GraphOutline(model)) == expected
    path = tmp_path / "model.onnx"
    path.write_bytes(model)
    assert read_collective_operators(GraphOutline(path)) == expected


@pytest.mark.parametrize("content", [b"", b"AllReduce", b"\xff" * 100])
def test_what_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert read_collective_operators(GraphOutline(path)) == ()
    assert read_collective_operators(GraphOutline(content)) == ()
    assert read_collective_operators(GraphOutline(tmp_path / "nothing")) == ()


def test_models_are_read_only_where_a_session_fails(monkeypatch: pytest.MonkeyPatch, lab: Lab) -> None:
    """A session that is asked for wrongly fails before, and does not pay for it either."""
    read: list[Any] = []
    monkeypatch.setattr("ortgpu.session.undiagnosed.read_collective_operators", read.append)
    with pytest.raises(DeviceNotFoundError):
        ortgpu.GPUSession(lab.models.relu, device="nowhere")
    assert read == []
