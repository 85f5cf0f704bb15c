"""``ortgpu fix``: run the commands that the diagnosis prints, and check again after each."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console

import ortgpu
from ortgpu.cli import output, signals
from ortgpu.cli.findings import Report
from ortgpu.cli.other_python import diagnose_in, python_option
from ortgpu.environment.child import interpreter
from ortgpu.errors import Fix, GPUError, counted

Variables = Mapping[str, str]


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask before each command.")
@click.option("--dry-run", is_flag=True, help="Show the commands and run none.")
@click.option("--warnings", is_flag=True, help="Run the commands of warnings as well.")
@click.option("--model", metavar="M", type=output.MODEL_FILE, help="Fix what this model needs as well.")
@python_option
@output.json_option
@output.probe_timeout_option
def fix(
    yes: bool, dry_run: bool, warnings: bool, model: Path | None, python: str | None, as_json: bool, timeout: int
) -> int:
    """Run the commands that `ortgpu doctor` prints, and check again after each.

    Asks before each command. After each command, the doctor judges the environment in a fresh process. The next command
    fixes the first remaining error. A command runs once at most.

    Fixes that need root, a restart, another machine or a change of your program are printed and never run. A command
    that changes a variable (export, unset) changes it for the next check. Repeat the command in your own shell: it is
    shown at the end.

    Exit code 0: fixed, or nothing was wrong. 1: an error remains and is shown at the end. 2: wrong usage.

    \b
    With --json all else goes to the standard error. The JSON document has
      "schema" (1), "ortgpu", "ok", "model",
      "commands"   in the order of running: command, code (of the error),
                   status ("ran", "declined", "not run"), exit_status, seconds
      "your_shell" the commands to repeat in your own shell
      "problems"   the remaining ones, as in the document of `ortgpu doctor`
    or "error".
    """
    python = python or interpreter()
    console = output.stderr() if as_json else output.stdout()

    def judge(environ: Variables) -> ortgpu.Diagnosis:
        with output.progress("Looking at this machine"), signals.raise_on_signals():
            return diagnose_in(python, model, timeout=timeout, environ=environ, probe=True, profile="inference")

    repair = Repair(console, judge, with_warnings=warnings)
    try:
        if dry_run:
            repair.plan()
        else:
            repair.run(lambda: yes or click.confirm("Run it?", err=as_json))
    except click.Abort:
        output.line(console)
        output.line(console, "Stopped: no answer. --yes runs the commands without asking.", style="bold yellow")
        return 130
    if as_json:
        output.write_json(output.document(ok=repair.ok, model=str(model) if model else None, **repair.document()))
    else:
        repair.show_verdict()
    return 0 if repair.ok else 1


@dataclass(slots=True)
class Step:
    """A command of a fix. ``exit_status`` and ``seconds`` are None unless it ran."""

    command: Fix
    problem: GPUError
    exit_status: int | None = None
    seconds: float | None = None
    declined: bool = False

    def document(self) -> dict[str, object]:
        status = "declined" if self.declined else "ran" if self.exit_status is not None else "not run"
        return {
            "command": str(self.command),
            "code": self.problem.code,
            "status": status,
            "exit_status": self.exit_status,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Repair:
    """The commands of a diagnosis and their effects. ``judge`` looks at the environment in a fresh process."""

    console: Console
    judge: Callable[[Variables], ortgpu.Diagnosis]
    with_warnings: bool = False
    steps: list[Step] = field(default_factory=list)
    diagnosis: ortgpu.Diagnosis = field(init=False)
    variables: dict[str, str | None] = field(default_factory=dict)  # Changes by commands; None: removed.

    @property
    def problems(self) -> tuple[GPUError, ...]:
        """The problems of the last look, without their consequences: a consequence goes with its cause."""
        causes = [problem for problem in self.diagnosis.problems if problem.consequence_of is None]
        return tuple(problem for problem in causes if problem.severity == "fatal" or self.with_warnings)

    @property
    def ok(self) -> bool:
        return not self.problems and Report(None, self.diagnosis, ()).ok

    def plan(self) -> None:
        """Look once, and list the commands without running them."""
        self.diagnosis = self.judge(os.environ)
        self.steps = list(_commands(self.problems))

    def run(self, confirm: Callable[[], bool]) -> None:
        """Run command after command, until no problem has a further command.

        Raises:
            click.Abort: ``confirm`` got no answer.
        """
        while True:
            self.diagnosis = self.judge(self.environ)
            commands = {step.command for step in self.steps}
            step = next((step for step in _commands(self.problems) if step.command not in commands), None)
            if step is None:
                return
            output.line(self.console, f"{type(step.problem).__name__}: {step.problem.summary}", style="bold red")
            output.command(self.console, f"  $ {step.command}", style="green")
            self.steps.append(step)
            if not confirm():
                step.declined = True
                continue
            self._execute(step)
            if step.exit_status:
                output.line(self.console, f"The command ended with {step.exit_status}.", style="yellow")

    @property
    def environ(self) -> dict[str, str]:
        """The variables of this process with the changes by commands."""
        changed = {**os.environ, **self.variables}
        return {name: value for name, value in changed.items() if value is not None}

    def _execute(self, step: Step) -> None:
        self.console.file.flush()
        begin, before = time.monotonic(), self.environ
        step.exit_status, after = run_in_shell(step.command, before)
        step.seconds = round(time.monotonic() - begin, 1)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self.variables[name] = after.get(name)

    @property
    def your_shell(self) -> list[str]:
        """Commands that change the variables in the user's own shell as well."""
        return [
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in sorted(self.variables.items())
        ]

    def document(self) -> dict[str, object]:
        return {
            "commands": [step.document() for step in self.steps],
            "your_shell": self.your_shell,
            "problems": [problem.as_dict() for problem in self.diagnosis.problems],
        }

    def show_verdict(self) -> None:
        """Show the first remaining error, and the commands for the user's own shell. The verdict is the last line."""
        console, ran = self.console, [step for step in self.steps if step.exit_status is not None]
        planned = [step.command for step in self.steps if step.exit_status is None and not step.declined]
        for number, problem in enumerate(self.problems):
            if number and planned:
                output.line(console)
            if number == 0 or planned:
                output.show_error(console, problem, most_facts=6, with_others=False)
        if self.your_shell:
            output.heading(console, "In your own shell, run:")
            for command in self.your_shell:
                output.command(console, f"    {command}", style="green")
        if self.ok:
            shell = " once your own shell has run the above" if self.your_shell else ""
            text = (
                f"fixed{shell}: a session opens on the GPU" if ran else "OK: nothing to fix, a session opens on the GPU"
            )
            output.line(console, text, style="bold green")
            return
        code = self.problems[0].code if self.problems else ""
        text = f"not fixed: {code}"
        if not code:
            failure = Report(None, self.diagnosis, ()).failure
            text = f"not fixed: no check finds a fault, and the probe failed: {failure}"
        elif planned:
            text = f"{counted(len(planned), 'command')} would run (--dry-run)"
        elif ran:
            text = f"not fixed: {code} is left; {counted(len(ran), 'command')} ran"
        elif not self.steps:
            text = f"not fixed: {code} has no command that can run here; its fix is above"
        output.line(console, text, style="bold red")


