"""Weights that are read past ONNX Runtime's parser: the same session, and the file is done with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .children import Report, run_program

pytestmark = pytest.mark.gpu

ALL_BUT_THE_STRUCTURE = 0.95  # of these files


@pytest.fixture(scope="module", params=["resnet50", "encoder"])
def opened(
    request: pytest.FixtureRequest,
    make_model: Callable[[str], tuple[Path, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    model, _ = make_model(request.param)
    folder = tmp_path_factory.mktemp("weights")
    return run_program("weights_in_memory", {"model": model, "folder": str(folder)}, deadline=120)


def test_the_file_is_mapped_while_the_session_is_made_and_no_longer(opened: Report) -> None:
    read = opened["read"]
    assert read["by ours"] < (1 - ALL_BUT_THE_STRUCTURE) * read["file"]
    assert read["by ONNX Runtime"] > ALL_BUT_THE_STRUCTURE * read["file"]
    assert opened["mapped"] is False


def test_results_are_the_same_bit_for_bit_when_the_file_has_changed(opened: Report) -> None:
    assert opened["equal"] == {"path": True, "bytes": True}


def test_the_session_is_otherwise_the_same(opened: Report) -> None:
    assert opened["chosen alike"]
    assert opened["nodes alike"]
    assert opened["kept"] == [True, None, True]


def test_what_onnxruntime_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    report = run_program("weights_that_do_not_fit", {"folder": str(tmp_path)})
    assert report.error("ours").type == report.error("plain").type
    assert report.error("ours").text == report.error("plain").text
