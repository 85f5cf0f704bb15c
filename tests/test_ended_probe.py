"""A probe that was ended: what ended it is not always the library in whose code it was."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis import find_problems
from ortgpu.diagnosis.probe import ProbeStep
from tests.made_facts import HEALTHY, SITE, part, probed

DRIVER = ProbeStep("driver", True, "cuInit 0, devices: 1")
CURAND = f"{SITE}/nvidia/cu13/lib/libcurand.so.10"


@pytest.mark.parametrize("step", ["libraries", "import", "provider", "session", "model"])
@pytest.mark.parametrize(
    ("signal", "says", "needs"),
    [
        ("SIGKILL", "memory runs out", "host"),
        ("SIGXCPU", "processor time", "host"),
        ("SIGSYS", "seccomp", "host"),
        ("SIGILL", "no such instruction", "hardware"),
    ],
)
def test_what_the_system_ended_is_not_installed_again(step: str, signal: str, says: str, needs: str) -> None:
    facts = probed(DRIVER, died_in=step, signal=signal, opening=CURAND)(part("host", memory_total=512 << 20)(HEALTHY))
    (error,) = find_problems(facts)
    assert error.code == "provider-fallback"
    assert signal in error.summary
    assert says in error.summary
    assert [fix.needs for fix in error.fixes] == [needs]
    assert "memory of this machine or container: 512 MiB" in error.evidence
    assert f"it was opening {CURAND}" in error.evidence


def test_in_the_driver_it_is_not_mended_by_a_reboot() -> None:
    (error,) = find_problems(probed(died_in="driver", signal="SIGKILL")(HEALTHY))
    assert error.code == "driver-unusable"
    assert [fix.needs for fix in error.fixes] == ["host"]


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_what_a_library_ended_is_its_own(signal: str) -> None:
    (error,) = find_problems(probed(DRIVER, died_in="libraries", signal=signal, opening=CURAND)(HEALTHY))
    assert error.code == "broken-package"
