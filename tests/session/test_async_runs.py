"""``run_async`` of sessions that go out of scope meanwhile: one destroyed in a thread of its own ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.support.cpu_session import PRELUDE, WATCHED, child

pytestmark = pytest.mark.lab

COUNT = 500

PROGRAM = """
from tests.support.async_sessions import drop_sessions
report(drop_sessions(NEG, feeds(1, size=100_000)[0], int(sys.argv[1])))
"""


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
    program = PRELUDE.partition("from tests.support")[0] + WATCHED.format(110) + PROGRAM
    found = machine.run(program, argv=[str(COUNT)], cwd=Path(__file__).parents[2], timeout=115).ok().json
    check(found, COUNT)
