"""Sessions that name no device, in the processes of a job that has several on this host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab, with_gpus

OPENED = "session.ranks_without_device.opened"


@pytest.fixture
def opened(lab: Lab, provider_library: str) -> Any:
    def opened(*arguments: str, gpus: int = 2, **variables: str) -> Any:
        machine = with_gpus(lab.machine_that_places(provider_library), gpus)
        return machine.run_program(OPENED, str(lab.models.relu), *arguments, env=variables).ok().json

    return opened


RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
QUIET = [0, 0, True]


def test_a_rank_is_told_that_all_are_on_one_gpu(opened: Any) -> None:
    found = opened(**RANK_1)
    assert found == {"plain": [0, 1, True], "named": QUIET, "by option": QUIET, "guarded": [0, 1, True]}


@pytest.mark.parametrize(("current", "warnings"), [("1", 0), ("0", 1), ("-1", 1)])
def test_the_current_device_of_pytorch_is_the_ranks(opened: Any, current: str, warnings: int) -> None:
    """-1: PyTorch has not used CUDA. The guard leaves a session where its library has put it."""
    found = opened(current, **RANK_1)
    assert found["plain"] == [max(int(current), 0), warnings, True]
    assert found["guarded"] == [0, 1, True]
    assert found["named"] == QUIET


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({**RANK_1, "RANK": "0", "LOCAL_RANK": "0"}, 2),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 2),
        ({"LOCAL_RANK": "1"}, 2),
        (RANK_1, 1),
        ({}, 2),
    ],
    ids=["first rank", "alone on its host", "a variable alone", "one GPU", "no job"],
)
def test_no_other_process_is_told(opened: Any, variables: dict[str, str], gpus: int) -> None:
    found = opened(gpus=gpus, **variables)
    assert set(map(tuple, found.values())) == {tuple(QUIET)}


def test_a_variable_alone_does_not_make_it_a_rank(opened: Any) -> None:
    assert opened("1", LOCAL_RANK="1")["plain"] == QUIET
