"""Many models in one budget: what is opened, closed and opened again, under threads, and what wrong use says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.errors import GPUOutOfMemoryError, InsufficientDeviceMemoryError
from ortgpu.session import models as models_module
from ortgpu.session.models import GPUModels
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.cpu_session import child
from tests.support.made_sessions import L4

module: Any = models_module
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


# The budget, with sessions that are made up: each holds what a test says.


class Opened:
    """A session of ``GPUModels``: on the second GPU, with what it was opened with."""

    def __init__(self, path: str, *, device: Any = None, memory: int | None = None) -> None:
        self.name, self.asked, self.memory = Path(path).stem, device, memory
        self.device = L4
        self.is_closed = False
        self.reserved = 0
        self.needed = 0  # a run that has less memory fails

    def run(self, names: Any, feed: Any, options: Any = None) -> Any:
        assert not self.is_closed, "a session was closed under its run"
        if feed and self.memory is not None and self.memory < feed["bytes"]:
            raise GPUOutOfMemoryError("the GPU ran out of memory", requested=feed["bytes"] - self.memory)
        return [self.name]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Opened]:
    """The sessions that were opened, of files in the working directory."""
    opened: list[Opened] = []

    def make(path: str, **arguments: Any) -> Opened:
        opened.append(Opened(path, **arguments))
        return opened[-1]

    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        (tmp_path / f"{name}.onnx").write_bytes(b"")
    monkeypatch.setattr(module, "gpu_session", SimpleNamespace(GPUSession=make))
    monkeypatch.setattr(module, "bytes_of_weights", lambda path, stamp: 50 * MIB)
    monkeypatch.setattr(module.arena, "reserved_bytes", lambda session: session.reserved)
    return opened


SHARE = (50 + 64 + 150) * MIB  # of a model with 50 MiB of weights, at first


def use(models: GPUModels, *names: str) -> None:
    for name in names:
        assert models[f"{name}.onnx"].run(None, {}) == [name]


def open_names(sessions: list[Opened]) -> list[str]:
    return [session.name for session in sessions if not session.is_closed]


def test_the_least_recently_used_model_is_closed_and_freed(sessions: list[Opened]) -> None:
    with GPUModels(budget=2 * SHARE) as models:
        use(models, "a", "b", "a", "c")
        assert open_names(sessions) == ["a", "c"]
        assert [session.memory for session in sessions] == [SHARE] * 3
        use(models, "b")
        assert open_names(sessions) == ["c", "b"]
        assert [state.state for state in models.health()] == ["closed", "open", "open"]
    assert open_names(sessions) == []


def test_a_model_that_lacks_memory_gets_more_and_then_all(sessions: list[Opened]) -> None:
    """Each time the former session is closed before the next is opened."""
    with GPUModels(budget=10 * SHARE) as models:
        assert models["a.onnx"].run(None, {"bytes": 2 * SHARE}) == ["a"]
        assert models["a.onnx"].run(None, {"bytes": 9 * SHARE}) == ["a"]
        assert [session.memory for session in sessions] == [SHARE, 3 * SHARE, 10 * SHARE]
        assert open_names(sessions) == ["a"]
        with pytest.raises(GPUOutOfMemoryError):
            models["a.onnx"].run(None, {"bytes": 11 * SHARE})


def test_the_memory_that_a_model_needed_is_its_share_when_it_opens_again(sessions: list[Opened]) -> None:
    with GPUModels(budget=4 * SHARE) as models:
        use(models, "a")
        sessions[0].reserved = 800 * MIB
        use(models, "b", "c", "d")
        with models["b.onnx"].session(), models["c.onnx"].session(), models["d.onnx"].session():
            assert models["a.onnx"]._models._close(models["a.onnx"])
        use(models, "a")
        assert [(session.name, session.memory) for session in sessions][-1] == ("a", (800 + 100 + 150) * MIB)
        assert open_names(sessions) == ["a"]


def test_a_model_with_a_call_that_comes_meanwhile_stays_open(sessions: list[Opened]) -> None:
    """A thread may see the session between the look at the calls and the close."""
    models = GPUModels(budget=2 * SHARE)
    use(models, "a")
    model = models["a.onnx"]

    class Calls(list[int]):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            return self.looks > 1

    model._calls = Calls()
    assert not models._close(model)
    assert open_names(sessions) == ["a"]
    assert model._session is not None
    model._calls = []
    models.close()


def test_models_on_any_gpu_stay_on_the_first_that_was_chosen(sessions: list[Opened]) -> None:
    """A budget is of one GPU."""
    with GPUModels(budget=4 * SHARE, device="auto") as models:
        use(models, "a", "b")
        assert [session.asked for session in sessions] == ["auto", L4.ordinal]


def test_the_last_error_is_that_of_the_last_opening(sessions: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    error = InsufficientDeviceMemoryError("the GPU has too little memory")
    working = module.gpu_session

    def refuse(path: str, **arguments: Any) -> Opened:
        raise error

    with GPUModels() as models:
        monkeypatch.setattr(module, "gpu_session", SimpleNamespace(GPUSession=refuse))
        with pytest.raises(InsufficientDeviceMemoryError):
            use(models, "a")
        assert models.health()[0].last_error is error
        monkeypatch.setattr(module, "gpu_session", working)
        use(models, "a")
        health = models.health()[0]
        assert (health.last_error, health.opened, health.device) == (None, 1, str(L4))
        assert 0 <= health.idle < 60  # type: ignore[operator]  # it was used
