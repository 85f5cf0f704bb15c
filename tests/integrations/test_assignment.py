"""Which GPU Ray assigned to a worker, and whether a session may have it. Ray itself: test_ray_matrix.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ortgpu.distributed import Rank
from ortgpu.environment.gpu.driver import GPU
from ortgpu.errors import RankDeviceError
from ortgpu.integrations.ray import assignment

H200 = "NVIDIA H200"


def gpu(index: int, *, name: str = H200, mig_uuids: tuple[str, ...] = ()) -> GPU:
    return GPU(index, f"GPU-{index}{index}{index}{index}", name, (9, 0), None, None, None, None, mig_uuids, None)


# Where Ray is not installed


# Which GPU


def test_a_worker_without_a_gpu_is_told_what_it_would_see() -> None:
    unset, empty = (assignment.none_assigned(visible).evidence[-1] for visible in (None, ""))
    assert unset == "CUDA_VISIBLE_DEVICES is not set: CUDA shows it every GPU of the node"
    assert empty == "CUDA_VISIBLE_DEVICES="  # what older releases of Ray did: it would see none


def refused(assigned: list[str], visible: str | None, device: Any = None, kept: bool = True) -> RankDeviceError | None:
    return assignment.refusal(assigned, visible, device, kept_by_ray=kept)


@pytest.mark.parametrize(
    ("assigned", "visible", "device"),
    [
        (["0"], "0", None),
        (["1"], "1", 0),
        (["GPU-0000"], "GPU-0000", None),
        (["1", "0"], "0,1", "cuda:1"),  # Ray hands the ids out in no order
        (["0", "1"], "0, 1", "auto"),
    ],
)
def test_what_ray_assigned_is_taken(assigned: list[str], visible: str, device: Any) -> None:
    assert refused(assigned, visible, device) is None


def test_several_gpus_need_a_choice() -> None:
    error = refused(["0", "1"], "0,1")
    assert error is not None
    assert "2 GPUs" in error.summary
    assert any("num_gpus=1" in fix for fix in error.fixes)
    assert any('device="cuda:0"' in fix for fix in error.fixes)


@pytest.mark.parametrize("visible", [None, "", "0", "0,1"])
def test_cuda_must_show_what_ray_assigned(visible: str | None) -> None:
    error = refused(["1"], visible, "cuda:0")
    assert error is not None
    assert "GPU 1" in error.summary
    assert any("CUDA_VISIBLE_DEVICES" in fact for fact in error.evidence)
    assert "leave CUDA_VISIBLE_DEVICES to Ray" in error.fixes[0]


def test_the_variable_that_keeps_ray_from_setting_it_is_named() -> None:
    error = refused(["1"], None, kept=False)
    assert error is not None
    assert f"{assignment.NOSET} is set" in error.evidence
    assert error.fixes[0] == f"start Ray without {assignment.NOSET}"
    assert error.fixes[0].needs == "host"


ALIKE = [gpu(0), gpu(1)]
MIXED = [gpu(0), gpu(1, name="NVIDIA T4")]


@pytest.mark.parametrize(
    ("assigned", "gpus", "order", "expected"),
    [
        (["1"], ALIKE, None, {"GPU-1111"}),
        (["0", "1"], ALIKE, None, {"GPU-0000", "GPU-1111"}),
        (["1"], MIXED, None, None),  # CUDA's number 1 is the slower one, NVML's the one further along the bus
        (["1"], MIXED, "FASTEST_FIRST", None),
        (["1"], MIXED, "PCI_BUS_ID", {"GPU-1111"}),
        (["GPU-1111"], MIXED, None, {"GPU-1111"}),
        (["MIG-22"], ALIKE, None, {"MIG-22"}),
        (["2"], ALIKE, None, None),
        (["0"], [], None, None),  # NVML cannot be asked
        (["0"], [replace(ALIKE[0], uuid=None)], None, None),
        (["0"], [gpu(0, mig_uuids=("MIG-22", "MIG-33"))], None, {"GPU-0000", "MIG-22", "MIG-33"}),
    ],
)
def test_uuids_that_ray_means(assigned: list[str], gpus: list[GPU], order: str | None, expected: Any) -> None:
    assert assignment.uuids_of(assigned, gpus, order) == expected


@pytest.mark.parametrize(
    ("uuid", "allowed", "expected"),
    [
        ("GPU-1111", {"GPU-1111"}, True),
        ("GPU-1111", {"GPU-0000"}, False),
        ("GPU-1111", {"GPU-0000", "gpu-11"}, True),  # CUDA_VISIBLE_DEVICES takes the beginning of a UUID
        ("GPU-2222", {"MIG-2222"}, True),
        ("GPU-1111", set(), False),
    ],
)
def test_a_uuid_among_others(uuid: str, allowed: set[str], expected: bool) -> None:
    assert assignment.is_among(uuid, allowed) is expected


def test_a_session_elsewhere_names_both_gpus() -> None:
    error = assignment.elsewhere("GPU-1111", {"GPU-0000"})
    assert any("GPU-1111" in fact for fact in error.evidence)
    assert any("GPU-0000" in fact for fact in error.evidence)


# Where ranks go


def test_ranks_count_within_their_node() -> None:
    assert assignment.ranks_of(["b", "a", "b"]) == [Rank(0, 3, 0, 2), Rank(1, 3, 0, 1), Rank(2, 3, 1, 2)]
    assert assignment.ranks_of(["a"]) == [Rank(0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("places", "address"),
    [
        ([("a", "10.0.0.1", 1234), ("a", "10.0.0.1", 99)], "127.0.0.1:1234"),
        ([("a", "10.0.0.1", 1234), ("b", "10.0.0.2", 99)], "10.0.0.1:1234"),
        ([("a", "fd00::1", 1234), ("b", "fd00::2", 99)], "[fd00::1]:1234"),
    ],
)
def test_ranks_meet_at_rank_0(places: list[tuple[str, str, int]], address: str) -> None:
    assert assignment.address_of(places) == address
