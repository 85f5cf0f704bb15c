"""`ortgpu fix`: the printed commands are run, one after another, until nothing is left that has one."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import pytest
from rich.console import Console

from ortgpu.cli.fix import Repair, run_in_shell
from ortgpu.diagnosis.diagnosing import Diagnosis
from ortgpu.environment.inspection import Environment
from ortgpu.errors import DriverNotFoundError, Fix, GPUError, LibraryNotFoundError, NoDeviceError, manual, python, shell
from tests.support.command_line import DEADLINE, NO_GPU, ortgpu
from tests.support.made_facts import HEALTHY

ENVIRONMENT: Environment = HEALTHY.environment


class Broken:
    """An environment that is whole once all of its files are there. Each missing one is a problem."""

    def __init__(self, folder: Path, **fixes: list[Fix]) -> None:
        self.folder, self.fixes = folder, fixes
        self.looks: list[Mapping[str, str]] = []

    def judge(self, environ: Mapping[str, str]) -> Diagnosis:
        self.looks.append(dict(environ))
        missing = [name for name in self.fixes if not (self.folder / name).exists()]
        problems = [LibraryNotFoundError(f"{name} is missing", fixes=self.fixes[name]) for name in missing]
        return Diagnosis(tuple(problems), ENVIRONMENT)

    def touch(self, name: str) -> Fix:
        return shell(f"touch {shlex.quote(str(self.folder / name))}")


def repaired(
    judge: Callable[[Mapping[str, str]], Diagnosis], confirm: Callable[[], bool] = lambda: True
) -> tuple[Repair, str]:
    screen = io.StringIO()
    repair = Repair(Console(file=screen, width=200, color_system=None, highlight=False), judge)
    repair.run(confirm)
    repair.show_verdict()
    return repair, screen.getvalue()


@pytest.fixture
def two(tmp_path: Path) -> Broken:
    broken = Broken(tmp_path)
    broken.fixes = {"first": [broken.touch("first")], "second": [broken.touch("second")]}
    return broken


def test_one_command_after_another_and_a_look_after_each(two: Broken) -> None:
    repair, text = repaired(two.judge)
    assert repair.ok
    assert [step.exit_status for step in repair.steps] == [0, 0]
    assert len(two.looks) == 3
    assert text.index("first is missing") < text.index("touch ") < text.index("second is missing")
    assert text.splitlines()[-1] == "fixed: a session opens on the GPU"


def test_what_is_declined_does_not_run_and_the_next_is_asked(two: Broken) -> None:
    answers = iter([False, True])
    repair, text = repaired(two.judge, lambda: next(answers))
    assert not repair.ok
    assert [path.name for path in two.folder.iterdir()] == ["second"]
    assert [step.document()["status"] for step in repair.steps] == ["declined", "ran"]
    assert "LibraryNotFoundError: first is missing" in text
    assert text.splitlines()[-1] == "not fixed: library-not-found is left; 1 command ran"


def test_a_command_that_does_not_help_runs_once_and_the_next_fix_is_tried(tmp_path: Path) -> None:
    broken = Broken(tmp_path)
    broken.fixes = {"file": [shell("exit 7"), shell("true"), broken.touch("file")]}
    repair, text = repaired(broken.judge)
    assert repair.ok
    assert [step.exit_status for step in repair.steps] == [7, 0, 0]
    assert "The command ended with 7." in text


def test_root_restarts_other_machines_and_programs_are_printed_and_not_run(tmp_path: Path) -> None:
    mark = shlex.quote(str(tmp_path / "ran"))
    fixes: list[Fix] = [
        shell(f"touch {mark}", needs="root"),
        shell(f"touch {mark} # reboot", needs="reboot"),
        manual("ask somebody"),
        python(f"open({mark!r}, 'w')"),
    ]
    broken = Broken(tmp_path, file=fixes)
    repair, text = repaired(broken.judge)
    assert not repair.ok
    assert list(tmp_path.iterdir()) == []
    assert all(str(fix) in text for fix in fixes)
    assert text.splitlines()[-1] == "not fixed: library-not-found has no command that can run here; its fix is above"


def test_a_consequence_is_left_to_its_cause_and_a_warning_to_its_option(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    touch = shell(f"touch {shlex.quote(str(mark))}")
    problems: tuple[GPUError, ...] = (
        DriverNotFoundError("no driver", fixes=[manual("install one")]),
        NoDeviceError("no device", fixes=[touch], consequence_of="driver-not-found"),
        LibraryNotFoundError("a library", fixes=[touch], severity="warning"),
    )
    repair, _ = repaired(lambda _: Diagnosis(problems, ENVIRONMENT))
    assert (repair.steps, mark.exists()) == ([], False)
    repair = Repair(Console(file=io.StringIO()), lambda _: Diagnosis(problems, ENVIRONMENT), with_warnings=True)
    repair.run(lambda: True)
    assert ([step.exit_status for step in repair.steps], mark.exists()) == ([0], True)


def test_variables_hold_for_the_next_look_and_are_shown_for_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    def judge(environ: Mapping[str, str]) -> Diagnosis:
        hidden, path = "CUDA_VISIBLE_DEVICES" in environ, environ.get("ORTGPU_TEST_PATH")
        problems = [NoDeviceError("hidden", fixes=[shell("unset CUDA_VISIBLE_DEVICES")])] if hidden else []
        if path != "a b":
            problems.append(NoDeviceError("path", fixes=[shell("export ORTGPU_TEST_PATH='a b' && true")]))
        return Diagnosis(tuple(problems), ENVIRONMENT)

    repair, text = repaired(judge)
    assert repair.ok
    assert repair.your_shell == ["unset CUDA_VISIBLE_DEVICES", "export ORTGPU_TEST_PATH='a b'"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    *_, last = text.splitlines()
    assert last == "fixed once your own shell has run the above: a session opens on the GPU"
    for line in repair.your_shell:
        assert f"    {line}" in text.splitlines()


def test_nothing_to_fix_is_said() -> None:
    _, text = repaired(lambda _: Diagnosis((), ENVIRONMENT))
    assert text == "OK: nothing to fix, a session opens on the GPU\n"


def test_a_probe_that_fails_unexplained_is_not_called_fixed() -> None:
    from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep

    failed = ProbeResult((ProbeStep("session", ok=False, detail="odd words"),), True, 0, None, False, None, 0.1, "")
    repair, text = repaired(lambda _: Diagnosis((), ENVIRONMENT, failed))
    assert not repair.ok
    assert text.splitlines()[-1] == "not fixed: no check finds a fault, and the probe failed: session, odd words"


def test_no_answer_stops_and_keeps_what_was_done(two: Broken) -> None:
    def no_answer() -> bool:
        if (two.folder / "first").exists():
            raise click.Abort
        return True

    repair = Repair(Console(file=io.StringIO()), two.judge)
    with pytest.raises(click.Abort):
        repair.run(no_answer)
    assert [path.name for path in two.folder.iterdir()] == ["first"]


def test_an_interrupt_lets_the_command_clean_up(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group, and pip takes back what it has begun: nobody may kill it meanwhile."""
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"
    command = (
        f'{shlex.quote(sys.executable)} -c "import pathlib, signal, sys, time; '
        f"signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.5), pathlib.Path('{cleaned}').touch(), sys.exit(1))); "
        f"pathlib.Path('{begun}').touch(); time.sleep(60)\""
    )
    program = (
        "import os, signal; from ortgpu.cli.fix import run_in_shell; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # which is ignored in the background
        f"run_in_shell({command!r}, dict(os.environ))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(DEADLINE) != 0
    assert cleaned.exists()


def test_a_command_reads_no_answer_of_the_user(tmp_path: Path) -> None:
    status, _ = run_in_shell(f"cat > {shlex.quote(str(tmp_path / 'read'))}", dict(os.environ))
    assert (status, (tmp_path / "read").read_bytes()) == (0, b"")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "with a space"
    venv.create(folder, with_pip=False)
    return folder


def test_dry_run_shows_the_command_of_another_environment_and_runs_nothing(bare: Path) -> None:
    before = sorted(bare.rglob("*"))
    done = ortgpu("fix", "--dry-run", "--json", "--python", str(bare))
    assert done.returncode == 1, done
    document = json.loads(done.stdout)
    (command,) = document["commands"]
    assert {**command, "command": ""} == {
        "command": "",
        "code": "onnxruntime-not-installed",
        "status": "not run",
        "exit_status": None,
        "seconds": None,
    }
    assert str(bare / "bin" / "python") in shlex.split(command["command"])
    assert (document["ok"], document["your_shell"]) == (False, [])
    assert document["problems"][0]["code"] == "onnxruntime-not-installed"
    shown = ortgpu("fix", "--dry-run", "--python", str(bare)).stdout
    assert f"    {command['command']}" in shown.splitlines()
    assert shown.splitlines()[-1] == "1 command would run (--dry-run)"
    assert sorted(bare.rglob("*")) == before


def test_without_a_terminal_it_stops_at_the_first_question(bare: Path) -> None:
    done = ortgpu("fix", "--python", str(bare), env=NO_GPU)
    assert done.returncode == 130, done
    assert done.stdout.splitlines()[-1] == "Stopped: no answer. --yes runs the commands without asking."


def test_an_interpreter_that_does_not_run_this_library_has_a_document() -> None:
    done = ortgpu("fix", "--json", "--python", "/bin/true")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["summary"].startswith("/bin/true: ")
