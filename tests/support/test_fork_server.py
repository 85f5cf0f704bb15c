"""Forked children and fresh ones: what a program sees of its process, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.children import Child, child_environment, run_python
from tests.support.fork_server import find_server, run_forked

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
        until = time.monotonic() + 30
        while state_of(child.reports["child"]) != "ended":
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
