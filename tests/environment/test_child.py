"""Programs with a deadline: their whole output, and nothing of them afterwards."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pytest

from ortgpu.environment import child
from tests.support.made_files import program

DEADLINE = 60.0
ROOT = Path(__file__).parents[2]


def test_all_of_a_child_is_reported() -> None:
    ended = child.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], timeout=DEADLINE)
    assert ended == child.Ended(3, "out\n", "err\n")
    assert not ended.ok


def test_a_child_that_cannot_be_started() -> None:
    ended = child.run(["/no/such/program"], timeout=DEADLINE)
    assert (ended.returncode, ended.timed_out) == (None, False)
    assert "/no/such/program" in ended.errors
    assert child.run(["/bin/sh\0"], timeout=DEADLINE).returncode is None


def process_is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a descriptor of a process is Linux's")
def test_nothing_survives_the_deadline(tmp_path: Path) -> None:
    """Neither the child nor what it started in its group, which holds the output open."""
    code = "sleep 300 & echo $! > pid; echo started; wait"
    ended = child.run(["/bin/sh", "-c", f"cd '{tmp_path}'; {code}"], timeout=1.0)
    assert (ended.returncode, ended.timed_out, ended.output) == (None, True, "started\n")
    try:
        left = os.pidfd_open(int((tmp_path / "pid").read_text(encoding="utf-8")))
    except ProcessLookupError:
        return
    with open(left, "rb"):
        assert select.select([left], [], [], DEADLINE)[0], "it goes on"


@pytest.mark.lab
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc tells which processes there are")
def test_output_held_by_what_left_the_group_is_not_waited_for(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(left.pid))
print("done", flush=True)
os._exit(7)
"""
    started = time.monotonic()
    ended = child.run([sys.executable, "-c", code], timeout=DEADLINE)
    assert time.monotonic() - started < DEADLINE / 2
    left = int((tmp_path / "pid").read_text(encoding="utf-8"))
    try:
        assert (ended.returncode, ended.timed_out, ended.output) == (7, False, "done\n")
        assert process_is_there(left)
    finally:
        os.kill(left, 9)


def test_a_launcher_gets_the_time_to_end_what_it_started(tmp_path: Path) -> None:
    """As mpirun, whose processes are in groups of their own."""
    launcher = program(tmp_path / "launcher", "trap 'echo ended by hand; exit 0' TERM", "sleep 300 & wait")
    ended = child.run([str(launcher)], timeout=1.0, grace=30.0)
    assert (ended.returncode, ended.timed_out, ended.output) == (None, True, "ended by hand\n")


def test_python_child_sees_the_search_path_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/made/up")
    ended = child.run_python("print(sys.path[0], sys.argv[1])", "word", timeout=DEADLINE)
    assert ended.output == "/made/up word\n"


FLAGS = {"-I": "isolated", "-E": "ignore_environment", "-s": "no_user_site", "-S": "no_site", "-P": "safe_path"}
_OF_A_CHILD = """
import sys
sys.path[:] = eval(sys.argv[1])
from ortgpu.cli import demo
from ortgpu.environment import child
ended = child.run_python("print(*map(int, sys.flags), sys.path)", timeout=60)
print(ended.output == " ".join(map(str, [*map(int, sys.flags), sys.path])) + "\\n", ended.errors)
print(demo.observe(timeout=60).observed.get("process"))
"""


@pytest.mark.parametrize("option", FLAGS)
def test_python_child_leaves_out_what_this_interpreter_leaves_out(option: str, tmp_path: Path) -> None:
    """What PYTHONPATH has is then not this environment's, a broken sitecustomize for instance; nor is PYTHONHOME."""
    if not hasattr(sys.flags, FLAGS[option]):
        pytest.skip(f"this Python has no {option}")
    environ = dict(os.environ)
    if option in ("-I", "-E"):
        (tmp_path / "sitecustomize.py").write_text("import os; os._exit(9)", encoding="utf-8")
        environ.update(PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere")
    command = [sys.executable, option, "-c", _OF_A_CHILD, repr([str(ROOT), *sys.path])]
    ended = child.run(command, timeout=DEADLINE, environ=environ, together=True)
    assert ended.output == "True \nNone\n"


@pytest.mark.parametrize(
    ("returncode", "cause"),
    [(0, None), (3, None), (255, None), (-11, "SIGSEGV"), (0xC0000005, "exception 0xC0000005"), (-200, "signal 200")],
)
def test_what_ended_a_process(returncode: int, cause: str | None) -> None:
    assert child.cause_of_death(returncode) == cause


def test_answer_among_what_libraries_print() -> None:
    output = 'warning: {"a": 1}\n["9.9", "MPICH", [5, 0]]\n7\nfinalised\n'
    assert child.parse_answer(output) == ["9.9", "MPICH", [5, 0]]
    assert child.parse_answer("nothing\n") is None
    assert child.parse_answer("") is None
