"""What is asked of ONNX Runtime for CUDA graphs, and which models and sessions are refused. See graph_sessions.py."""

from __future__ import annotations

from pathlib import Path

from tests.lab.installed import PLACES, older_than
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child
from tests.support.graph_sessions import with_graphs

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
