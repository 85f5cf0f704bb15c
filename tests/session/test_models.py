"""Many models in one budget: what is opened, closed and opened again, under threads, and what wrong use says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.cpu_session import child

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python


def test_a_model_is_opened_at_its_first_use_and_by_any_spelling_of_its_path() -> None:
    found = child("session.models.a_model_is_opened_at_its_first_use_and_by_any_spelling_of_its_path")
    assert found == [
        0, [], False, True, ["closed"], [1.0] * 3, ["open"], [[2.0] * 3] * 2,
        [["1.onnx", 1, 0, "cpu", None], ["2.onnx", 1, 0, "cpu", None]], ["1.onnx", "2.onnx"],
        [["closed", "closed"], "ExecutionError", True],
    ]  # fmt: skip


def test_what_is_idle_is_closed_and_opened_again_and_no_thread_is_left() -> None:
    found = child("session.models.what_is_idle_is_closed_and_opened_again_and_no_thread_is_left")
    once = [[3.0] * 3, ["closed"], []]
    assert found == [once * 2, 2, ["open"], ["ortgpu-models"], []]


def test_a_handler_that_closes_amid_a_call_does_not_wait_for_it() -> None:
    found = child("session.models.a_handler_that_closes_amid_a_call_does_not_wait_for_it")
    assert found == [[["closed", "open"], 1.0], ["closed", "closed"], "ExecutionError", ["closed"] * 4, []]


def test_bad_paths_and_broken_models_raise_what_onnxruntime_raises() -> None:
    found = child("session.models.bad_paths_and_broken_models_raise_what_onnxruntime_raises")
    assert found == [True, ["NoSuchFile", "InvalidProtobuf"], True, ["TypeError"] * 3, [7.0] * 3]


def test_arguments_are_checked_when_it_is_made() -> None:
    found = child("session.models.arguments_are_checked_when_it_is_made")
    assert found[0] == [
        "ValueError", "ValueError", "TypeError", "ValueError", "ValueError", "TypeError", "TypeError", "TypeError",
        "TypeError", "TypeError", "ValueError", "ValueError",
    ]  # fmt: skip
    assert found[1] == "TypeError"


def test_on_the_cpu_the_budget_counts_nothing_and_the_log_says_so() -> None:
    found = child("session.models.on_the_cpu_the_budget_counts_nothing_and_the_log_says_so")
    assert found == [[1.0, 2.0, 3.0, 4.0], ["open"] * 4, 4]


def test_threads_use_models_that_come_and_go() -> None:
    """Sessions are closed under the threads that use them, as often as can be, and no call notices."""
    wrong, opened, left = child("session.models.threads_use_models_that_come_and_go")
    assert wrong == []
    assert opened > 8, "each model was closed and opened again"
    assert left == 0


@pytest.fixture(scope="module")
def used(module_lab: Lab, provider_library: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("models")
    machine = module_lab.machine_that_places(provider_library)
    return machine.run_program("session.models_on_gpu.on_gpu", str(folder), timeout=120).ok().json


def test_the_least_recently_used_are_closed_for_others(used: Any) -> None:
    assert used["least recently used"] == ["closed"] * 4 + ["open"] * 2
    assert used["then"] == ["open"] + ["closed"] * 3 + ["open", "closed"]
    memory = [each for each in used["memory"] if each is not None]
    assert len(memory) == 2
    assert sum(memory) <= 600 * MIB


def test_a_run_that_needs_more_gets_more_of_the_budget(used: Any) -> None:
    assert used["large"] == [30 << 18]
    state, opened, memory = used["after large"]
    assert (state, opened) == ("open", 3)
    assert memory > 254 * MIB


def test_a_run_beyond_the_budget_raises_and_the_models_go_on(used: Any) -> None:
    kind, text = used["too large"]
    assert kind == "GPUOutOfMemoryError"
    assert text.startswith("the session's budget of 600 MiB is reached")
    assert used["next"] == [3]


def test_eight_threads_stay_within_the_budget(used: Any) -> None:
    wrong, highest, running = used["threads"]
    assert wrong == []
    assert 40 * MIB < highest <= 600 * MIB
    assert running == 0
    assert used["closed"] == 0


def test_a_thread_does_not_wait_for_itself(used: Any) -> None:
    assert used["nested"].endswith("MiB of the budget are needed, but models in use hold the rest")
