"""Sessions that name no device, in the processes of a job that has several on this host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab, with_gpus

OPENED = """
import sys, types, warnings
from ortgpu import GPUSession
import ortgpu, onnxruntime
model = sys.argv[1]
if len(sys.argv) > 2:  # as much of PyTorch as is asked for its current device
    is_used, current = int(sys.argv[2]) >= 0, lambda: int(sys.argv[2])
    sys.modules["torch"] = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: is_used, current_device=current)
    )

def opened(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = make()
    said = [str(warning.message) for warning in caught if "for_rank" in str(warning.message)]
    files = [warning.filename for warning in caught if "for_rank" in str(warning.message)]
    return [session.device.ordinal, len(said), set(files) <= {"<string>"}]

def guarded():
    with ortgpu.enforce():
        return onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])

options = [("CUDAExecutionProvider", {"device_id": 0})]
report({
    "plain": opened(lambda: GPUSession(model)),
    "named": opened(lambda: GPUSession(model, device=0)),
    "by option": opened(lambda: GPUSession(model, providers=options)),
    "guarded": opened(guarded),
})
"""


@pytest.fixture
def opened(lab: Lab, provider_library: str) -> Any:
    def opened(*arguments: str, gpus: int = 2, **variables: str) -> Any:
        machine = with_gpus(lab.machine_that_places(provider_library), gpus)
        return machine.run(OPENED, argv=[str(lab.models.relu), *arguments], env=variables).ok().json

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
