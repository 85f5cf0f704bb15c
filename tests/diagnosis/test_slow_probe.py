"""A probe that ran out of time may have been slow, and nothing be broken: that comes before what cannot be undone."""

from __future__ import annotations

import json

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from tests.lab.fixtures import Lab
from tests.support.made_facts import SEEN_HEALTHY, probed

STEPS = ["driver", "libraries", "import", "provider", "session", "model"]


@pytest.mark.parametrize("step", STEPS)
def test_more_time_is_the_first_advice(step: str) -> None:
    hung = find_problems(probed(died_in=step, timed_out=True, seconds=40.2)(SEEN_HEALTHY))[0]
    assert str(hung.fixes[0]).endswith("ortgpu doctor --timeout 160")
    crashed = find_problems(probed(died_in=step)(SEEN_HEALTHY))[0]
    assert not any("--timeout" in fix for fix in crashed.fixes)


def test_a_library_that_takes_its_time(lab: Lab) -> None:
    """It says nothing wrong, and comes back: later than the doctor was told to wait."""
    machine = lab.machine()
    waiting = lab.stubs.compile(
        "waiting",
        "#include <unistd.h>\n__attribute__((constructor)) static void waits(void) { for (;;) pause(); }\n",
        "-Wl,-soname,libcurand.so.10",
    )
    real = machine.overlay.path("nvidia/*/lib/libcurand.so.10").relative_to(machine.overlay.site)
    machine.overlay.replace(str(real), waiting)
    done = machine.run(argv=["-m", "ortgpu", "doctor", "--json", "--timeout", "10"])
    problems = json.loads(done.stdout)["problems"]
    (hung,) = (problem for problem in problems if "did not return within 10 s" in problem["summary"])
    assert hung["fixes"][0]["text"].endswith("ortgpu doctor --timeout 120"), hung