def _commands(problems: Iterable[GPUError]) -> Iterator[Step]:
    """Yield the commands that this user can run here, in the order of the problems."""
    for problem in problems:
        yield from (Step(text, problem) for text in problem.fixes if text.executable and text.kind == "shell")


_OF_THE_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")


def run_in_shell(text: str, environ: Variables) -> tuple[int, dict[str, str]]:
    """Run a command of a fix, and return its exit status and the variables of a program that runs next.

    The output of the command goes to stderr. It has no input. It stays in this process's group, so an interrupt from
    the keyboard reaches pip. Then pip cleans up, and this function waits for it.
    """
    if os.name == "nt":  # A fix for Windows has a command on each line, and changes no variable.
        for line in text.splitlines():
            if status := _wait_for(subprocess.Popen(line, shell=True, env=environ, stdin=subprocess.DEVNULL)):  # noqa: S602 - a printed command is for a shell
                return status, dict(environ)
        return 0, dict(environ)
    with tempfile.NamedTemporaryFile(prefix="ortgpu-fix-") as file:
        command = ["/bin/sh", "-c", f'{text}\nstatus=$?\nenv -0 > "$0"\nexit $status', file.name]
        child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
        status = _wait_for(child)
        content = file.read()
    pairs = (os.fsdecode(pair).partition("=") for pair in content.split(b"\0") if pair)
    after = {name: value for name, _, value in pairs if name not in _OF_THE_SHELL}
    unchanged = {name: environ[name] for name in _OF_THE_SHELL if name in environ}
    return status, {**after, **unchanged} if content else dict(environ)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait()
        raise
