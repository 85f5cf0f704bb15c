"""Records of the sessions of a process: which are listed, what a record says, and who made a session."""

from __future__ import annotations

import dataclasses
import gc
import os
import types
import warnings
from collections.abc import Iterator
from typing import Any

import onnxruntime
import pytest

from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.environment.packages.plugins import Arrival
from ortgpu.errors import ExecutionError, PoisonedContextError
from ortgpu.provider import lifetime, living
from ortgpu.provider.devices import CPU
from ortgpu.provider.living import SessionRecord, attribute, list_makers, register, sessions, stacklevel
from ortgpu.provider.placement import PlacedNode, Placement

PLAIN = SessionRecord("m.onnx", None, ("CUDAExecutionProvider",), Placement((), False), "unguarded", None, None, True)


def of_module(name: str, code: str) -> Any:
    """The names of a module whose code belongs to the package of this name, as far as frames tell."""
    module = types.ModuleType(name)
    exec(compile(code, f"/{name}.py", "exec"), vars(module))
    return module


def made() -> Any:
    return onnxruntime.InferenceSession(RELU, providers=["CPUExecutionProvider"])


def records_of(session: Any, kind: str) -> list[SessionRecord]:
    """The records of one kind, where the session is all that can have it."""
    assert session is not None
    return [record for record in sessions() if record.kind == kind]


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> Iterator[None]:
    """Leave the objects of other modules out, of which collecting takes a quarter of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_other_sessions(frozen_objects: None) -> None:
    gc.collect()


# What a record says


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "m.onnx on CUDAExecutionProvider [unguarded]"),
        ({"device": CPU, "kind": "GPUSession"}, f"m.onnx on {CPU} [GPUSession]"),
        ({"model": "a\x1b[2J.onnx"}, "a\\x1b[2J.onnx on CUDAExecutionProvider [unguarded]"),
        ({"fell_back": True}, "m.onnx on CUDAExecutionProvider [unguarded], fell back from CUDA"),
        ({"created_by": "a.py:3 f"}, "m.onnx on CUDAExecutionProvider [unguarded], created by a.py:3 f"),
        (
            {"arrival": Arrival("plugin package", "/a.so")},
            "m.onnx on CUDAExecutionProvider [unguarded], CUDA from a plugin package",
        ),
        ({"arrival": Arrival("built in", "/a.so")}, "m.onnx on CUDAExecutionProvider [unguarded]"),
        ({"alive": False}, "m.onnx on CUDAExecutionProvider [unguarded], unusable"),
        (
            {"placement": Placement((PlacedNode("r", "Relu", "", "CUDAExecutionProvider", "compute"),))},
            "m.onnx on CUDAExecutionProvider [unguarded], nodes: CUDAExecutionProvider 1",
        ),
    ],
)
def test_a_record_is_a_line(changes: dict[str, Any], text: str) -> None:
    assert str(dataclasses.replace(PLAIN, **changes)) == text


# Which sessions are listed


def test_a_session_that_nobody_registered_is_found() -> None:
    session = made()
    (record,) = records_of(session, "unguarded")
    assert (record.model, record.device, record.providers) == ("<bytes>", CPU, ("CPUExecutionProvider",))
    assert (record.created_by, record.pid, record.alive, record.fell_back) == (None, None, True, False)
    assert record.arrival is None
    del session
    gc.collect()
    assert [each for each in sessions() if each.kind == "unguarded"] == []


def test_a_registered_session_has_its_creator_and_process() -> None:
    session = made()
    register(session, "other")
    (record,) = records_of(session, "other")
    assert record.created_by is not None
    assert record.created_by.startswith(f"{__file__}:")
    assert "test_a_registered_session" in record.created_by
    assert record.pid == os.getpid()
    assert records_of(session, "unguarded") == [], "it is listed once"


def test_a_registered_session_that_asked_for_cuda_and_has_the_cpu_fell_back() -> None:
    session = made()
    register(session, "unguarded")
    (record,) = records_of(session, "unguarded")
    assert record.fell_back
    guarded = made()
    register(guarded, "cpu")
    assert not records_of(guarded, "cpu")[0].fell_back


@pytest.mark.parametrize(
    ("error", "listed"),
    [(PoisonedContextError("the GPU is lost"), 1), (ExecutionError("this GPUSession is closed"), 0)],
)
def test_a_session_that_only_raises_is_listed_unless_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, listed: int
) -> None:
    session = made()
    register(session, "cpu")
    monkeypatch.setattr(lifetime, "error_of", lambda each: error if each is session else None)
    found = records_of(session, "cpu")
    assert [record.alive for record in found] == [False] * listed


def test_a_session_that_is_still_made_is_not_listed() -> None:
    session = made()
    register(session, "other")
    session._providers = None
    assert records_of(session, "other") == []


def test_the_path_of_a_model_and_how_cuda_came(monkeypatch: pytest.MonkeyPatch) -> None:
    session = made()
    session._model_path, session._providers = b"/a/m.onnx", ["CUDAExecutionProvider"]
    arrival = object()
    monkeypatch.setattr(living, "load_runtime", lambda: types.SimpleNamespace(arrival=arrival))
    (record,) = records_of(session, "unguarded")
    assert record.model == "/a/m.onnx"
    assert record.device is None, "nothing was verified"
    assert record.arrival is arrival


def test_a_session_opened_in_a_thread_has_the_creator_of_another() -> None:
    first = made()
    register(first, "other")
    second = of_module("ortgpu.inside", "def work(f): return f()").work(made)
    register(second, "cpu")
    attribute(second, to=first)
    assert records_of(second, "cpu")[0].created_by == records_of(first, "other")[0].created_by


# Who made a session

SUBCLASS = """
class Session:
    def __init__(self, call):
        self.found = call(self)
class Derived(Session):
    def __init__(self, call):
        super().__init__(call)
def make(cls, call):
    return cls(call).found
"""


@pytest.mark.parametrize("cls", ["Session", "Derived"])
def test_constructors_of_the_session_are_passed_over(cls: str) -> None:
    theirs = of_module("theirs", SUBCLASS)
    assert list_makers_of(theirs, cls) == ["theirs"] * (2 if cls == "Session" else 3)


def list_makers_of(theirs: Any, cls: str) -> list[str]:
    inside = of_module("ortgpu.inside", "def of(list_makers): return lambda session: list_makers(session)")
    found: list[str] = theirs.make(getattr(theirs, cls), inside.of(list_makers))
    return found


def test_a_warning_points_to_who_made_the_session() -> None:
    theirs = of_module("theirs", SUBCLASS)
    inside = of_module(
        "ortgpu.inside",
        "import warnings\ndef of(stacklevel):\n"
        "    return lambda session: warnings.warn('here', stacklevel=stacklevel(session))",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs.make(theirs.Derived, inside.of(stacklevel))
    assert [(each.filename, each.lineno) for each in caught] == [("/theirs.py", 9)]
