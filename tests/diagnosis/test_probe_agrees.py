"""What a diagnosis says that tries everything in a child is what a session says in this process."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.environment.libraries.search import Candidate
from ortgpu.provider.preloading import MissingLibrary
from tests.faults import CASES, Case
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab
from tests.support.made_facts import HEALTHY, SITE, environment, probed_without, resolution

# By what stands in the way: of the libraries, of the driver, and of this process alone.
NAMES = (
    "no-libcurand",
    "library-without-what-it-had",
    "part-of-another-cublas-in-ld-preload",
    "part-of-cublas-loaded-from-elsewhere",
    "cudnn-loaded-from-elsewhere",
    "gpu-lost",
    "cuda-compat-older-than-the-driver",
    "machine-code-passed-over",
)

DIAGNOSE = """
import ortgpu
def first():
    problems = ortgpu.diagnose({model!r}, probe=True).problems
    if problems:
        raise problems[0]
    return {{}}
report(_observe(first))
"""


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=str)
def test_the_same_first_problem(case: Case, lab: Lab) -> None:
    machine = case.machine(lab)
    opened = case.open(lab, machine)
    model = str(getattr(lab.models, case.model))
    diagnosed = outcome_of(machine.run(f"{case.prelude}\n{DIAGNOSE.format(model=model)}"))
    assert opened.error is not None
    assert diagnosed.error is not None, diagnosed.result.output
    assert (diagnosed.error.type, diagnosed.error.summary) == (opened.error.type, opened.error.summary)


def test_all_names_are_those_of_cases() -> None:
    assert set(NAMES) <= {case.name for case in CASES}


def test_what_only_the_child_lacks_is_not_missing() -> None:
    lost = MissingLibrary("libcurand.so.10", True, "nvidia-curand~=10.0", ())
    seen = probed_without(lost)
    assert [problem.code for problem in find_problems(seen(HEALTHY))] == ["library-not-found"]
    path = f"{SITE}/elsewhere/libcurand.so.10"
    candidates = (Candidate("libcurand.so.10", path, "already loaded", "this process"),)
    found = [each for each in HEALTHY.environment.libraries if each.soname != "libcurand.so.10"]
    here = resolution("libcurand.so.10")
    loaded = type(here)(here.spec, here.soname, here.required, candidates, ())
    assert find_problems(environment(libraries=(*found, loaded))(seen(HEALTHY))) == ()
