"""What is asked of ONNX Runtime for CUDA graphs, and which models and sessions are refused. See graph_sessions.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.running import graph_requests
from tests.lab.installed import PLACES, older_than
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child
from tests.support.graph_sessions import with_graphs
from tests.support.made_sessions import L4, made_session

CONTROL_FLOW = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as requested by the user as the "
    "model has control flow nodes which can't be supported by CUDAExecutionProvider"
)
PARTITIONED = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the {} feature as requested by the user  as all compute "
    "graph nodes have not been partitioned to the CUDAExecutionProvider"
)


def test_why_a_model_is_refused() -> None:
    found = child(f"""
        from ortgpu.model.outline import GraphOutline
        from ortgpu.running.graph_requests import is_refusal, why_not_captured
        texts = [{CONTROL_FLOW!r}, {PARTITIONED.format("graph capture")!r}, {PARTITIONED.format("CUDA Graph")!r}]
        branch = model('''branch (bool c, float[n] x) => (float[n] y) {{
            y = If(c) <then_branch = then () => (float[n] z) {{ z = Neg(x) }},
                       else_branch = other () => (float[n] z) {{ z = Abs(x) }}>
        }}''')
        placement = GPUSession(branch).placement
        errors = [why_not_captured(RuntimeError(text), placement, GraphOutline(branch)) for text in texts]
        described = [[type(e).__name__, e.summary, list(map(str, e.details().get("nodes", ())))] for e in errors]
        report([[is_refusal(RuntimeError(text)) for text in (*texts, "no such file")], described])
    """)
    assert found[0] == [True, True, True, False]
    (kind, summary, _), (second, _, nodes), (third, _, _) = found[1]
    assert (kind, second, third) == ("ProviderRequestError", "PlacementError", "PlacementError")
    assert summary == "this model cannot be captured as a CUDA graph: it has control flow, If"
    assert any(node.startswith(("Neg", "Abs", "If")) for node in nodes) == (older_than(PLACES) is None)


def test_what_cannot_be_captured_is_refused_when_the_session_is_made(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        "running.graph_requests.what_cannot_be_captured_is_refused_when_the_session_is_made",
    )
    *refused, made = found
    assert [each["type"] for each in refused] == ["ProviderRequestError"] * 8
    reasons = (
        "CUDA runtime",
        "no stream",
        "'x' is a tensor(string)",
        "'y' is a seq(tensor(float))",
        "input 'x' is read on the CPU",
        "output shapes depend on data: of NonZero",
        "its output 'x' is its input",
        "all its outputs are computed on the CPU",
    )
    for error, reason in zip(refused, reasons, strict=True):
        assert reason in error["text"]
    assert made == "CapturedRunner"


def test_a_model_of_unknown_operators_is_refused(stubs: Stubs, tmp_path: Path) -> None:
    """In ONNX Runtime's own format: this one would give wrong results."""
    found = with_graphs(
        stubs,
        "running.graph_requests.a_model_of_unknown_operators_is_refused",
        str(tmp_path),
    )
    assert found["type"] == "ProviderRequestError"
    assert "its operators are not known" in found["text"]


def test_on_the_cpu_that_was_allowed_nothing_is_captured() -> None:
    found = child("""
        report(outcome(lambda: GPUSession(NEG, cuda_graph=True).device.kind))
    """)
    assert found == {"returned": "cpu"}


def test_a_session_is_given_a_stream_if_one_can_be_made(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        "running.graph_requests.a_session_is_given_a_stream_if_one_can_be_made",
    )
    assert found == [True, [1, 1], 1, 0, None]


def value(name: str, kind: str = "tensor(float)") -> Any:
    return SimpleNamespace(name=name, type=kind)


def captured_on_gpu(operators: tuple[str, ...] = ("Conv",), **changes: Any) -> Any:
    """A session on the second GPU, as ONNX Runtime would report it."""
    on_gpu, on_cpu = SimpleNamespace(name="Cuda"), SimpleNamespace(name="Cpu")
    inner: dict[str, Any] = {
        "inputs_meta": [value("x")], "input_meminfos": [on_gpu],
        "outputs_meta": [value("y"), value("z")], "output_meminfos": [on_cpu, on_gpu],
    }  # fmt: skip
    session = made_session(device=L4)
    nodes = tuple(PlacedNode(name, name, "", "CUDAExecutionProvider", "compute") for name in operators)
    session._verified = replace(session._verified, placement=Placement(nodes))
    session._sess = SimpleNamespace(**{**inner, **{name: change(inner, on_cpu) for name, change in changes.items()}})
    return session


# Operators with a kernel for CUDA, and a shape of their output that depends on the values of their input
COUNTING = ("Compress", "NonMaxSuppression", "NonZero", "Unique")

OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "an input on the CPU": ({"input_meminfos": lambda inner, cpu: [cpu]}, "its input 'x' is read on the CPU"),
    "an output that is an input": (
        {"outputs_meta": lambda inner, cpu: [value("y"), value("x")]},
        "its output 'x' is its input",
    ),
    "an input of text": ({"inputs_meta": lambda inner, cpu: [value("x", "tensor(string)")]}, "'x' is a tensor(string)"),
    "outputs on the CPU": ({"output_meminfos": lambda inner, cpu: [cpu, cpu]}, "all its outputs are computed on the"),
    **{
        operator: ({"operators": ("Conv", operator)}, f"output shapes depend on data: of {operator}")
        for operator in COUNTING
    },
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_keeps_a_session_from_being_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_requests, "runtime_of", lambda device: object())
    assert graph_requests.obstacle(captured_on_gpu()) is None
    changes, says = OBSTACLES[name]
    assert str(graph_requests.obstacle(captured_on_gpu(**changes))).startswith(says)


def test_without_the_runtime_of_cuda_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_requests, "runtime_of", lambda device: None)
    assert "CUDA runtime is not among" in str(graph_requests.obstacle(captured_on_gpu()))
