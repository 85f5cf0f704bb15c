"""A session that is opened again, because a run that was out of memory left a convolution with a wrong plan.

What ONNX Runtime says of such a run is quoted. The arena is its own, over libraries of CUDA that count memory and
compute nothing. The GPU tests have a real convolution (tests/gpu/test_memory.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import older_than

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python

PROGRAM = "session.reopening.program"


@pytest.fixture(scope="module")
def reopened(module_lab: Lab, provider_library: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    machine = module_lab.machine_that_places(provider_library)
    folder = tmp_path_factory.mktemp("reopened")
    return machine.run_program(PROGRAM, str(folder), timeout=120).ok().json


def test_other_operators_have_no_plan(reopened: Any) -> None:
    assert reopened["words"] == ["GPUOutOfMemoryError"] * 2
    assert reopened["another operator"]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose", "FusedConv"])
def test_the_next_use_opens_the_session_again_and_frees_the_former_one_first(reopened: Any, operator: str) -> None:
    assert reopened[operator] == [[1, MIB // 4], False]
    held, arena = reopened[f"{operator} held"]
    assert held == arena


def test_a_session_that_was_opened_again_has_the_same_request(reopened: Any) -> None:
    assert reopened["request"]


def test_each_way_to_use_a_session_opens_it_again(reopened: Any) -> None:
    assert [name for name, is_new, is_outdated in reopened["ways"] if is_outdated or not is_new] == []


def test_threads_do_not_notice(reopened: Any) -> None:
    assert reopened["threads"] == [[], [1, MIB // 4]]


def test_without_room_each_use_tries_again(reopened: Any) -> None:
    assert [each[0] for each in reopened["no room"]] == ["GPUOutOfMemoryError"] * 2, reopened["no room"]
    assert reopened["then"] == [1, MIB // 4]


def test_a_session_without_a_budget_is_opened_again(reopened: Any) -> None:
    assert reopened["unlimited"] == [[1, MIB // 4], True]


def test_without_the_models_file_the_session_is_closed(reopened: Any) -> None:
    first, second = reopened["no file"]
    assert first[0] == second[0] == "ExecutionError"
    assert first[1].startswith("a run was out of memory, and this session cannot be opened again")
    assert second[1] == "this GPUSession is closed"
    assert reopened["closed"] == 0
