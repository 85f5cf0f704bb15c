"""What a session promises without a word from its caller: the defaults, and ONNX Runtime's fallback."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortgpu.errors import ExecutionError, ProviderRequestError
from ortgpu.model.files import stamp_of
from ortgpu.provider.devices import CPU as CPU_DEVICE
from ortgpu.session.gpu_session import GPUSession
from ortgpu.session.request import NAMES, OWN, SessionRequest, cpu_is_allowed_by_variable
from tests.support.cpu_session import child
from tests.support.made_sessions import H200, L4, NEG, made_session

CONSTRUCTOR: dict[str, object] = {
    "sess_options": None,
    "providers": None,
    "provider_options": None,
    "device": None,
    "cpu_nodes": "warn",
    "allow_cpu": None,
    "cuda_graph": False,
    "pinned_memory_limit": 2 << 30,
    "tuned": True,
}


def test_the_constructor_has_these_defaults() -> None:
    """A default that turns lenient would bring the silent CPU back."""
    found = child("session.gpu_session.the_constructor_has_these_defaults")
    assert {name: found[name] for name in CONSTRUCTOR} == CONSTRUCTOR
    assert set(OWN) < set(NAMES)


def test_a_request_that_names_nothing_allows_nothing() -> None:
    defaults = {name: each.default for name, each in inspect.signature(SessionRequest).parameters.items()}
    assert (defaults["cpu_nodes"], defaults["allow_cpu"], defaults["is_guarded"]) == ("warn", False, False)


@pytest.mark.parametrize(
    ("value", "allows"),
    [
        *((value, True) for value in ("1", "true", "yes", "on", "TRUE", "Yes", "ON")),
        *((value, False) for value in ("", "0", "no", "No", "false", "off", "2", "allow", "yes please", " 1")),
        (None, False),
    ],
)
def test_the_variable_allows_the_cpu_by_these_values_only(
    monkeypatch: pytest.MonkeyPatch, value: str | None, allows: bool
) -> None:
    if value is None:
        monkeypatch.delenv("ORTGPU_ALLOW_CPU", raising=False)
    else:
        monkeypatch.setenv("ORTGPU_ALLOW_CPU", value)
    assert cpu_is_allowed_by_variable() is allows


def test_the_fallback_of_onnxruntime_is_off_from_the_constructor_on() -> None:
    """Plain ONNX Runtime opens a session again on the CPU where that is on, in the constructor and in each run."""
    found: Any = child("session.gpu_session.the_fallback_of_onnxruntime_is_off_from_the_constructor_on")
    assert found == [[0], 0]


class _RequestedError(Exception):
    """Ends a constructor once it has made its request."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[SessionRequest]:
    """The requests that constructors make. Nothing is opened."""
    made: list[SessionRequest] = []

    def keep(self: GPUSession, request: SessionRequest) -> None:
        made.append(request)
        raise _RequestedError

    monkeypatch.setattr(GPUSession, "_open_request", keep)
    return made


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "device": (1, 1),
    "cpu_nodes": ("forbid", "forbid"),
    "allow_cpu": (True, True),
    "cuda_graph": (True, True),
    "pinned_memory_limit": ("1KiB", 1024),
    "tuned": (False, False),
    "memory": ("2GiB", 2 << 30),
    "trim_idle": (2, 2.0),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_alone_reaches_the_request(name: str, requests: list[SessionRequest]) -> None:
    given, expected = ARGUMENTS[name]
    for arguments in ({name: given}, {}):
        with pytest.raises(_RequestedError):
            GPUSession(NEG, **arguments)
    asked, plain = requests
    assert getattr(asked, name) == expected != getattr(plain, name)
    assert replace(asked, **{name: getattr(plain, name)}) == plain


def test_every_argument_has_a_case_here() -> None:
    assert {*ARGUMENTS} == {*OWN}


