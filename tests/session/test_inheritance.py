"""The guard in processes that a guarded one starts: they inherit it, until uninstall()."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import site
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortgpu import errors
from ortgpu.session.guard import guard, inheritance
from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.models import Models
from tests.support.children import ROOT, child_environment, run_child

PROGRAM = ROOT / "tests" / "programs" / "guarded_children.py"
ON_CPU = "CPUExecutionProvider"
WAYS = [*multiprocessing.get_all_start_methods(), "subprocess"]


def start(models: Models, *ways: str, **variables: str) -> dict[str, Any]:
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ENFORCE": None, **variables})
    found = run_child([sys.executable, str(PROGRAM), str(models.relu), *ways], env=env, deadline=100).ok().json
    assert isinstance(found, dict)
    return found


def test_workers_by_every_start_method_are_guarded_until_uninstall(models: Models) -> None:
    found = start(models, *WAYS)
    for way in WAYS:
        assert issubclass(getattr(errors, found.pop(way), int), errors.GPUError), f"{way}: the CPU, without a word"
    assert found == {"uninstalled": ON_CPU, "changed": ["ORTGPU_ENFORCE"], "restored": True}


def test_a_worker_inherits_the_exceptions(models: Models) -> None:
    found = start(models, "spawn", TESTS_EXCEPT="relu.onnx")
    changed = ["ORTGPU_ENFORCE", "ORTGPU_ENFORCE_EXCEPT"]
    assert found == {"spawn": ON_CPU, "uninstalled": ON_CPU, "changed": changed, "restored": True}


def test_workers_where_ortgpu_is_on_the_path_only(lab: Lab, models: Models) -> None:
    machine: Machine = lab.machine(env={"PYTHONPATH": str(ROOT)})
    machine.overlay.remove("ortgpu_enforce.pth")
    found = machine.run(argv=[str(PROGRAM), str(models.relu), "spawn", "subprocess"]).ok().json
    refused = "DriverNotFoundError"
    assert (found["spawn"], found["subprocess"], found["uninstalled"]) == (refused, refused, ON_CPU)
    assert (found["changed"], found["restored"]) == (["ORTGPU_ENFORCE", "PYTHONPATH"], True)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("ORTGPU_ENFORCE", "ORTGPU_ENFORCE_EXCEPT", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # the end of the test restores it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("value", ["1", "yes", '"1"'])
def test_a_variable_that_says_yes_stays_as_it_is(variables: pytest.MonkeyPatch, value: str) -> None:
    variables.setenv("ORTGPU_ENFORCE", value)
    inheritance.hand_on(())
    assert os.environ["ORTGPU_ENFORCE"] == value
    inheritance.take_back()
    assert os.environ["ORTGPU_ENFORCE"] == value


def test_a_variable_that_says_no_comes_back(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("ORTGPU_ENFORCE", "0")
    inheritance.hand_on(())
    inheritance.hand_on(())
    assert os.environ["ORTGPU_ENFORCE"] == "1", "the program asks for the guard itself"
    inheritance.take_back()
    assert os.environ["ORTGPU_ENFORCE"] == "0"


def test_a_variable_that_the_program_changes_meanwhile_stays(variables: pytest.MonkeyPatch) -> None:
    inheritance.hand_on(("nudenet",))
    variables.setenv("ORTGPU_ENFORCE_EXCEPT", "other")
    inheritance.take_back()
    assert "ORTGPU_ENFORCE" not in os.environ
    assert os.environ["ORTGPU_ENFORCE_EXCEPT"] == "other"


def test_the_path_changes_only_where_python_does_not_load_the_guard(
    variables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    variables.setattr(site, "ENABLE_USER_SITE", False)
    variables.setenv("PYTHONPATH", "/theirs:")
    inheritance.hand_on(())
    assert os.environ["PYTHONPATH"] == f"{inheritance.STARTUP}{os.pathsep}/theirs:"
    inheritance.take_back()
    assert os.environ["PYTHONPATH"] == "/theirs:"
    for name in ("ortgpu_enforce.pth", "_ortgpu_waiting.py"):
        (tmp_path / name).touch()
    inheritance.hand_on(())
    assert os.environ["PYTHONPATH"] == "/theirs:"
    inheritance.take_back()


def test_a_launcher_s_path_stays_in_its_order(variables: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    path = f"/launcher{os.pathsep}{inheritance.STARTUP}"
    variables.setenv("PYTHONPATH", path)
    inheritance.hand_on(())
    assert os.environ["PYTHONPATH"] == path
    inheritance.take_back()


# How long the guard is in force in this process


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ORTGPU_ENFORCE", raising=False)
    monkeypatch.setattr(guard, "_warned", set())
    assert not guard.is_enforced()
    yield
    guard.uninstall()
    assert not guard.is_enforced()


@pytest.mark.usefixtures("unguarded")
def test_processes_that_start_after_uninstall_are_not_guarded() -> None:
    before = dict(os.environ)
    guard.install()
    assert os.environ["ORTGPU_ENFORCE"] == "1"
    guard.uninstall()
    assert dict(os.environ) == before


@pytest.mark.usefixtures("unguarded")
def test_a_coroutine_is_guarded_until_it_ends() -> None:
    seen: list[bool] = []

    @guard.enforce
    async def work() -> None:
        seen.append(guard.is_enforced())
        await asyncio.sleep(0)
        seen.append(guard.is_enforced())

    def plain() -> Any:
        return work.__wrapped__()  # type: ignore[attr-defined]  # functools.wraps sets it

    for function in (work, guard.enforce(plain)):  # the second is a coroutine function behind another decorator
        asyncio.run(function())
        assert seen == [True, True]
        assert not guard.is_enforced()
        seen.clear()


@pytest.mark.usefixtures("unguarded")
def test_a_block_without_a_session_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with guard.enforce():
                assert guard.is_enforced()
        with pytest.raises(KeyError), guard.enforce():
            raise KeyError  # The block says something more important.
    assert ["no InferenceSession was made" in str(each.message) for each in caught] == [True]
    assert caught[0].filename == __file__
