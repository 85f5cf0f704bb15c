"""Forked children and fresh ones: what a program sees of its process, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.children import Child, child_environment, run_python
from tests.support.fork_server import Forked, ForkServer, find_server, is_idle, run_forked, start_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd_open")


def forked(program: str, *arguments: str, env: Mapping[str, str] | None = None, deadline: float = 60) -> Child:
    find_server(child_environment() if env is None else env)  # The first child with new variables is a fresh one.
    return run_forked(program, *arguments, behind="lab.seen", env=env, deadline=deadline)


@pytest.mark.parametrize("program", ["lab.seen.what_a_program_sees", "what_a_program_sees()"])
def test_a_program_sees_what_it_sees_in_a_fresh_process(program: str) -> None:
    arguments = ("a b", "", "3")
    expected = run_python(program, *arguments, behind="lab.seen")
    child = forked(program, *arguments)
    assert child.reports == expected.reports
    assert (child.returncode, child.stdout, child.stderr) == (3, "out\n", "error\n")
    assert child.command == expected.command


def test_what_it_raises_and_what_kills_it_is_how_it_ended() -> None:
    raised = forked("raise ValueError('of the program')")
    assert (raised.returncode, raised.stderr.splitlines()[-1]) == (1, "ValueError: of the program")
    assert forked("os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL


def test_at_its_deadline_nothing_of_it_is_left() -> None:
    child = forked("lab.seen.a_child_of_its_own", deadline=2)
    assert child.returncode is None
    if "child" in child.reports:  # on a busy machine it may not have come so far
        wait_for_the_end(child.reports["child"])


def wait_for_the_end(pid: int) -> None:
    until = time.monotonic() + 30
    while state_of(pid) != "ended":
        assert time.monotonic() < until
        time.sleep(0.005)


def state_of(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return "ended" if state in "XZ" else state


def test_one_child_sees_nothing_of_another() -> None:
    for _ in range(2):
        forked("assert not hasattr(os, 'left'); os.left = True").ok()


def test_where_no_server_can_start_children_are_fresh(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('of another file')")
    env = child_environment(python_path=[tmp_path])
    find_server(env)  # as another child would
    assert run_forked("print(1)", env=env).ok().stdout == "1\n"
    server = find_server(env)
    assert server is not None
    assert not server.is_ready


def test_a_server_whose_imports_hang_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.01)
    (tmp_path / "onnxruntime.py").write_text("import time; time.sleep(60)")
    server = server_with(env := child_environment(python_path=[tmp_path]))
    assert server.process.returncode == -signal.SIGKILL
    assert run_forked("print(1)", env=env).ok().stdout == "1\n"


def test_after_a_server_was_killed_children_are_fresh() -> None:
    server = server_with(env := child_environment({"SERVER": "killed"}))
    child = sleeping_child(env)
    server.process.kill()
    wait_for_the_end(child.pid)  # The server takes its children along.
    assert run_forked("print(1)", env=env).ok().stdout == "1\n"
    assert not server.is_ready
    with pytest.raises(ConnectionError):
        child.wait(60)


def test_few_servers_are_kept_and_none_ends_that_has_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "MOST_SERVERS", 1)
    variables = [child_environment({"SERVER": str(number)}) for number in range(3)]
    first = server_with(variables[0])
    child = sleeping_child(variables[0])
    second = server_with(variables[1])
    assert child.wait(0) is None  # The first server is there and says so.
    monkeypatch.setattr(fork_server, "MOST_SERVERS", 2)
    assert find_server(variables[0]) is first
    third = server_with(variables[2])
    assert [server.is_ready for server in (first, second, third)] == [True, False, True]
    assert second.process.returncode is not None
    for server in (first, third):
        server.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_servers_and_their_children_end_with_pytest(signum: signal.Signals) -> None:
    child = run_python("lab.seen.ended_by_a_signal", str(int(signum)))
    assert child.returncode == -signum, child.output
    for pid in child.reports["processes"]:
        wait_for_the_end(pid)


def test_a_thread_that_has_ended_is_not_waited_for() -> None:
    assert is_idle("0")  # No thread has this number.


def server_with(env: Mapping[str, str]) -> ForkServer:
    find_server(env)
    server = find_server(env)
    assert server is not None
    return server


def sleeping_child(env: Mapping[str, str]) -> Forked:
    with open(os.devnull, "r+b") as none:
        child = start_forked(["-c", "import time; time.sleep(60)"], env, [none.fileno()] * 3)
    assert child is not None
    return child
