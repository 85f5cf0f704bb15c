"""Ranks of a preflight, started by real launchers on a machine of the lab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.lab import Machine, launchers
from tests.lab.launchers import Job, launch

CALLS = [["all_reduce", "float32", 1000, 1], ["all_gather", "float16", 10, 1], ["reduce_scatter", "bfloat16", 10, 1]]
TIMEOUT = 6.0  # seconds: what a rank that hangs costs a test
ARRIVAL = 4.0  # seconds of a preflight in which not all come: half of them are waited for


def run(
    machine: Machine,
    launcher: str = "environment",
    ranks: int = 2,
    *,
    env: Mapping[str, str | None] | None = None,
    **arguments: Any,
) -> Job:
    if launcher != "environment":
        launchers.need(launcher)
    arguments.setdefault("calls", {"all": CALLS})
    return launch(machine, launcher, ranks, "preflight", {"timeout": 20.0, **arguments}, env=env)


def assert_all_raise(
    job: Job, there: Iterable[int], error_type: str, *, named: list[int], phase: str | None = None
) -> None:
    """The ranks that are still there all raise the same, which names ranks and phase; and nothing is left."""
    assert job.left == ()
    assert set(job.ranks) == set(there), job.result.output
    for number in job.ranks:
        error = job.error(number)
        assert error.type == error_type, error.text
        if "ranks" in error.details:
            assert list(error.details["ranks"]) == named, error.text
        assert phase is None or error.details["phase"] == phase, error.text
        assert error.fixes
