"""The guard's decision about a session: verified, refused, or opened as it was asked for and listed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.errors import CPUExecutionWarning, ProviderRequestError
from ortgpu.provider import lifetime
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session import guard_policy
from ortgpu.session.guard import verification as module
from ortgpu.session.guard_policy import judge

verification: Any = module  # so that a test may stand in for whatever it calls

CUDA, CPU, TENSORRT = "CUDAExecutionProvider", "CPUExecutionProvider", "TensorrtExecutionProvider"
OPENVINO, OTHER_GPU = "OpenVINOExecutionProvider", "OtherGpuExecutionProvider"
AVAILABLE = [TENSORRT, CUDA, CPU]
CARRYING: Any = SimpleNamespace(has_providers=lambda: True)


@pytest.fixture(autouse=True)
def a_build_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The providers of the build; a test may add a plugin."""
    plugins: list[str] = []
    policy: Any = guard_policy
    for place in (policy, verification):
        monkeypatch.setattr(place, "listed_accelerators", lambda: {*plugins})
    monkeypatch.setattr(policy, "listed_providers", lambda: [*plugins])
    monkeypatch.setattr(policy.onnxruntime, "get_available_providers", lambda: [*AVAILABLE, *plugins])
    monkeypatch.delenv("ORTGPU_ALLOW_CPU", raising=False)
    return plugins


@pytest.mark.parametrize(
    ("providers", "verdict"),
    [
        (None, "guarded"),
        ([], "guarded"),
        ([CUDA], "guarded"),
        ([CPU, CUDA], "guarded"),
        ((CUDA, CPU), "guarded"),
        ([(CUDA, {"device_id": 0})], "guarded"),
        ([[CUDA, {}]], "guarded"),
        ([TENSORRT], "guarded"),
        (["NvTensorRTRTXExecutionProvider", CPU], "guarded"),
        (AVAILABLE, "guarded"),
        (AVAILABLE[::-1], "guarded"),
        (["CudaExecutionProvider"], "guarded"),
        (["cuda"], "guarded"),
        (["my_tensorrt"], "guarded"),
        *(([f"x-{word}"], "guarded") for word in ("cuda", "cudnn", "trt", "tensorrt", "nvidia")),
        (["GPU"], "guarded"),
        ("CUDAExecutionProvider", "guarded"),
        ([3], "guarded"),
        ([CPU], "cpu"),
        (["CPUExecutionProvider", "CPUExecutionProvider"], "cpu"),
        ([(CPU, {})], "cpu"),
        ([OPENVINO], "other"),
        ([OPENVINO, CPU], "other"),
        (["QNNExecutionProvider"], "other"),
    ],
)
def test_what_a_request_means(providers: Any, verdict: str) -> None:
    assert judge(providers, None) == verdict


def test_a_plugin_before_cuda_may_be_meant(a_build_for_cuda: list[str]) -> None:
    a_build_for_cuda.append(OTHER_GPU)
    assert judge([OTHER_GPU, CUDA, CPU], None) == "plugin"
    assert judge([CUDA, OTHER_GPU, CPU], None) == "guarded"
    assert judge([OTHER_GPU], None) == "other"


def test_carried_providers_count_where_none_are_named() -> None:
    assert judge(None, None, CARRYING) == "carried"
    assert judge([CUDA], None, CARRYING) == "guarded"
    assert judge([CPU], None, CARRYING) == "cpu"


class Session(InferenceSession):  # type: ignore[misc]  # ONNX Runtime ships no types
    """A session that is bound to what a test says, once its constructor was called."""

    def __init__(self, *bound: str) -> None:
        self.bound, self.calls, self.falls_back = list(bound), list[Any](), True
        self._model_path = "model.onnx"

    def construct(self, session: Any, *arguments: Any, **named: Any) -> None:
        assert session is self
        self.calls.append((arguments, named))
        self._sess, self._providers = object(), self.bound

    def disable_fallback(self) -> None:
        self.falls_back = False


def constructed(session: Session, providers: Any = None, options: Any = None, **named: Any) -> bool:
    arguments = ("model.onnx", options, providers, None)
    passed: bool = verification.construct(session, session.construct, arguments, named, sys._getframe())
    return passed


@pytest.mark.parametrize("providers", [None, [CUDA], AVAILABLE, [TENSORRT], ["Cuda"]])
def test_a_session_for_cuda_is_not_opened_as_it_was_asked_for(providers: Any) -> None:
    session = Session(CPU)
    assert not constructed(session, providers)
    assert session.calls == []
    assert id(session) not in lifetime.table


@pytest.mark.parametrize(("providers", "kind"), [([CPU], "cpu"), ([OPENVINO, CPU], "other")])
def test_any_other_session_is_opened_as_it_was_asked_for_and_listed(providers: list[str], kind: str) -> None:
    session = Session(*providers)
    assert constructed(session, providers, disabled_optimizers=["x"])
    assert session.calls == [(("model.onnx", None, providers, None), {"disabled_optimizers": ["x"]})]
    assert lifetime.table[id(session)].kind == kind


def test_a_session_of_a_plugin_must_be_on_it(a_build_for_cuda: list[str]) -> None:
    a_build_for_cuda.append(OTHER_GPU)
    asked = [OTHER_GPU, CUDA, CPU]
    there, fallen = Session(OTHER_GPU, CPU), Session(CPU)
    assert constructed(there, asked)
    assert not constructed(fallen, asked)
    assert [named["enable_fallback"] for _, named in there.calls + fallen.calls] == [0, 0]
    assert lifetime.table[id(there)].kind == "other"
    assert id(fallen) not in lifetime.table


def test_carried_providers_must_not_leave_the_session_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("cuda_ep", CPU)
    assert constructed(session, options=CARRYING)
    assert session.calls[0][1]["enable_fallback"] == 0
    assert not session.falls_back
    assert lifetime.table[id(session)].kind == "other"
    fallen = Session(CPU)
    with pytest.raises(ProviderRequestError, match="leave this session on the CPU"):
        constructed(fallen, options=CARRYING)
    assert id(fallen) not in lifetime.table
    monkeypatch.setenv("ORTGPU_ALLOW_CPU", "1")
    with pytest.warns(CPUExecutionWarning):
        assert constructed(fallen, options=CARRYING)


@pytest.mark.parametrize(("providers", "passes"), [([CPU], True), ([OPENVINO], True), ([CUDA], False), (None, False)])
def test_other_providers_of_an_open_session_follow_the_same_rules(providers: Any, passes: bool) -> None:
    session, calls = Session(CPU), list[Any]()
    assert verification.set_providers(session, lambda *arguments: calls.append(arguments), providers, None) is passes
    assert len(calls) == passes


@pytest.mark.parametrize(
    ("providers", "is_listed"), [(None, True), ([CUDA], True), ([CPU], False), ([OPENVINO], False)]
)
def test_an_unguarded_session_that_asked_for_cuda_is_listed(providers: Any, is_listed: bool) -> None:
    session = Session(CPU)
    verification.note(session, providers, None, None)
    assert (id(session) in lifetime.table) is is_listed
