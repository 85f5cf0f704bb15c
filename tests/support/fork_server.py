"""Children that are forked from an interpreter which has imported NumPy, ONNX Runtime and ortgpu already.

Such a child differs from a fresh one in what it need not import, and in its end, which leaves C++ destructors out.
Tests of imports, of the start, the end and forks of a process, and of signals that come meanwhile, take fresh ones.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.children import (
    DEADLINE_VARIABLE,
    REPORT_VARIABLE,
    ROOT,
    Child,
    child_environment,
    ends,
    finished,
    python_arguments,
    run_child,
)

# What most programs import. Nothing of it is called before a fork.
MODULES = (
    "numpy",
    "onnx.parser",
    "onnxruntime",
    "ortgpu.session.gpu_session",
    "ortgpu.session.opening",
    "ortgpu.session.allowed_cpu",
    "ortgpu.session.verifying",
    "ortgpu.session.pool.batching",
    "ortgpu.session.pool.sessions",
    "ortgpu.running.device_arrays",
    "ortgpu.running.feed_copies",
)
COMMAND_LINE = ("click", "rich.console", "rich.table", "rich.progress")
OWN = (DEADLINE_VARIABLE, REPORT_VARIABLE, "PYTEST_CURRENT_TEST")  # variables that each child has for itself
LARGEST = 1 << 17  # bytes of a request


class ForkServer:
    """An interpreter that forks children with its variables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.lock = threading.Lock()
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env),
                cwd=ROOT,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.is_ready = bool(self.channel.recv(LARGEST))

    def ask(self, request: Mapping[str, Any], streams: Sequence[int] = ()) -> int:
        with self.lock:
            socket.send_fds(self.channel, [json.dumps(request).encode()], streams)
            return int(self.channel.recv(LARGEST))

    def close(self) -> None:
        self.channel.close()
        self.process.wait(10)


class Forked:
    """A child of a server."""

    def __init__(self, server: ForkServer, command: Sequence[str], own: Mapping[str, str], streams: Sequence[int]):
        self.server = server
        words = [os.fsencode(word).decode("latin-1") for word in command]  # which another locale decodes otherwise
        self.pid = server.ask({"command": words, "own": own}, streams)

    def wait(self, deadline: float) -> int | None:
        """Return the exit status, or None at the deadline. Nothing of its process group is left."""
        is_over = False
        try:
            is_over = ends(self.pid, deadline)
        finally:
            for end in (os.killpg, os.kill):  # before it is reaped: afterwards the number may be that of another
                with suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)
            status = self.server.ask({"reap": self.pid})
        return status if is_over else None


_servers: dict[tuple[tuple[str, str], ...], ForkServer | None] = {}
_lock = threading.Lock()


def run_forked(
    program: str, *arguments: str, behind: str = "", env: Mapping[str, str] | None = None, deadline: float = 60
) -> Child:
    """Run a program of tests/programs or a few lines of code."""
    command = [*python_arguments(program, behind), *arguments]
    return fork_python(command, env=child_environment() if env is None else env, deadline=deadline)


def fork_python(command: Sequence[str], *, env: Mapping[str, str], deadline: float) -> Child:
    """Run ``-m MODULE`` or ``-c CODE`` with arguments, as :func:`tests.support.children.run_child` does."""
    with tempfile.TemporaryDirectory(prefix="ortgpu-child-") as folder:
        scratch = Path(folder)
        own = {DEADLINE_VARIABLE: str(deadline), **env, REPORT_VARIABLE: str(scratch / "reports")}
        started = time.monotonic()
        with open(os.devnull, "rb") as none, open(scratch / "out", "wb") as out, open(scratch / "err", "wb") as err:
            child = start_forked(command, own, [stream.fileno() for stream in (none, out, err)])
            status = child.wait(deadline) if child else None
        if child is not None:
            return finished([sys.executable, *command], status, time.monotonic() - started, scratch)
    return run_child([sys.executable, *command], env=env, deadline=deadline)


def start_forked(command: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> Forked | None:
    """Start a child of the server with these variables. None: there is none, and the caller starts a fresh child."""
    server = find_server(env)
    if server is None or not server.is_ready:  # In the latter case a fresh child shows why.
        return None
    return Forked(server, command, {name: env[name] for name in OWN if name in env}, streams)


def find_server(env: Mapping[str, str]) -> ForkServer | None:
    """Return the server with these variables; None for the first who asks, who may be the only one."""
    if not hasattr(os, "pidfd_open"):
        return None
    variables = {name: value for name, value in env.items() if name not in OWN}
    key = tuple(sorted(variables.items()))
    with _lock:
        if key not in _servers:
            _servers[key] = None
            return None
        server = _servers[key]
        if server is None:
            server = _servers[key] = ForkServer(variables)
            atexit.register(server.close)
        return server


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork at each request. Return it in the child; the server itself ends with its client."""
    for name in (*MODULES, *COMMAND_LINE):
        importlib.import_module(name)
    lifetime: Any = importlib.import_module("ortgpu.provider.lifetime")
    channel.send(b"0")
    while True:
        message, streams, *_ = socket.recv_fds(channel, LARGEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            _wait_for_idle_threads()
            answer = os.fork()
            if answer == 0:
                lifetime._forked_from = None  # Nothing used CUDA before.
                channel.close()
                for descriptor, stream in enumerate(streams):
                    os.dup2(stream, descriptor)
                    os.close(stream)
                return dict(request)
            for stream in streams:
                os.close(stream)
        channel.send(b"%d" % answer)


def _wait_for_idle_threads() -> None:
    """Wait until ONNX Runtime's thread for telemetry sleeps, since a fork would keep a lock that it holds."""
    own = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        while thread != own and _state(thread) != "S":
            time.sleep(0.001)


def _state(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _reopened(descriptor: int, before: Any) -> io.TextIOWrapper:
    """Return a text stream as the interpreter makes it: what it knows of its file is that of the server's."""
    binary = open(descriptor, "wb", 0 if before.write_through else -1, closefd=False)  # noqa: SIM115 - to the end
    return io.TextIOWrapper(
        binary,
        before.encoding,
        before.errors,
        newline="\n",
        line_buffering=before.line_buffering or binary.isatty(),
        write_through=before.write_through,
    )


def become(request: Mapping[str, Any]) -> None:
    """Run the program of a request in this process, as the interpreter would at its start."""
    os.setsid()
    os.environ.update(request["own"])
    stdin = open(0, closefd=False)  # noqa: SIM115 - to the end of the process
    streams = {"stdin": stdin, "stdout": _reopened(1, sys.stdout), "stderr": _reopened(2, sys.stderr)}
    for name, stream in streams.items():
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    option, program, *arguments = [os.fsdecode(word.encode("latin-1")) for word in request["command"]]
    if option == "-m":
        sys.argv[:] = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.argv[:], sys.path[0] = ["-c", *arguments], ""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(program, vars(main))


if __name__ == "__main__":
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
