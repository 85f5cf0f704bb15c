"""What a session takes it gives back: GPU memory, threads and file descriptors, after a thousand of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

COUNT = int(os.environ.get("ORTGPU_CYCLES", "1000"))  # of sessions: 10000 for a run on its own
FAILURES = 1000
BUDGET = max(150.0, COUNT * 0.025)  # seconds; the deadline leaves room for the start and the end
DEADLINE = BUDGET + 30

# Free memory is the whole GPU's, and CUDA loads kernels when they are first used. Less than this is no leak of a
# thousand sessions, each of which holds a stream, handles of cuBLAS and an arena of at least 1 MiB.
MEMORY_MARGIN = 8 * 2**20
MARGIN_OF_KERNELS = 64 * 2**20


def assert_nothing_left(outcome: dict[str, Any], count: int) -> None:
    before, after = outcome["before"], outcome["after"]
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"]
    if before["free"] is not None and after["free"] is not None:
        assert before["free"] - after["free"] <= MEMORY_MARGIN
    assert outcome["done"] == count, f"only {outcome['done']} in {outcome['seconds']:.0f} s"


def test_a_thousand_sessions(mlp: Path) -> None:
    report = run_program("open_and_close", {"model": mlp, "count": COUNT, "budget": BUDGET}, deadline=DEADLINE)
    assert_nothing_left(report["sessions"], COUNT)


@pytest.fixture(scope="module")
def failures(mlp: Path) -> Report:
    return run_program("fail_to_open", {"model": mlp, "count": FAILURES, "budget": BUDGET}, deadline=DEADLINE)


def test_a_thousand_failures(failures: Report) -> None:
    assert_nothing_left(failures["failures"], FAILURES)


def test_the_last_failure_is_like_the_first(failures: Report) -> None:
    raised = failures["raised"]
    kinds = {name.partition(": ")[0]: name.partition(": ")[2] for name in raised}
    assert len(raised) == len(kinds) == 3, f"one kind raised different types: {raised}"
    assert (kinds["0"], kinds["1"]) == ("ProviderOptionError", "DeviceNotFoundError")
    assert kinds["2"] not in ("nothing", "ProviderOptionError", "DeviceNotFoundError")


def test_sessions_open_after_a_thousand_failures(failures: Report) -> None:
    assert failures["still right"] <= 1e-2


@pytest.fixture(scope="module")
def closed(resnet50: Path) -> Report:
    return run_program("close_large", {"model": resnet50})


def test_close_gives_memory_back(closed: Report) -> None:
    free = closed["free"]
    if None in free.values():
        pytest.skip("free memory of the GPU cannot be read here")
    assert free["before"] - free["during"] >= 64 * 2**20, "the session took less than its weights: nothing was measured"
    assert free["before"] - free["after"] <= MARGIN_OF_KERNELS


def test_run_after_close(closed: Report) -> None:
    error = closed.error("run after close")
    assert "closed" in error.text


def test_close_twice(closed: Report) -> None:
    closed.returned("close again")
