"""A session that is opened again after a run was out of memory: on its GPU, with its model. No GPU, no child."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.errors import ExecutionError
from ortgpu.provider import lifetime
from ortgpu.session.reopening import reopen, unchanged_on_error
from ortgpu.session.request import SessionRequest
from tests.support.made_sessions import L4, NEG, made_session


def test_it_opens_on_its_gpu_and_never_on_the_cpu() -> None:
    asked: list[SessionRequest] = []
    session = made_session(device=L4)
    session._gpu_runner = SimpleNamespace(let_go=lambda: None)
    session._open_request = asked.append
    session._gpu_context = lifetime.OUTDATED
    reopen(session)
    assert [(request.device, request.allow_cpu) for request in asked] == [(1, False)]


@pytest.mark.parametrize(
    ("tuned", "again"), [(True, True), (False, False), ("now", True), ("record.json", "record.json")]
)
def test_it_stays_as_it_was_asked_for_and_is_not_tuned_again(tuned: Any, again: Any) -> None:
    """It is asked for on its GPU alone, and the next ``set_providers`` or pickle is as the caller asked."""
    asked: list[SessionRequest] = []
    session = made_session(device=L4, cpu_nodes="forbid", allow_cpu=True, tuned=tuned)

    def reopened(request: SessionRequest) -> None:
        asked.append(request)
        session._request = request

    before = replace(session._request, device="auto")
    session._request = before
    session._gpu_runner = SimpleNamespace(let_go=lambda: None)
    session._open_request = reopened
    session._gpu_context = lifetime.OUTDATED
    reopen(session)
    (request,) = asked
    assert (request.device, request.allow_cpu, request.cpu_nodes, request.tuned) == (1, False, "allow", again)
    assert session._request == before


def test_a_model_that_was_replaced_meanwhile_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG)
    session = made_session(path.as_posix())  # type: ignore[arg-type]  # a path will do
    session._gpu_runner = SimpleNamespace(let_go=lambda: None, close=lambda error: None)
    session._open_request = None
    session._gpu_context = lifetime.OUTDATED
    path.write_bytes(NEG + b"\x0a")
    with pytest.raises(ExecutionError, match="its model's file has changed"):
        reopen(session)


class Session:
    """A session with two attributes."""

    def __init__(self) -> None:
        self.providers, self.placement = ["a"], "p"

    def open_otherwise(self) -> None:
        with unchanged_on_error(self):
            self.providers = ["b"]
            vars(self)["further"] = 1
            raise KeyError


def test_a_session_that_cannot_be_opened_otherwise_stays_as_it_was() -> None:
    session = Session()
    with pytest.raises(KeyError):
        session.open_otherwise()
    assert vars(session) == {"providers": ["a"], "placement": "p"}