def test_the_arguments_of_onnx_runtime_reach_the_request(requests: list[SessionRequest]) -> None:
    options = onnxruntime.SessionOptions()
    with pytest.raises(_RequestedError):
        GPUSession(NEG, options, ["CUDAExecutionProvider"], [{"device_id": 1}], disabled_optimizers=["ConstantFolding"])
    (asked,) = requests
    assert (asked.model, asked.sess_options) == (NEG, options)
    assert asked.providers.provider_arguments() == [("CUDAExecutionProvider", {"device_id": "1"})]
    assert asked.others == {"disabled_optimizers": ["ConstantFolding"]}
    assert not asked.is_guarded


def test_a_session_that_the_guard_made_says_so(requests: list[SessionRequest]) -> None:
    with pytest.raises(_RequestedError):
        type("Guarded", (GPUSession,), {"_guards": onnxruntime.InferenceSession})(NEG)
    assert requests[0].is_guarded


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"enable_fallback": 1}, ProviderRequestError),
        ({"device_id": 1}, TypeError),
        ({"cpu_node": "forbid"}, TypeError),
        ({"cpu_nodes": "sometimes"}, ValueError),
        ({"cpu_nodes": None}, ValueError),
        ({"allow_cpu": "false"}, TypeError),
        ({"cuda_graph": "false"}, TypeError),
        ({"trim_idle": 0}, ValueError),
        ({"memory": 0}, ValueError),
        ({"pinned_memory_limit": -1}, ValueError),
        ({"tuned": 1.5}, TypeError),
        ({"tuned": "/no/such/record.json"}, FileNotFoundError),
        ({"sess_options": 3}, TypeError),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_opened(
    arguments: dict[str, Any], error: type[Exception], requests: list[SessionRequest]
) -> None:
    with pytest.raises(error):
        GPUSession(NEG, **arguments)
    assert requests == []


