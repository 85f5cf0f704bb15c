"""A failure to open before its cause is known: what a diagnosis is asked, and what becomes of its answer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import onnx.parser
import pytest

from ortgpu.errors import NoDeviceError
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.preloading import MissingLibrary, PreloadReport
from ortgpu.session import undiagnosed
from ortgpu.session.undiagnosed import UndiagnosedError, diagnose, explain

CONV = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> g (float[1, 1, 3, 3] x, float[1, 1, 1, 1] w) => (float[1, 1, 3, 3] y) '
    "{ y = Conv(x, w) }"
).SerializeToString()
WHOLE = PreloadReport(None, (), (), (), False, None)


def without(soname: str) -> PreloadReport:
    return dataclasses.replace(WHOLE, missing=(MissingLibrary(soname, True, None, ()),))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the diagnosis was asked; it finds that there is no device."""
    calls: list[Any] = []

    def why_unusable(runtime: Any, *, request: Any, cuda: Any, cause: Any) -> NoDeviceError:
        calls.append(SimpleNamespace(runtime=runtime, request=request, cuda=cuda, cause=cause))
        return NoDeviceError("no GPU")

    monkeypatch.setattr(undiagnosed.diagnosing, "why_unusable", why_unusable)  # type: ignore[attr-defined]  # late
    return calls


def failed(report: PreloadReport | None, **arguments: Any) -> UndiagnosedError:
    runtime: Any = SimpleNamespace(preload=report)
    return UndiagnosedError(runtime, **arguments)


def test_nothing_is_known_by_default() -> None:
    failure = failed(None)
    facts = (failure.device, failure.cudnn_disabled, failure.cuda, failure.operators, failure.cause)
    assert facts == (None, False, None, None, None)


def test_a_failure_keeps_its_parts_once() -> None:
    """A cause that the caller takes from the attribute would stay alive in the arguments, with its traceback."""
    runtime: Any = None
    assert UndiagnosedError(runtime, None, False, None, None, RuntimeError("x")).args == ()


def test_the_diagnosis_is_told_what_the_failure_knows(asked: list[Any]) -> None:
    cause, cuda = RuntimeError("x"), object()
    failure = failed(WHOLE, device="cuda:1", cudnn_disabled=True, cuda=cuda, cause=cause)
    found = diagnose(failure, GraphOutline(CONV))
    assert type(found.error) is NoDeviceError
    (call,) = asked
    assert (call.runtime, call.cuda, call.cause) == (failure.runtime, cuda, cause)
    assert (call.request.device, call.request.cudnn_disabled) == ("cuda:1", True)


@pytest.mark.parametrize(
    ("report", "in_doubt"),
    [
        (None, False),
        (WHOLE, False),
        (without("libcurand.so.10"), False),
        (without("libcudnn.so.9"), True),
        (without("libcufft.so.12"), True),
        (dataclasses.replace(WHOLE, cudnn_mixed=("/a", "/b")), True),
    ],
)
def test_the_model_is_asked_for_its_operators_where_a_library_of_them_is_in_doubt(
    asked: list[Any], report: PreloadReport | None, in_doubt: bool
) -> None:
    found = diagnose(failed(report), GraphOutline(CONV))
    assert asked[0].request.cudnn_operators == (("Conv",) if in_doubt else ())
    assert found.depends_on_model is in_doubt


def test_the_operators_of_a_session_count_before_those_of_the_file(asked: list[Any]) -> None:
    found = diagnose(failed(without("libcudnn.so.9"), operators=frozenset()), GraphOutline(CONV))
    assert asked[0].request.cudnn_operators == ()
    assert not found.depends_on_model
    diagnose(failed(WHOLE, operators=frozenset({("Conv", "")})), GraphOutline(CONV))
    assert asked[1].request.cudnn_operators == ("Conv",)


def test_an_exception_that_has_nothing_to_do_with_the_gpu_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.diagnosis.diagnosing.why_unusable", lambda *_, **__: None)
    assert explain(failed(WHOLE, cause=ValueError("x")), GraphOutline(CONV)) is None
