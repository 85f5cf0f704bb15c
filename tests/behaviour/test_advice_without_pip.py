"""Advice for an environment without pip, executed: uv makes such environments, and so does ``venv --without-pip``.

Each of a few faults stands for one form of the advice: install, install again, remove and install, into a folder that
is not the installer's. They fetch hundreds of megabytes: on demand, ``pytest -m matrix``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import CASES, Case
from tests.faults.advice import follow_advice
from tests.faults.case import Break
from tests.lab import Overlay
from tests.lab.environments import install
from tests.lab.fixtures import Lab

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]

FAULTS = (
    "not-installed",
    "no-libcudart",
    "provider-file-missing",
    "library-truncated",
    "cpu-package-over-gpu-package",
    "conflict-in-a-folder-of-pythonpath",
    "conflict-in-packages-that-are-shared",
)
SYSTEM = "/usr/bin:/bin"


def without_pip(breaks: Break) -> Break:
    def break_all(lab: Lab, overlay: Overlay) -> None:
        breaks(lab, overlay)
        overlay.uninstall("pip")

    return break_all


@pytest.mark.parametrize("with_uv", [True, False], ids=["uv", "ensurepip"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in FAULTS], ids=str)
def test_what_is_printed_mends_the_fault(lab: Lab, case: Case, with_uv: bool) -> None:
    path = f"{_folder_of_uv()}:{SYSTEM}" if with_uv else SYSTEM
    tried = list(follow_advice(replace(case, breaks=without_pip(case.breaks), env={**case.env, "PATH": path}), lab))
    assert tried
    for text, _, problem in tried:
        assert ("uv pip" in text) == with_uv, text
        assert ("-m ensurepip &&" in text) != with_uv, text
        assert problem is None, f"after: {text}\n{problem}"


def _folder_of_uv() -> Path:
    site = install("uv", ["uv"])
    return site.parents[2] / "bin"
