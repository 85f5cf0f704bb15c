"""Two faults at once: neither hides the other, and the fixes that are printed, one after the other, mend both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import CASES, Case
from tests.lab import Overlay
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab

BY_NAME = {case.name: case for case in CASES}

#: By two cases of the table, whose fixes take no package index: what is found first, then after each fix.
PAIRS = (
    (
        ("driver-without-its-link", "hidden-by--1"),
        ("DriverNotFoundError", "NoDeviceError", "DriverUnusableError"),
    ),
    (
        ("machine-code-passed-over", "hidden-by-nothing"),
        ("NoDeviceError", "UnsupportedDeviceError", "DriverUnusableError"),
    ),
    (
        ("library-unreadable", "linking-stub-in-ld-preload"),
        ("LibraryNotFoundError", "DriverUnusableError", "DriverNotFoundError"),
    ),
    (
        ("cpu-package-first-on-pythonpath", "cuda-compat-older-than-the-driver"),
        ("CPUOnlyPackageError", "DriverTooOldError", "DriverNotFoundError"),
    ),
)


@pytest.mark.parametrize(("names", "found"), PAIRS, ids=lambda value: "+".join(value))
def test_one_fix_after_the_other(lab: Lab, names: tuple[str, str], found: tuple[str, ...]) -> None:
    case = both(*(BY_NAME[name] for name in names))
    machine = case.machine(lab)
    model = str(lab.models.relu)
    done = "true"
    for number, expected in enumerate(found):
        outcome = outcome_of(machine.run(f"{case.prelude}\nopen_session({model!r}, {{}})", first=done))
        error = outcome.error
        assert error is not None, outcome.result.output
        assert outcome.result.reports.get("first_status") == 0, outcome.result.output
        assert error.type == expected, error.text
        roots = {error.type, *(each.type for each in error.others if each.consequence_of is None)}
        assert not roots & set(found[:number]), f"mended before, and found again: {error.text}"
        if number < len(found) - 1:
            fix = next(each["text"] for each in error.remedies if each["kind"] == "shell")
            done = f"{done} && {fix}"


def test_what_hides_the_gpus_is_a_cause_of_its_own(lab: Lab) -> None:
    case = both(BY_NAME["driver-without-its-link"], BY_NAME["hidden-by--1"])
    error = case.open(lab, case.machine(lab)).error
    assert error is not None
    (hidden,) = (each for each in error.others if each.type == "NoDeviceError")
    assert hidden.consequence_of is None
    assert "unset CUDA_VISIBLE_DEVICES" in hidden.fixes


def both(one: Case, other: Case) -> Case:
    def breaks(lab: Lab, overlay: Overlay) -> None:
        one.breaks(lab, overlay)
        other.breaks(lab, overlay)

    return replace(
        one,
        name=f"{one}+{other}",
        breaks=breaks,
        cuda=one.cuda or other.cuda,
        nvml=one.nvml or other.nvml,
        env={**one.env, **other.env},
        prelude=f"{one.prelude}\n{other.prelude}",
    )
