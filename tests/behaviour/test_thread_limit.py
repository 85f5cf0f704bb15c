"""A process that has reached its thread limit: OpenBLAS ends the import of NumPy, ONNX Runtime its session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.probe.result import ProbeStep
from tests.lab.fixtures import Lab
from tests.support.made_facts import HEALTHY, all_of, observed, probed

OPENBLAS = "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily unavailable"
PTHREAD = "RuntimeError: /src/env.cc:327 PosixThread() pthread_create failed, error code: 11"

# Another user than root, whom no limit stops, with root's right to read what only root may read. OpenBLAS ends the
# import of NumPy by SIGINT (blas_server.c), which a shell ignores in what it runs in the background.
LIMITED = """
import ctypes, os, resource, signal
signal.signal(signal.SIGINT, {interrupt})
for folder in (os.environ["HOME"], os.path.dirname(os.environ["CHILD_REPORT"])):
    os.chmod(folder, 0o777)
libc = ctypes.CDLL(None)
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
os.setuid(50_000 + os.getpid() % 10_000)  # of whom no other process runs
header, kept = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(0b110, 0b110, 0b110, 0, 0, 0)
assert libc.capset(header, kept) == 0  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
for capability in (1, 2):
    assert libc.prctl(47, 2, capability, 0, 0) == 0  # PR_CAP_AMBIENT_RAISE
import ortgpu
problems = ortgpu.diagnose(probe=True).problems
report([[problem.code, str(problem)] for problem in problems if problem.code != "driver-not-found"])
"""


def skip_without_threads() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("capabilities and limits of Linux")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("on one processor OpenBLAS makes no thread")


@pytest.fixture
def problems(request: pytest.FixtureRequest, lab: Lab, tmp_path: Path) -> list[tuple[str, str]]:
    """Code and text of what is found under this limit. ``request.param``: what the process does on SIGINT."""
    skip_without_threads()
    if os.geteuid() != 0:
        pytest.skip("it takes root to become another user")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)  # the other user's right, too
    asks_for_threads = {"OPENBLAS_NUM_THREADS": None}
    found = lab.machine().run(LIMITED.format(interrupt=request.param), env=asks_for_threads).ok().json
    return [(code, text) for code, text in found]


@pytest.mark.parametrize("problems", ["signal.default_int_handler"], indirect=True)
def test_numpy_is_not_installed_again(problems: list[tuple[str, str]]) -> None:
    ((code, text),) = problems
    assert code == "broken-package"
    assert "thread limit" in text
    assert "pthread_create failed" in text
    assert "ulimit -u" in text
    assert "pip" not in text


@pytest.mark.parametrize("problems", ["signal.SIG_IGN"], indirect=True)
def test_in_the_background_numpy_does_without_threads(problems: list[tuple[str, str]]) -> None:
    assert problems == []


def test_what_was_printed_says_it() -> None:
    step = ProbeStep("import", False, "ImportError: import numpy failed", {"printed": [OPENBLAS]})
    failed = observed(import_error="ImportError: import numpy failed")
    (error,) = find_problems(all_of(probed(step), failed)(HEALTHY))
    assert OPENBLAS in error.evidence
    assert [fix.needs for fix in error.fixes] == ["host"]


def test_a_session_without_threads() -> None:
    done = [ProbeStep(name, True) for name in ("driver", "libraries", "import", "provider")]
    (error,) = find_problems(probed(*done, ProbeStep("session", False, PTHREAD))(HEALTHY))
    assert error.code == "provider-fallback"
    assert [fix.needs for fix in error.fixes] == ["host"]
