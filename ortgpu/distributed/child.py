"""The child process of a preflight, seen from its parent: started in a group of its own, and killed with the group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import asdict

from ..environment.child import kill_group, python_command, signal_name
from ..environment.ranks import Rank
from ..errors import DistributedError
from .reports import Collective
from .wire import Connection

# For tests only: a module whose main() replaces worker.main, for a child that misbehaves
_MODULE_VARIABLE = "_ORTGPU_PREFLIGHT_WORKER"
_LINES_KEPT, _BYTES_KEPT = 200, 1 << 18
_CHUNK = 1 << 16  # bytes of one read, as many as a pipe holds
_DEATH = 2.0  # seconds for a process to end after it has closed its channel
_BOOT = "import importlib; importlib.import_module(sys.argv[1]).main(int(sys.argv[2]), int(sys.argv[3]))"


class Child:
    """A running child. ``channel`` carries messages both ways. ``output`` is the text that its libraries print.

    Raises:
        DistributedError: it cannot be started.
    """

    def __init__(self, rank: Rank, calls: tuple[Collective, ...]) -> None:
        ours, theirs = socket.socketpair()
        module = os.environ.get(_MODULE_VARIABLE, f"{__package__}.worker")
        arguments = [module, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                python_command(_BOOT, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # NCCL's warnings are the evidence of a failure
                env={"NCCL_DEBUG": "WARN", **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise DistributedError(
                f"the child process of rank {rank.rank} cannot be started",
                evidence=[f"{sys.executable}: {error}"],
                ranks=(rank.rank,),
                phase="start",
            ) from error
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._text = b""
        self.channel = Connection(ours)
        self.channel.send({"rank": asdict(rank), "calls": [[c.operation, c.dtype, c.count] for c in calls]})

    def read_output(self) -> bool:
        """Read some of the output. Return False at its end."""
        data = self.output.read(_CHUNK)
        self._text = b"\n".join((self._text + (data or b"")).split(b"\n")[-_LINES_KEPT:])[-_BYTES_KEPT:]
        return data != b""

    def warnings(self) -> list[str]:
        """Return NCCL's warnings."""
        return [line for line in self._lines() if "NCCL WARN" in line]

    def last_words(self) -> list[str]:
        """Return the end of the output."""
        return self._lines()[-8:]

    def _lines(self) -> list[str]:
        if not self.output.closed:
            self.read_output()
        return [line.strip() for line in self._text.decode("utf-8", "replace").splitlines() if line.strip()]

    def how_it_ended(self) -> str:
        """Say by which signal or with which exit status the child ended. For after it has closed its channel."""
        try:
            status = self._process.wait(_DEATH)
        except subprocess.TimeoutExpired:
            return "hung up and did not end"
        if status < 0:
            return f"was killed by {signal_name(-status)}"
        return f"ended with exit status {status}"

    def end(self) -> None:
        """Kill the child and all that it started. Only a process that hangs in the driver can be left."""
        kill_group(self._process)
        self.output.close()
        self.channel.close()
