"""Runs over memory of the GPU come after the work that their caller has queued there, whatever the way in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.behaviour.test_examples import EXAMPLES, MODEL, programs_of
from tests.support.children import child_environment, run_child

from .children import Report, run_program

pytestmark = [
    pytest.mark.ortgpu,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch is in no extra, and not installed here"
    ),
]

ROUNDS = 1000


@pytest.fixture(scope="module")
def races() -> Report:
    return run_program("races", {"rounds": ROUNDS}, deadline=280)


def test_no_run_reads_old_data(races: Report) -> None:
    assert len(races["wrong"]) >= 80
    assert {case: count for case, count in races["wrong"].items() if count} == {}


def test_memory_that_is_still_read_is_not_written() -> None:
    assert run_program("written_over", {"rounds": ROUNDS})["wrong"] == 0


def test_an_input_that_is_read_on_the_host() -> None:
    assert run_program("read_on_the_host", {"rounds": ROUNDS})["wrong"] == 0


def test_the_program_of_the_page(tmp_path: Path) -> None:
    from onnx import parser

    (program,) = programs_of(EXAMPLES / "TORCH.md").values()
    (tmp_path / "model.onnx").write_bytes(parser.parse_model(MODEL).SerializeToString())
    done = run_child([sys.executable, "-c", program], env=child_environment(), deadline=100, cwd=tmp_path)
    assert done.ok().stdout == "cuda:0 (2, 4) True\n"
