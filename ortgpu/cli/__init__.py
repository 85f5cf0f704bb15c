"""The command line. Each command is a module of this package with one click command, registered in ``COMMANDS``.

Only this package prints. A problem with the GPU is a :class:`~ortgpu.errors.GPUError`. A command raises the error or
shows it; nobody sees a traceback for it.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from ortgpu import __version__
from ortgpu.cli import output
from ortgpu.errors import GPUError

if TYPE_CHECKING:  # PyInstaller needs these lines too. It does not find modules imported by a computed name.
    from ortgpu.cli import bench, check, demo, doctor, exec, explain, fix, hold, preflight, tune  # noqa: A004, F401 - named as commands are

# Modules of this package, in the order of use. Each module holds a click command of its own name. The help of the
# command begins with the sentence here, so `ortgpu --help` shows all sentences and imports no command.
COMMANDS = {
    "demo": "Show what plain ONNX Runtime does on this machine, and what a GPUSession does.",
    "check": "Open MODEL on the GPU and prove that it runs there.",
    "doctor": "Find out why the GPU cannot be used, and how to fix it.",
    "fix": "Run the commands that `ortgpu doctor` prints, and check again after each.",
    "hold": "Keep later installations from replacing ONNX Runtime's GPU build by the CPU build.",
    "explain": "Explain an error: meaning, causes, how to confirm, how to fix.",
    "tune": "Measure which settings are fastest for MODEL on this GPU, and keep them for later sessions.",
    "bench": "Measure the speed of MODEL on this machine, with plain ONNX Runtime and with ortgpu.",
    "exec": "Run a command in which every InferenceSession is on the GPU or raises the cause.",
    "preflight": "Check that the ranks of a job reach each other, and that each has its own GPU.",
}


class _Commands(click.Group):
    """A group that imports the module of a command only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"ortgpu.cli.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_known = args[0] in COMMANDS or ctx.resilient_parsing  # Completion in a shell needs no hint.
        for near in difflib.get_close_matches(args[0], () if is_known else COMMANDS, n=1):
            ctx.fail(f"There is no command {args[0]!r}; did you mean {near}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ortgpu", message="%(prog)s %(version)s", help="Show the version.")
@click.pass_context
def ortgpu(ctx: click.Context) -> int:
    """Run ONNX models on the GPU, or find out why you can't.

    Exit codes: 0 no problem, 1 a problem was found, 2 wrong usage.
    """
    if ctx.invoked_subcommand is None:  # The exit code of click itself depends on its release.
        click.echo(ctx.get_help(), err=True)
        return 2
    return 0


# These errors mean a full disk or quota, a limit on files, or a reader, terminal or file that has gone.
_CANNOT_WRITE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ESTALE)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code. Only a bug of this program raises."""
    output.prepare_streams()
    try:
        try:
            result = ortgpu.main(args=argv, prog_name="ortgpu", standalone_mode=False)
        except (click.ClickException, GPUError) as error:
            result = _show_refusal(error, argv)
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        return 130  # A shell reports an interrupt with this code.
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Otherwise the interpreter complains at exit.
        if error.errno != errno.EPIPE:  # In `ortgpu check | head -1` the reader ends first.
            click.echo(f"ortgpu: the output cannot be written: {error.strerror}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _show_refusal(error: click.ClickException | GPUError, argv: list[str]) -> int:
    """Write the document of a refused command if ``argv`` asks for it, show the error, and return the exit code."""
    console, wrong = output.stderr(), getattr(error, "ctx", None)
    if "--json" in argv and (wrong is None or any("--json" in option.opts for option in wrong.command.params)):
        output.write_json(output.document(ok=False, model=None, error=output.error_document(error)))
        sys.stdout.flush()
    if isinstance(error, GPUError):
        output.show_error(console, error)
        return 1
    if wrong is not None:
        output.line(console, wrong.get_usage())
        output.line(console, f"Try '{wrong.command_path} --help' for help.\n")
    output.line(console, f"Error: {error.format_message()}")
    return error.exit_code