def test_for_rank_opens_on_the_gpu_of_the_rank(requests: list[SessionRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpu.session.gpu_session.claimed_ordinal", lambda: 3)
    with pytest.raises(_RequestedError):
        GPUSession.for_rank(NEG, None, ["CUDAExecutionProvider"], cpu_nodes="forbid")
    assert (requests[0].device, requests[0].cpu_nodes) == (3, "forbid")
    assert requests[0].providers.names == ("CUDAExecutionProvider",)
    arguments: Any = {"device": 0}
    with pytest.raises(TypeError, match="the rank decides"):
        GPUSession.for_rank(NEG, **arguments)


def test_no_method_switches_the_fallback_on() -> None:
    session = made_session()
    with pytest.raises(ProviderRequestError, match="does not fall back"):
        session.enable_fallback()
    session._enable_fallback = True
    assert session._enable_fallback is False


@pytest.mark.parametrize("providers", [["CPUExecutionProvider"], [], None])
def test_set_providers_never_moves_a_session_to_the_cpu(providers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens with CUDA, on the GPU that it has, or not at all."""
    asked: list[SessionRequest] = []
    monkeypatch.setattr(GPUSession, "_open_request", lambda self, request: asked.append(request))
    for device, expected in (("auto", 1), ("GPU-1bbb", "GPU-1bbb")):
        session = made_session(device=L4)
        session._request = replace(session._request, device=device, allow_cpu=True)
        if providers == ["CPUExecutionProvider"]:
            with pytest.raises(ProviderRequestError, match="stays on the GPU"):
                session.set_providers(providers)
            continue
        session.set_providers(providers)
        assert (asked[-1].device, asked[-1].allow_cpu) == (expected, False)
        assert session._request.allow_cpu is True, "what the caller said stays for the next pickle"


def test_close_frees_all_that_the_session_held() -> None:
    session = made_session(budget=4 << 30)
    native, pinned = weakref.ref(session._sess), session.pinned_empty(10)
    memory, closed = session._pinned, list[Exception]()
    session._gpu_runner = SimpleNamespace(close=closed.append)
    assert session._holdings.budget == 4 << 30
    session.close()
    assert native() is None, "nothing refers to the C++ session"
    assert memory._closed
    assert memory.ordinary._closed
    assert [type(error) for error in closed] == [ExecutionError]
    assert (session._holdings, session._model_bytes) == (None, None)
    del pinned
    for use in (
        lambda: session.run(None, {"x": np.ones(1, np.float32)}),
        session.get_inputs,
        session.get_providers,
        session.io_binding,
        session.enable_fallback,
        lambda: session.memory,
        session.trim,
        session.__enter__,
        lambda: session.set_providers(["CUDAExecutionProvider"]),
    ):
        with pytest.raises(ExecutionError, match="closed"):
            use()
    session.close()


def test_a_session_that_failed_to_open_frees_its_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds the object and the error: a subclass that goes on with another model, for instance."""
    made: list[weakref.ref[Any]] = []

    def open_on_gpu(session: Any, construct: Any, request: SessionRequest, *_: object) -> None:
        construct(request.model, None, providers=["CPUExecutionProvider"])
        session._stream, session._holdings = Part(), Part()
        made.extend(map(weakref.ref, (session._sess, session._stream, session._holdings)))
        raise ProviderRequestError("this GPU is not to be had")

    monkeypatch.setattr("ortgpu.session.opening.open_on_gpu", open_on_gpu)
    monkeypatch.setattr("ortgpu.session.gpu_session.initialising", lambda: None)
    session = GPUSession.__new__(GPUSession)
    with pytest.raises(ProviderRequestError, match="not to be had") as caught:
        session.__init__(NEG)  # type: ignore[misc]  # as a subclass may
    assert [part() for part in made] == [None, None, None], "the error still lives"
    assert caught.value.__traceback__ is not None


class Part:
    """A part of a session that is watched."""


def test_a_with_block_closes() -> None:
    with made_session() as session:
        assert session.run(None, {"x": np.ones(1, np.float32)})[0].tolist() == [-1.0]
    with pytest.raises(ExecutionError, match="closed"):
        session.run(None, {"x": np.ones(1, np.float32)})


def test_run_async_refuses_what_cannot_be_called_back() -> None:
    with pytest.raises(TypeError, match="callable"):
        made_session().run_async(None, {"x": np.ones(1, np.float32)}, "no function", None)


@pytest.mark.parametrize(("device", "asked"), [(H200, 0), (L4, 1), (CPU_DEVICE, "cpu")], ids=str)
def test_the_placement_is_explained_on_the_gpu_of_the_session(
    monkeypatch: pytest.MonkeyPatch, device: Any, asked: Any
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "ortgpu.session.placement_details.explain_placement", lambda model, device: seen.append((model, device))
    )
    made_session(device=device).explain_placement()
    assert seen == [(NEG, asked)]


@pytest.mark.parametrize("allows", [True, False, None])
def test_set_providers_keeps_the_cpu_out_once_and_the_request_as_it_was(
    monkeypatch: pytest.MonkeyPatch, allows: bool | None
) -> None:
    """A pickle of the session asks for what its caller asked for."""
    asked: list[SessionRequest] = []
    session = made_session(device=L4, allow_cpu=allows)

    def reopened(request: SessionRequest) -> None:
        asked.append(request)
        session._request = request

    session._open_request = reopened
    session.set_providers(["CUDAExecutionProvider"])
    assert [request.allow_cpu for request in asked] == [False]
    assert session._request.allow_cpu is allows


def test_a_session_opens_its_own_model_again_in_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(NEG)
    monkeypatch.chdir(tmp_path)
    session = made_session("model.onnx")  # type: ignore[arg-type]  # a path will do
    monkeypatch.chdir(tmp_path.parent)
    assert session._request.model == str(tmp_path / "model.onnx")
    assert session._model_stamp == stamp_of(tmp_path / "model.onnx")
