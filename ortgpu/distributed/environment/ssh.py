"""What happens when a command is run on another host through ssh, without anybody who could type a password."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from ...environment.child import run

_CONNECT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class SshAttempt:
    """``returncode``: that of the remote command, 255 where ssh itself failed (ssh(1)); None: no end, or no ssh."""

    host: str
    program: str | None  # path of ssh; None: there is none
    returncode: int | None
    errors: str = ""
    timed_out: bool = False


def try_ssh(host: str, *, timeout: float = 20.0) -> SshAttempt:
    """Run ``true`` on ``host``, as ssh(1) is configured for this user. Asks nothing, and writes known_hosts only where
    that configuration says so. Nothing raises."""
    program = shutil.which("ssh")
    if program is None:
        return SshAttempt(host, None, None)
    # A shared connection (ControlMaster) would stay in the background, or prove that another one could be opened once.
    options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ControlPath=none"]
    command = [program, *(word for option in options for word in ("-o", option)), "--", host, "true"]
    ended = run(command, timeout=timeout)
    return SshAttempt(host, program, ended.returncode, ended.errors.strip(), ended.timed_out)
