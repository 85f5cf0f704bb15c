"""The table of faults is whole: every row of the corpus has its place, and what is recorded is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import CASES, GROUPS, OWN, Case
from tests.faults.case import outcome_words
from tests.faults.report import README, WAYS, Played, groups_table, recorded
from tests.faults.rows import ROWS
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than

ROOT = Path(__file__).resolve().parents[2]

#: The rows of the corpus, by letter. W is Windows only: prepared machines stand for it.
CORPUS = {
    "A": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18),
    "B": (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 18, 19, 20, 21, 23, 24, 27, 28, 29, 30),
    "C": (1, 2, 3, 4, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18),
    "D": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19),
    "E": (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12),
    "F": tuple(range(1, 11)),
    "G": (1, 2, 3, 5, 6, 8),
    "W": (1, 2, 3, 4, 5, 6, 7),
}
#: Those that the corpus says a machine without a GPU can reproduce.
REPRODUCIBLE = {
    "A": (1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14, 15, 16, 18),
    "B": (1, 2, 3, 4, 5, 6, 8, 9, 14, 23, 24, 27, 29, 30),
    "C": (1, 2, 3, 4, 8, 10, 16),
    "D": (1, 2, 3, 4, 6, 7, 8, 9, 10, 17),
    "E": (1,),
    "F": (1, 2, 3, 4, 5, 6, 8),
    "G": (3, 5, 6, 8),
}
ALL_ROWS, REPRODUCIBLE_ROWS = (
    {f"{letter}{number:02}" for letter, numbers in rows.items() for number in numbers}
    for rows in (CORPUS, REPRODUCIBLE)
)
#: A newer C library, and a display device that the kernel knows.
NOT_TO_BE_HAD = {"A14", "C16"}


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_row_of_the_corpus_has_its_place() -> None:
    of_cases = {row for case in CASES for row in case.rows} - {OWN}
    listed = {row.id for row in ROWS}
    assert of_cases | listed == ALL_ROWS
    assert not of_cases & listed, "a row is a case or it is listed, not both"
    assert len(listed) == len(ROWS)


def test_a_row_that_can_be_reproduced_is_tested() -> None:
    assert {row.id for row in ROWS if row.kind != "elsewhere"} & REPRODUCIBLE_ROWS == NOT_TO_BE_HAD


def test_there_are_faults_that_the_corpus_does_not_have() -> None:
    assert sum(case.rows == (OWN,) for case in CASES) >= 15


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_filled_in(case: Case) -> None:
    assert case.group in GROUPS
    assert case.says
    assert set(case.plain.split()) <= set(WAYS)
    assert case.after is not None or case.needs, "an error without any advice"


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind in ("elsewhere", "gpu")], ids=lambda row: row.id)
def test_a_row_names_tests_that_exist(row: object) -> None:
    where = getattr(row, "where")  # noqa: B009 - a parameter of a test has no type of its own
    found = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", where)
    assert found, where
    for file, function in found:
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.skipif(older_than((1, 27)) is not None, reason="the table is recorded with a release for CUDA 13")
def test_the_recorded_table_has_the_cases_of_the_code() -> None:
    lines = recorded(README.read_text(encoding="utf-8"))
    assert set(lines) == {case.name for case in CASES}
    for case in CASES:
        rows, error, plain, fix = lines[case.name]
        assert (rows, error, plain) == (" ".join(case.rows), case.error, case.plain)
        assert (fix == "executed, true") == (case.after is not None), f"{case.name}: {fix}"


def test_what_is_wrong_is_counted_as_wrong() -> None:
    case = next(case for case in CASES if case.name == "no-libcudart")
    right = Played(case, case.error, [], case.plain, fixes=1, advice=True)
    wrong = Played(case, "GPUError", ["GPUError instead of another"], "silent")
    unmended = Played(case, case.error, ["still found"], case.plain, fixes=1, advice=False)
    line = groups_table([right, wrong, unmended])[-1]
    assert line == ["all", "3", "2/3", "1/2", "1 nothing is advised", "1 silent, 2 printed"]


#: One of each way in which plain ONNX Runtime does it; all of them are compared on demand.
TYPICAL = (
    "providers-not-named", "no-driver", "driver-too-old", "no-libcudart", "cpu-package-only", "not-installed",
    "library-truncated", "provider-cuda",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name not in TYPICAL)) for case in CASES],
)
def test_what_plain_onnxruntime_does(lab: Lab, case: Case) -> None:
    if reason := older_than(case.plain_since):
        pytest.skip(f"what is recorded of plain ONNX Runtime is {reason}")
    assert outcome_words(case.open_plain(lab, case.machine(lab))) == case.plain
