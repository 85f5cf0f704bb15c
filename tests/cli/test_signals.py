"""What a signal ends: a command, whatever it hangs in, and what it has started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpu.cli import signals
from tests.lab.fixtures import Lab

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither the signals nor named pipes")


class Hanging:
    """A child of a child: writes that it is there, and holds a pipe for as long as it lives."""

    def __init__(self, folder: Path) -> None:
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        self.code = (
            f"import time; pipe = open({str(pipe)!r}, 'w'); pipe.write('ready\\n'); pipe.flush(); time.sleep(100)"
        )
        self.reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def read(self) -> bytes:
        assert select.select([self.reader], [], [], 30)[0], "nothing was written, and what holds the pipe is alive"
        return os.read(self.reader, 100)

    def is_ended_with(self, parent: str, number: int, status: int) -> None:
        with subprocess.Popen([sys.executable, "-c", parent], start_new_session=True) as process:
            try:
                assert self.read() == b"ready\n"
                process.send_signal(number)
                assert process.wait(30) == status
                assert self.read() == b""
            finally:
                process.kill()
                os.close(self.reader)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_takes_what_was_started_with_it(tmp_path: Path, name: str) -> None:
    """`timeout 10 ortgpu doctor`, where a driver hangs: the child that hangs in it must not stay."""
    hanging = Hanging(tmp_path)
    code = f"""
import signal, sys
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # under nohup they would be ignored, and stay so
signal.signal(signal.SIGINT, signal.default_int_handler)
from ortgpu import cli
from ortgpu.cli import demo
from ortgpu.environment.child import run
demo.observe = lambda *_, **__: run([sys.executable, "-c", {hanging.code!r}], timeout=100)
sys.exit(cli.run(["demo"]))
"""
    number = getattr(signal, name)
    hanging.is_ended_with(code, number, 128 + number)


def test_an_interrupt_while_it_is_being_imported(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    command = [sys.executable, "-m", "ortgpu", "explain"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with another one")
def test_a_process_that_is_killed_takes_its_child_along(tmp_path: Path) -> None:
    """It has no say in it: by the kernel, for want of memory, for instance."""
    hanging = Hanging(tmp_path)
    code = f"from ortgpu.environment.child import run_python; run_python({hanging.code!r}, timeout=100)"
    hanging.is_ended_with(code, signal.SIGKILL, -signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with another one")
def test_a_look_at_the_placement_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    """What its child process has by then is a session's memory on the GPU."""
    hanging = Hanging(tmp_path)
    package = tmp_path / "site" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(hanging.code, encoding="utf-8")
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
from ortgpu.session.placement_details import explain_placement
explain_placement(b"a model")
"""
    hanging.is_ended_with(code, signal.SIGKILL, -signal.SIGKILL)


@pytest.mark.parametrize("command", [["check"], ["demo"], ["bench"]], ids=" ".join)
def test_a_command_that_hangs_in_a_library_can_be_ended(lab: Lab, command: list[str]) -> None:
    """Python raises nothing there: `timeout 10 ortgpu check` would wait for ever."""
    code = """
    #include <signal.h>
    #include <unistd.h>
    __attribute__((constructor)) static void hangs(void) { kill(getpid(), SIGTERM); for (;;) pause(); }
    """
    hanging = lab.stubs.compile("hanging", code, "-Wl,-soname,libcurand.so.10")
    machine = lab.machine()
    real = machine.overlay.path("nvidia/*/lib/libcurand.so.10").relative_to(machine.overlay.site)
    machine.overlay.replace(str(real), hanging)
    arguments = [*command, str(lab.models.relu)] if command == ["bench"] else command
    assert machine.run(argv=["-m", "ortgpu", *arguments]).returncode == -signal.SIGTERM


def test_a_handler_of_the_program_stays() -> None:
    """Python code may call a command, with a handler of its own."""

    def own(*_: object) -> None:
        pass

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, own)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals.raise_on_signals():
            assert signal.getsignal(signal.SIGTERM) is own
            with pytest.raises(SystemExit) as ended:
                signal.raise_signal(signal.SIGHUP)
            assert ended.value.code == 128 + signal.SIGHUP
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
