"""Child processes that answer one request after another: started, spoken to, ended and killed."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

from ..errors import ExecutionError, manual
from ..process import parent
from ..process.channel import Channel, PickledError, avoid_standard_streams, log_record
from .child import cause_of_death, kill_group, output_file, python_command
from .packages.plugins import environ_of_child

_PROGRAM = f"from {parent.__name__} import main; main()"
_DEATH = 5.0  # A process that closed its channel has this many seconds to end. One stuck in the driver is left.
_LOOK = 0.01  # seconds between two looks at a process that is ending
_PATIENCE = 1.0  # seconds between two looks at a working process, and for the rest of a message


class ChildFailedError(Exception):
    """A child did not do its work, for the reason in the text. ``timed_out``: it was killed at its deadline."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class ChildProcess:
    """A process of this interpreter that calls functions of modules, as :mod:`ortgpu.process.parent` describes.

    It leads a process group, has nothing on its standard input, and sees the search path of this process. It ends when
    this process ends or closes the channel. Leaving a ``with`` block kills it and all that it started in its group.

    Args:
        environ: its environment variables; by default :func:`environ_of_child`.
        descriptors: further file descriptors that the child inherits; not on Windows.
        keeps_output: whether its output is kept for :meth:`output`. Otherwise the child writes to this process's
            standard output and error.

    Attributes:
        channel: the channel to the process. A caller may receive messages that :meth:`ask` does not expect from it.
        process: the process itself.
        patience: seconds in which :meth:`ask` gets its answer, whatever its timeout. Another thread may set it.

    Raises:
        ExecutionError: it cannot be started.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        keeps_output: bool = False,
    ) -> None:
        self.patience: float | None = None
        self._output: IO[bytes] | None = None
        self._reason: str | None = None
        self._is_status_lost = False
        try:
            with ExitStack() as failed, ExitStack() as theirs:
                ours, other = socket.socketpair()
                their = socket.socket(fileno=avoid_standard_streams(other.detach()))
                failed.callback(ours.close)
                theirs.callback(their.close)
                if keeps_output:
                    self._output = failed.enter_context(output_file())
                level = logging.getLogger("ortgpu").getEffectiveLevel()
                numbers = [their.fileno(), *descriptors]
                self.process = subprocess.Popen(
                    python_command(_PROGRAM, str(numbers[0]), str(level), *map(str, descriptors)),
                    stdin=subprocess.PIPE if sys.platform == "win32" else subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env=environ_of_child() if environ is None else environ,
                    start_new_session=True,
                    pass_fds=() if sys.platform == "win32" else numbers,
                )
                if sys.platform == "win32":  # The handle of a socket is of no use to another process there.
                    assert self.process.stdin is not None
                    with suppress(OSError), self.process.stdin as stdin:  # If it has ended, the first request says so.
                        stdin.write(their.share(self.process.pid))
                failed.pop_all()
        except (OSError, ValueError) as error:  # A NUL in an argument is a ValueError.
            raise not_started(error) from None
        self.channel = Channel(ours)

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        function: str | Callable[..., Any],
        *arguments: Any,
        timeout: float | None = None,
        on_note: Callable[[Any], object] = lambda _: None,
    ) -> Any:
        """Call a function of a module, or "module:function", in the child, and return its result.

        Log records of the child go to the loggers of this process, and notes of the function to ``on_note``.

        Raises:
            ChildFailedError: the process ended, or was killed because it did not answer within ``timeout`` seconds.
            Exception: the function raised it, or an argument does not pickle.
        """
        request = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        asked = time.monotonic()
        until = None if timeout is None else asked + timeout
        try:
            self.channel.send(request, timeout=timeout)
            while True:
                message = self._receive(asked, until)
                if isinstance(message, logging.LogRecord):
                    log_record(message)
                elif isinstance(message, parent.Note):
                    on_note(message.content)
                else:
                    break
        except TimeoutError:
            self.kill("it did not end in time")
            raise ChildFailedError("it did not end in time", timed_out=True) from None
        except (EOFError, ConnectionError):
            cause = self.cause()
            printed = self.output().decode("utf-8", "replace") if self._output is not None else ""
            words = [line for line in printed.splitlines() if line.strip()][-1:]
            raise ChildFailedError(": ".join(["the process ended", cause, *words])) from None
        if isinstance(message, PickledError):
            raise message.error()
        assert isinstance(message, parent.Answer)
        return message.result

    def _receive(self, asked: float, until: float | None) -> Any:
        """Return a message. Raises as :meth:`Channel.receive`, also if a forked process holds the other end open."""
        while not self.channel.has_message(_PATIENCE if until is None else min(_PATIENCE, until - time.monotonic())):
            if self._has_ended() and not self.channel.has_message(0):
                raise EOFError
            latest = until if self.patience is None else asked + self.patience
            if latest is not None and time.monotonic() >= latest:
                raise TimeoutError
        return self.channel.receive(None if until is None else max(until - time.monotonic(), _PATIENCE))

    @property
    def is_alive(self) -> bool:
        return not self._has_ended()

    @property
    def returncode(self) -> int | None:
        """The exit status in subprocess's convention, once :meth:`cause` has returned; None if it is not known."""
        return None if self._is_status_lost else self.process.returncode

    def kill(self, reason: str | None = None) -> None:
        """Kill it and its group, for a reason that :meth:`cause` returns, unless it ended by itself before."""
        if not self._has_ended():
            self._reason = self._reason or reason or "it was killed"
        kill_group(self.process)
        self.channel.shut()

    def cause(self) -> str:
        """Wait at most 5 s for its end, kill it if it does not end, kill its group, and return the cause."""
        until = time.monotonic() + _DEATH
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(_LOOK)
        if not self._has_ended():
            self.kill("it does not answer")
        kill_group(self.process)
        code = self.process.returncode
        if self._reason is not None or code is None:
            return self._reason or "it does not answer"
        if self._is_status_lost:
            return "its exit status is not known, since this program ignores SIGCHLD or waits for all of its children"
        return cause_of_death(code) or f"exit status {code}"

    def _has_ended(self) -> bool:
        if self.process.returncode is None and hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # Popen takes this for exit status 0.
                self._is_status_lost = self.process.returncode is None
        return self.process.poll() is not None

    def output(self) -> bytes:
        """Return its standard output and error. Call this after its end: both share the file position."""
        assert self._output is not None, "its output is not kept"
        self._output.seek(0)
        return self._output.read()

    def close(self) -> None:
        """Kill it, and close the channel and the output file. Call this once no thread uses the channel."""
        self.kill()
        self.channel.close()
        if self._output is not None:
            self._output.close()


def not_started(error: OSError | ValueError) -> ExecutionError:
    """Return the error for a refusal of the system to start a child process, or to give it files or memory."""
    remedy = remedy_for(error, "let this process start other processes")
    if isinstance(error, FileNotFoundError):
        remedy = "run this in a program of the Python interpreter, which is not frozen"
    return ExecutionError("a child process cannot be started", evidence=[str(error)], fixes=[manual(remedy)])


def remedy_for(error: OSError | ValueError, usual: str) -> str:
    """Return what to do about a refusal of the system: ``usual``, unless the error tells more."""
    return _REMEDIES.get(getattr(error, "errno", None) or 0, usual)


_REMEDIES = {
    errno.EMFILE: "allow this process more open files (ulimit -n)",
    errno.ENFILE: "let the system have more open files (sysctl fs.file-max)",
    errno.EAGAIN: "allow this user or container more processes (ulimit -u, pids.max)",
    errno.EFBIG: "allow this process larger files (ulimit -f)",
    errno.ENOMEM: "give this process and its container more memory",
    errno.ENOSPC: "give this process and its container more memory",
    errno.E2BIG: "shorten sys.path or the environment variables",
}
