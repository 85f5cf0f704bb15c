"""Programs that start a child process with a channel under unusual conditions; the argument names the condition."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from contextlib import suppress

from ortgpu.environment.child_process import ChildFailedError, ChildProcess
from ortgpu.errors import ExecutionError
from tests.support.children import report


def ask_pid() -> None:
    with ChildProcess(keeps_output=True) as child:
        report("pid", child.ask("os:getpid", timeout=30))


def sigpipe_at_default() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for _ in range(3):
        with ChildProcess() as child:
            os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
            with suppress(OSError):
                for _ in range(100):
                    child.channel.send(b"x" * 100_000, timeout=1)
    report("survived", True)


def sigchld_ignored() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with ChildProcess() as child:
        try:
            child.ask("os:_exit", 7, timeout=30)
        except ChildFailedError as error:
            report("error", str(error))


def few_descriptors() -> None:
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    report_refusal()


def no_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with ChildProcess(keeps_output=True) as child:
        is_same = child.ask("os:getpid", timeout=30) == child.process.pid
    os._exit(0 if is_same else 1)  # a report is a file


def frozen() -> None:
    sys.frozen = True  # type: ignore[attr-defined]
    report_refusal()


def report_refusal() -> None:
    try:
        ChildProcess(keeps_output=True)
    except ExecutionError as error:
        report("refused", error.as_dict())


def long_path() -> None:
    sys.path += [f"/nowhere/{number:0200}" for number in range(1000)]
    with ChildProcess() as child:
        report("same", child.ask("tests.programs.child_functions:facts", timeout=30)["path"] == sys.path)


def no_input() -> None:
    os.close(0)
    ask_pid()


def end_without_closing() -> None:
    child = ChildProcess()
    report("grandchild", child.ask("os:getpid", timeout=30))
    child.channel.send("never read")
    os._exit(0)


def sleep_while_child_works() -> None:
    child = ChildProcess()
    report("grandchild", child.ask("os:getpid", timeout=30))
    child.ask("time:sleep", 600)


def fork_holds_the_socket() -> None:
    """A forked process inherits the child's end of the socket, so the death of the child does not end the channel."""
    held: list[int] = []
    import socket

    real = socket.socketpair

    def pair_and_fork() -> tuple[socket.socket, socket.socket]:
        ends = real()
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        held.append(pid)
        return ends

    socket.socketpair = pair_and_fork  # type: ignore[assignment]
    with ChildProcess() as child:
        try:
            child.ask("os:abort")
        except ChildFailedError as error:
            report("error", str(error))
    os.kill(held[0], signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
