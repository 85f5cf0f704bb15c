"""Where ONNX Runtime's own ``run`` is, behind the methods of this library and of others."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.running.onnxruntimes import (
    InferenceSession,
    LastOfOurs,
    gpu_session_class,
    onnxruntimes_method,
    onnxruntimes_run,
    run_behind,
    session_on_cpu,
)
from ortgpu.session.gpu_session import GPUSession

FEED = {"x": np.array([-1, 2, -3, 4], np.float32)}


def opened(cls: type[Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(RELU, allow_cpu=True)


class Between(GPUSession):
    def close_nothing(self) -> None:
        pass


def test_the_class_for_modules_that_it_imports_itself() -> None:
    assert gpu_session_class() is GPUSession
    assert issubclass(GPUSession, LastOfOurs)
    assert LastOfOurs.__mro__[1] is InferenceSession


@pytest.mark.parametrize("cls", [GPUSession, Between])
def test_onnx_runtimes_own_run_is_found(cls: type[Any]) -> None:
    session = opened(cls)
    assert onnxruntimes_run(session) is InferenceSession.run
    assert onnxruntimes_method(session, "get_inputs") is InferenceSession.get_inputs
    assert run_behind(session)(None, FEED)[0].tolist() == [0, 2, 0, 4]


def test_a_tracer_that_replaced_it_must_see_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session, plain = opened(GPUSession), InferenceSession.run

    def traced(self: Any, *arguments: Any) -> Any:
        return plain(self, *arguments)

    monkeypatch.setattr(InferenceSession, "run", traced)
    assert onnxruntimes_run(session) is None
    monkeypatch.setattr(InferenceSession, "run", len)
    assert onnxruntimes_run(session) is None


def test_a_run_of_another_class_before_onnx_runtimes_counts() -> None:
    class Interposed(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def run(self, *arguments: Any) -> Any:
            return "theirs"

    class Derived(GPUSession, Interposed):
        pass

    session = opened(Derived)
    assert onnxruntimes_run(session) is None
    found: Any = run_behind(session)(None, FEED)
    assert found == "theirs"


@pytest.mark.parametrize("in_file", [False, True])
def test_a_session_for_ourselves_is_on_the_cpu_and_nobody_sees_it(
    in_file: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a tracer saw it")

    monkeypatch.setattr(InferenceSession, "__init__", refuse)
    (tmp_path / "model.onnx").write_bytes(RELU)
    model = str(tmp_path / "model.onnx") if in_file else RELU
    session = session_on_cpu(model, onnxruntime.SessionOptions())
    assert list(session.get_providers()) == ["CPUExecutionProvider"]
    assert session.run(["y"], FEED, None)[0].tolist() == [0, 2, 0, 4]


def test_a_model_that_is_none_raises_onnx_runtimes_own_words() -> None:
    with pytest.raises(Exception, match=r"(?i)protobuf|model"):
        session_on_cpu(b"no model", onnxruntime.SessionOptions())
