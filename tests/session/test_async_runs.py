"""``run_async`` of sessions that go out of scope meanwhile: one destroyed in a thread of its own ends the process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.support.cpu_session import child

pytestmark = pytest.mark.lab

COUNT = 500

PROGRAM = "session.async_runs.drop"


def check(found: dict[str, Any], count: int) -> None:
    assert found["errors"] == []
    assert found["ran"] == count
    assert set(found["destroyed"]) <= {"ortgpu-async", "MainThread"}
    assert sum(found["destroyed"].values()) == count
    assert found["sessions"] == 0


def test_sessions_on_the_cpu_that_go_out_of_scope() -> None:
    check(child(PROGRAM, str(COUNT), deadline=110), COUNT)


def test_sessions_on_a_gpu_that_computes_nothing_that_go_out_of_scope(lab: Lab, provider_library: str) -> None:
    machine = lab.machine_that_places(provider_library)
    found = machine.run_program(PROGRAM, str(COUNT), timeout=115).ok().json
    check(found, COUNT)
