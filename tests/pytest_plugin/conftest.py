"""Inner runs of pytest, in this process or in one of their own, with the plugin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import ortgpu.environment.gpu.driver  # what only inner runs import, pytester takes out of sys.modules after each
import ortgpu.pytest_plugin
import ortgpu.session.lazily
from tests.pytest_plugin.inner import PLUGIN, Faked, Memory, Run, Session

DEADLINE = 100.0


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("ORTGPU_GPU", "ORTGPU_REQUIRE_GPU", "ORTGPU_ALLOW_CPU")
    of_pytest = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "CI", "BUILD_NUMBER")  # with the last two its summary says more
    for name in ours + of_pytest:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Faked:
    return Faked(monkeypatch)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of sessions: they are not real."""
    log: list[str] = []
    monkeypatch.setattr(Session, "log", log, raising=False)
    monkeypatch.setattr(ortgpu.session.lazily, "gpu_session_class", lambda: Session)
    return log


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An inner run in this process, with no other plugin: pytest would compile each of them anew."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments)

    return run


@pytest.fixture
def run_child(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An inner run in a process of its own, which can import ortgpu and these tests."""
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))

    def run(*arguments: str) -> pytest.RunResult:
        command = (sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-ra", *arguments)
        return pytester.run(*command, timeout=DEADLINE)

    return run


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)
