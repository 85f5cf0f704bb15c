"""Sessions on all GPUs of this machine, and several on one of them, behind one ``run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.this_machine import GPUs

from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"


@pytest.fixture
def two_gpus(gpus: GPUs) -> None:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")


@pytest.fixture(scope="module", params=[1, 2])
def pooled(request: pytest.FixtureRequest) -> tuple[int, Report]:
    count: int = request.param
    return count, run_program("pooled", {"sessions_per_device": count}, deadline=150)


def test_every_gpu_has_its_sessions(pooled: tuple[int, Report], gpus: GPUs) -> None:
    count, report = pooled
    uuids = [gpu.uuid for gpu in gpus.visible]
    assert report["devices"] == uuids
    assert report["sessions"] == [[uuid, CUDA] for uuid in uuids] * count
    assert report["length"] == count * len(uuids)
    assert report["contexts"] == [True] * len(uuids)
    assert len(report["creators"]) == 1
    assert "pooling.py" in report["creators"][0]


def test_results_are_right_and_in_order(pooled: tuple[int, Report]) -> None:
    _, report = pooled
    assert report.returned("run") == [-7, -7]
    assert report.returned("submit") == [[-3, -3]]
    assert report.returned("map, small") == [-n for n in range(500)]
    assert report.returned("map, staged") == [-n for n in range(60)]


def test_nothing_is_left_when_it_is_closed(pooled: tuple[int, Report]) -> None:
    _, report = pooled
    before, after = report["free"]
    for had, has in zip(before, after, strict=True):
        assert had is None or had - has < 64 << 20
    assert report["threads"] == []
    assert report.child.returncode == 0, report.child.output
    assert report.complaints() == []


@pytest.mark.ortgpu(count=2)
@pytest.mark.usefixtures("two_gpus")
def test_two_gpus_have_two_names(pooled: tuple[int, Report]) -> None:
    _, report = pooled
    assert len(set(report["devices"])) > 1


@pytest.fixture(scope="module")
def refused() -> Report:
    return run_program("pool_refused")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("not there", "DeviceNotFoundError"), ("twice", "ProviderRequestError"), ("option", "ProviderOptionError")],
)
def test_what_cannot_be_had_is_refused(refused: Report, name: str, expected: str) -> None:
    assert refused.error(name).type == expected
    assert refused["left"] == 0


def test_a_gpu_may_be_named_by_its_uuid(refused: Report) -> None:
    assert refused.returned("by uuid") == 2


def test_a_request_too_large_takes_no_gpu_out(gpus: GPUs) -> None:
    report = run_program("pool_out_of_memory")
    assert report.error("run").type == "GPUOutOfMemoryError"
    assert report.returned("next") == [-n for n in range(20)]
    assert report["sizes"] == [2 * len(gpus.visible), 0]


@pytest.fixture(scope="module")
def poison() -> Report:
    return run_program("pool_poisoned")


@pytest.mark.parametrize("name", ["poison", "run", "map", "new pool"])
def test_a_sticky_error_of_one_session_ends_all(poison: Report, name: str) -> None:
    assert poison.returned("before") == [-n for n in range(20)]
    error = poison.error(name)
    assert error.type == "PoisonedContextError"
    assert error.fields["cuda_code"] == 700


def test_a_poisoned_pool_is_empty_and_its_process_ends_by_itself(poison: Report, gpus: GPUs) -> None:
    assert poison["sizes"] == [0, len(gpus.visible)]
    assert poison.returned("close") is None
    assert poison.child.returncode == 0, poison.child.output


def test_the_poisoned_gpu_serves_nobody(poison: Report) -> None:
    """That CUDA ends the whole process is its documentation; on the GPU of the error it can be seen."""
    if poison["poisoned"] != 0:
        outcome: dict[str, Any] = poison["plain session on the first GPU"]
        pytest.skip(f"the error was on another GPU, where plain ONNX Runtime then gave {outcome}")
    assert "illegal memory access" in poison.error("plain session on the first GPU").text


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    report = run_program("pool_forked")
    assert report.error("child: run").type == "ForkedSessionError"
    assert report.returned("child: close") is None
    assert report["status"] == 0
    assert report.returned("before") == report.returned("after") == [-n for n in range(20)]
    assert report.child.returncode == 0, report.child.output


@pytest.mark.parametrize("kind", ["session", "pool"])
def test_joined_requests_give_what_separate_ones_do(resnet50: Path, kind: str) -> None:
    report = run_program("batched", {"kind": kind, "model": str(resnet50)}, deadline=150)
    assert report.returned("tasks") < 2e-2
    assert report.returned("futures") < 2e-2
    assert report["sizes"] == [] or report["sizes"][-1] == 16
    before, after = report["free"]
    assert before is None or before - after < 64 << 20
    assert report["threads"] == []
    assert report.error("wrong").type == "InvalidArgument"
    assert report.error("dependent").type == "ProviderRequestError"
    assert "depend on each other" in report.error("dependent").text
    assert report.error("closed").type == "ExecutionError"
    assert report.child.returncode == 0, report.child.output
    assert report.complaints() == []


@pytest.fixture(scope="module", params=[1, 2])
def isolated(request: pytest.FixtureRequest) -> tuple[int, Report]:
    count: int = request.param
    return count, run_program("pool_isolated", {"sessions_per_device": count}, deadline=200)


def test_every_gpu_has_its_worker_processes_and_this_one_uses_none(isolated: tuple[int, Report], gpus: GPUs) -> None:
    count, report = isolated
    uuids = [gpu.uuid for gpu in gpus.visible]
    assert report["devices"] == uuids
    assert report["workers"] == [[uuid, "ready"] for uuid in uuids] * count
    assert report["driver"] == [None, []]


def test_results_of_worker_processes_are_right_and_in_order(isolated: tuple[int, Report]) -> None:
    _, report = isolated
    assert report.returned("run") == [-7, -7]
    assert report.returned("map, small") == [-n for n in range(500)]
    assert report.returned("map, staged") == [-n for n in range(60)]
    assert report.returned("64 MB") == [True] * 20
    assert report.error("wrong").type == "InvalidArgument"


def test_nothing_is_left_of_worker_processes(isolated: tuple[int, Report]) -> None:
    _, report = isolated
    assert report["left"] == []
    for had, has in zip(*report["free"], strict=True):
        assert had is None or had - has < 64 << 20
    assert report["threads"] == []
    assert report.child.returncode == 0, report.child.output
    assert report.complaints() == []


@pytest.fixture(scope="module")
def deaths() -> Report:
    return run_program("pool_isolated_deaths", deadline=200)


def test_a_sticky_error_ends_one_worker_process_after_the_other_and_no_more(deaths: Report, gpus: GPUs) -> None:
    error = deaths.error("poison")
    assert error.type == "WorkerLostError"
    assert error.fields["cause"].startswith("PoisonedContextError: ")
    assert deaths["survivors"] == 2 * len(gpus.visible) - 2
    assert sum(deaths["restarts"]) == 2
    for name in ("before", "after", "meanwhile"):
        assert deaths.returned(name) == [-n for n in range(20)]
    assert deaths["lost"] == 0
    assert deaths.returned("a session here") == [-1, 2]


def test_a_killed_worker_process_is_replaced_on_its_gpu(deaths: Report) -> None:
    assert deaths["noticed"] < 1
    assert deaths["replaced"] < 20
    before, after = deaths["devices"]
    assert before == after
    assert deaths.returned("at the end") == [-n for n in range(50)]
