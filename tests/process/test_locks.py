"""The rule of ortgpu.process.background on locks: a signal handler or a finalizer may use the library at any moment."""

from __future__ import annotations

import sys

import pytest

from tests.support.children import child_environment, run_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks for SIGALRM and isolate=True")


@pytest.mark.parametrize("kind", ["threads", "isolate"])
@pytest.mark.parametrize("seconds", ["4", pytest.param("60", marks=[pytest.mark.slow, pytest.mark.timeout(200)])])
def test_handlers_and_finalizers_may_use_a_service(kind: str, seconds: str) -> None:
    command = [sys.executable, "-m", "tests.programs.handlers", seconds, kind, "1"]
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_child(command, env=env, deadline=float(seconds) + 90).ok().reports
    counts = found["counts"]
    assert counts["wrong"] == 0
    assert min(counts[name] for name in ("SIGALRM", "SIGTERM", "finalized")) >= 10
    assert counts.get("ended", 0) >= (float(seconds) > 10)
    assert found["left"] == []


@pytest.mark.parametrize("way", ["run", "submit", "map", "joined run", "joined submit"])
def test_a_finalizer_in_a_thread_of_the_service_may_wait_for_it(way: str) -> None:
    command = [sys.executable, "-m", "tests.programs.woken", way]
    found = run_child(command, env=child_environment({"CUDA_VISIBLE_DEVICES": ""}), deadline=60).ok().reports
    assert found["asked"] == 5
    assert found["found"] == [3]
