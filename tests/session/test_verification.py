"""What the guard makes of a session: verified by ortgpu, passed on, or passed on if it is not on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ortgpu.errors import ProviderRequestError
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session.guard import verification
from ortgpu.session.guard.verification import construct, is_on_plugin, note, set_providers

CPU, CUDA, WEBGPU = "CPUExecutionProvider", "CUDAExecutionProvider", "WebGpuExecutionProvider"


class Session:
    """Stands for a session, whose constructor it is too."""

    def __init__(self, *providers: str) -> None:
        self.constructed: list[Any] = []
        self._gives = providers
        self._providers: Any = None
        self._model_path = None
        self.falls_back = True

    def original(self, session: Any, *arguments: Any, **named: Any) -> None:
        assert session is self
        self.constructed.append((arguments, named))
        self._providers = list(self._gives)

    def disable_fallback(self) -> None:
        self.falls_back = False


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(verification, "register", lambda session, kind: found.append((session, kind)))
    monkeypatch.setattr(verification, "listed_accelerators", lambda: {CUDA, WEBGPU})
    return found


def judged(monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    monkeypatch.setattr(verification, "judge", lambda *_: verdict)


def constructed(session: Any) -> bool:
    return construct(session, session.original, ("m", "options", ["p"], ["o"]), {"x": 1}, sys._getframe())


@pytest.mark.parametrize("verdict", ["cpu", "other"])
def test_what_has_nothing_to_do_with_cuda_passes_as_it_was_called(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    judged(monkeypatch, verdict)
    session = Session(CPU)
    assert constructed(session)
    assert session.constructed == [(("m", "options", ["p"], ["o"]), {"x": 1})]
    assert registered == [(session, verdict)]
    assert session.falls_back


def test_what_may_mean_cuda_is_left_to_ortgpu(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, "guarded")
    session = Session(CUDA)
    assert not constructed(session)
    assert (session.constructed, registered) == ([], [])


def test_onnx_runtimes_own_backend_on_the_cpu_passes(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, "guarded")
    monkeypatch.setattr(verification, "is_of_backend_on_cpu", lambda _: True)
    session = Session(CPU)
    assert constructed(session)
    assert registered == [(session, "cpu")]


@pytest.mark.parametrize(("bound", "passes"), [((WEBGPU, CPU), True), ((CUDA, CPU), False), ((CPU,), False)])
def test_a_session_on_another_gpu_provider_passes_once_it_is_there(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, bound: tuple[str, ...], passes: bool
) -> None:
    judged(monkeypatch, "plugin")
    session = Session(*bound)
    assert constructed(session) is passes
    assert session.constructed[0][1] == {"x": 1, "enable_fallback": 0}, "without ONNX Runtime's own fallback"
    assert registered == ([(session, "other")] if passes else [])


def test_devices_in_the_options_pass_without_a_fallback(registered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, "carried")
    monkeypatch.setattr(InferenceSession, "get_providers", lambda session: session._providers)
    session = Session(CUDA, CPU)
    assert constructed(session)
    assert session.constructed == [(("m", "options"), {"x": 1, "enable_fallback": 0})], "providers would replace them"
    assert not session.falls_back
    assert registered == [(session, "other")]


@pytest.mark.parametrize("allowed", [False, True])
def test_devices_in_the_options_that_leave_it_on_the_cpu(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    judged(monkeypatch, "carried")
    warned: list[Any] = []
    monkeypatch.setattr(InferenceSession, "get_providers", lambda session: session._providers)
    monkeypatch.setattr(verification, "cpu_is_allowed_by_variable", lambda: allowed)
    monkeypatch.setattr("ortgpu.session.allowed_cpu.warn_of_cpu", lambda *given: warned.append(given))
    session = Session(CPU)
    if allowed:
        assert constructed(session)
        assert [given[0] for given in warned] == [session]
        assert registered == [(session, "other")]
    else:
        with pytest.raises(ProviderRequestError):
            constructed(session)
        assert registered == []


@pytest.mark.parametrize(("verdict", "passes"), [("cpu", True), ("other", True), ("guarded", False), ("plugin", False)])
def test_other_providers_for_a_session(monkeypatch: pytest.MonkeyPatch, verdict: str, passes: bool) -> None:
    judged(monkeypatch, verdict)
    session = Session(CPU)
    assert set_providers(session, session.original, ["p"], ["o"]) is passes
    assert session.constructed == ([((["p"], ["o"]), {})] if passes else [])


@pytest.mark.parametrize(
    ("verdict", "bound", "listed"),
    [
        ("guarded", (CPU,), True),
        ("plugin", (CPU,), True),
        ("plugin", (WEBGPU,), False),
        ("cpu", (CPU,), False),
        ("other", (CPU,), False),
        ("carried", (CPU,), False),
    ],
)
def test_which_sessions_of_before_the_guard_are_listed(
    registered: list[Any], monkeypatch: pytest.MonkeyPatch, verdict: str, bound: tuple[str, ...], listed: bool
) -> None:
    judged(monkeypatch, verdict)
    session = Session()
    session._providers = list(bound)
    note(session, "providers", "options")  # type: ignore[arg-type]  # it stands for one
    assert registered == ([(session, "unguarded")] if listed else [])


def test_cuda_itself_is_no_other_plugin(registered: list[Any]) -> None:
    session: Any = Session()
    assert not is_on_plugin(session), "its constructor has not come so far"
    session._providers = [CUDA, CPU]
    assert not is_on_plugin(session)
    session._providers = [CPU, WEBGPU]
    assert is_on_plugin(session)
