"""Child processes with a channel: what they inherit, answer and log, and how their end is told."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortgpu.environment.child_process import ChildFailedError, ChildProcess
from tests.support.children import Child, run_child

FUNCTIONS = "tests.programs.child_functions"
DEADLINE = 30.0
posix = pytest.mark.skipif(sys.platform == "win32", reason="asks for signals, groups or limits of POSIX")


def host(condition: str) -> Child:
    return run_child([sys.executable, "-m", "tests.programs.child_hosts", condition])


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_functions_are_called_one_after_another() -> None:
    with ChildProcess() as child:
        pid = child.ask("os:getpid", timeout=DEADLINE)
        assert pid == child.process.pid
        assert child.ask("os.path:join", "a", "b", timeout=DEADLINE) == os.path.join("a", "b")
        notes: list[Any] = []
        assert child.ask(f"{FUNCTIONS}:tell_and_return", 3, timeout=DEADLINE, on_note=notes.append) == "returned"
        assert notes == [0, 1, 2]
        facts = child.ask(f"{FUNCTIONS}:facts", timeout=DEADLINE)
        assert facts["path"] == sys.path
        assert facts["stdin"] == ""
        if sys.platform != "win32":
            assert facts["group"] == pid
    assert not child.is_alive


def test_what_a_function_raises_is_raised() -> None:
    with ChildProcess() as child:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            child.ask("os:listdir", "nowhere", timeout=DEADLINE)
        with pytest.raises(RuntimeError, match="UnpicklableError: 1 and 2"):
            child.ask(f"{FUNCTIONS}:raise_unpicklable", timeout=DEADLINE)
        with pytest.raises(ModuleNotFoundError):
            child.ask("no_such_module:f", timeout=DEADLINE)
        with pytest.raises(TypeError):  # neither a result nor an argument has to pickle
            child.ask("threading:Lock", timeout=DEADLINE)
        with pytest.raises(Exception, match="pickle"):
            child.ask("os:getpid", lambda: None, timeout=DEADLINE)
        with pytest.raises(SystemExit):
            child.ask("sys:exit", 3, timeout=DEADLINE)
        assert child.ask("os:getpid", timeout=DEADLINE) == child.process.pid


def test_log_records_reach_the_loggers_of_this_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ortgpu"), ChildProcess() as child:
        child.ask(f"{FUNCTIONS}:log", "ortgpu.words", "one", "two", timeout=DEADLINE)
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("ortgpu.words", "one"),
        ("ortgpu.words", "two"),
    ]


def test_a_log_filter_that_raises_ends_nothing() -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    logger = logging.getLogger("ortgpu.words")
    logger.addFilter(refuse)
    try:
        with ChildProcess() as child:
            child.ask(f"{FUNCTIONS}:log", "ortgpu.words", "one", timeout=DEADLINE)
    finally:
        logger.removeFilter(refuse)


def test_a_deadline_ends_it() -> None:
    with ChildProcess() as child:
        with pytest.raises(ChildFailedError, match="it did not end in time") as caught:
            child.ask("time:sleep", 600, timeout=0.1)
        assert caught.value.timed_out
        assert not child.is_alive


@posix
@pytest.mark.parametrize(
    ("function", "arguments", "cause"),
    [("os:abort", (), "SIGABRT"), ("os:_exit", (7,), "exit status 7"), ("os:_exit", (0,), "exit status 0")],
)
def test_its_end_is_told_with_the_cause(function: str, arguments: tuple[Any, ...], cause: str) -> None:
    with ChildProcess() as child, pytest.raises(ChildFailedError, match=f"^the process ended: {cause}$"):
        child.ask(function, *arguments, timeout=DEADLINE)


@posix
def test_one_that_was_killed_by_somebody() -> None:
    with ChildProcess() as child:
        child.ask("os:getpid", timeout=DEADLINE)
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(ChildFailedError, match="SIGKILL"):
            child.ask("os:getpid", timeout=DEADLINE)


@posix
def test_one_that_stands_still_is_killed_at_the_deadline() -> None:
    """It takes no large argument either: the sender must not wait for it."""
    with ChildProcess() as child:
        child.ask("os:getpid", timeout=DEADLINE)
        os.kill(child.process.pid, signal.SIGSTOP)
        with pytest.raises(ChildFailedError, match="it did not end in time"):
            child.ask("builtins:len", b"x" * 50_000_000, timeout=0.2)
        assert not child.is_alive


def test_output_is_kept() -> None:
    with ChildProcess(keeps_output=True) as child:
        with pytest.raises(ChildFailedError):
            child.ask(f"{FUNCTIONS}:write_and_abort", "one two", timeout=DEADLINE)
        assert child.output().startswith(b"one two")


@posix
def test_its_group_is_killed_with_it() -> None:
    with ChildProcess() as child:
        grandchild = child.ask(f"{FUNCTIONS}:start_grandchild", 600, timeout=DEADLINE)
    assert eventually(lambda: is_gone(grandchild))


@posix
def test_its_group_is_killed_after_its_own_end() -> None:
    with ChildProcess() as child:
        grandchild = child.ask(f"{FUNCTIONS}:start_grandchild", 600, timeout=DEADLINE)
        with pytest.raises(ChildFailedError):
            child.ask("os:_exit", 1, timeout=DEADLINE)
        assert eventually(lambda: is_gone(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_program_that_it_starts_inherits_nothing() -> None:
    descriptor = os.memfd_create("ortgpu-private")
    try:
        with ChildProcess(descriptors=[descriptor]) as child:
            found = child.ask(f"{FUNCTIONS}:descriptors_of_program", timeout=DEADLINE)
    finally:
        os.close(descriptor)
    assert not [each for each in found if "socket" in each or "ortgpu" in each]


@posix
def test_a_program_with_sigpipe_at_its_default_survives() -> None:
    assert host("sigpipe_at_default").ok().reports["survived"]


@posix
def test_an_ignored_sigchld_is_no_exit_status_of_0() -> None:
    assert "not known, since this program ignores SIGCHLD" in host("sigchld_ignored").ok().reports["error"]


@posix
@pytest.mark.parametrize(("condition", "words"), [("few_descriptors", "ulimit -n"), ("frozen", "interpreter")])
def test_one_that_cannot_be_started_is_a_typed_error(condition: str, words: str) -> None:
    refused = host(condition).ok().reports["refused"]
    assert refused["code"] == "execution-error"
    assert words in str(refused["fixes"])


@posix
@pytest.mark.parametrize("condition", ["no_input", "no_files"])
def test_one_starts_without_what_it_does_not_need(condition: str) -> None:
    host(condition).ok()


@pytest.mark.skipif(sys.platform != "linux", reason="asks for a limit of Linux, of 128 KiB for an argument")
def test_a_long_search_path_travels() -> None:
    assert host("long_path").ok().reports["same"]


@posix
@pytest.mark.parametrize("condition", ["end_without_closing"])
def test_none_outlives_its_parent(condition: str) -> None:
    grandchild = host(condition).reports["grandchild"]
    assert eventually(lambda: is_gone(grandchild))


@posix
def test_its_death_is_seen_though_a_fork_holds_its_socket() -> None:
    assert host("fork_holds_the_socket").ok().reports["error"] == "the process ended: SIGABRT"
