"""Large arrays of ``run`` on a GPU: copied in threads through pinned memory, with the results of plain ``run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.provider.runtime import load_runtime
from tests.support.this_machine import GPUs

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

since_130 = pytest.mark.skipif(load_runtime().release < (1, 30), reason="ONNX Runtime 1.30 is the first that is staged")

TOLERANCE = 5e-3  # as in test_pipeline.py
MEMORY_MARGIN = 64 * 2**20  # as in test_lifetime.py: what CUDA itself keeps

ORDINARY = 0  # of memory_type in throughput.py


@since_130
def test_results_are_those_of_plain_run() -> None:
    report = run_program("staged", deadline=200)
    assert len(report["kinds"]) == 12
    assert set(report["kinds"].values()) == {True}
    assert report["beside"] is True
    assert report["not staged"] == []


@since_130
def test_results_are_in_ordinary_memory_that_is_used_again_and_stay_the_caller_s() -> None:
    report = run_program("staged_results")
    assert report["type"] == ORDINARY
    assert report["addresses"] == 1
    assert report["intact"] == [True] * 8
    assert report["pinned"] == 1  # the size of one array
    assert report["view"] is True
    assert report["pinned input"] == -5
    assert report["in a forked child"] is True
    assert report["pinned after close"] == 0
    assert report["not staged"] == []


@pytest.fixture(scope="module")
def errors() -> Report:
    return run_program("staged_errors")


@pytest.mark.parametrize("what", ["type", "rank", "shape", "input", "output", "none"])
def test_what_is_wrong_is_raised_as_plain_run_raises_it(errors: Report, what: str) -> None:
    ours, plain = errors.error(what), errors.error(f"{what}, plain")
    assert (ours.type, ours.text) == (plain.type, plain.text)


def test_the_session_works_on_after_errors(errors: Report) -> None:
    assert errors.returned("afterwards") == -1
    assert errors.error("out of memory").type == "GPUOutOfMemoryError"
    assert errors.returned("after that") == -1


def test_threads_over_one_session_and_nothing_is_left_behind() -> None:
    report = run_program("staged_threads", deadline=150)
    assert report["wrong"] == []
    assert report["mapped"] == [-n for n in range(20)]
    first, second = report["threads"]
    assert second["at work"] > second["after close"]
    assert second["after close"] <= first["after close"]
    assert report["not staged"] == []
    free = report["free"]
    assert free["before"] is None or free["after"] is None or free["before"] - free["after"] <= MEMORY_MARGIN


def test_a_network(resnet50: Path) -> None:
    report = run_program("staged_networks", {"model": resnet50, "batches": [64, 16, 128, 64]}, deadline=150)
    assert report["worst"] <= TOLERANCE
    assert report["not staged"] == []


def test_nothing_that_another_session_captures_is_spoilt() -> None:
    report = run_program("staged_beside_captures", deadline=120)
    assert report.returned("captured") == [-n for n in range(12)]
    assert report["wrong"] == []
    assert report["runs"] > 1
    assert report["not staged"] == []


@since_130
def test_a_tracer_sees_each_run_of_later_sessions() -> None:
    report = run_program("staged_traced")
    assert report["staged"] is True
    assert report["result"] == -1
    assert report["seen"] == 1


def test_nothing_of_it_touches_another_gpu(gpus: GPUs) -> None:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs, and the driver shows {len(gpus.visible)}")
    report = run_program("staged_on_second_device")
    assert report["result"] == -3
    assert report["contexts"] == [False, True]
    assert report["not staged"] == []
