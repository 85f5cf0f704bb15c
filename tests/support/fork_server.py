"""Children that are forked from an interpreter which has imported NumPy, ONNX Runtime and ortgpu already.

Such a child differs from a fresh one in what it need not import, and in its end, which leaves C++ destructors out.
Tests of imports, of the start, the end and forks of a process, and of signals that come meanwhile, take fresh ones.
The children of one server also share its hash seed, so that all of them see a set in the same order. Each server has
a random seed: a test that depends on the order fails in some runs only, and then for every child of the server.
"""

from __future__ import annotations

import atexit
import ctypes
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
ANSWER_SECONDS = 60  # A server answers in milliseconds once it has imported. Nobody waits there for a child's end.
MOST_SERVERS = 4
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


class ForkServer:
    """An interpreter that forks children with its variables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.lock = threading.Lock()
        self.children = 0  # that nobody has waited for
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
        atexit.register(self.close)
        self.channel.settimeout(ANSWER_SECONDS)
        self.is_ready = False
        with suppress(OSError):
            self.is_ready = bool(self.channel.recv(LARGEST))
        if not self.is_ready:
            self.close()

    def ask(self, request: Mapping[str, Any], streams: Sequence[int] = ()) -> int:
        """Return the answer; ConnectionError: there is none, and the server has been ended."""
        with self.lock:
            answer = b""
            try:
                with suppress(OSError):
                    socket.send_fds(self.channel, [json.dumps(request).encode()], streams)
                    answer = self.channel.recv(LARGEST)
            finally:  # after KeyboardInterrupt too: a late answer would be taken for the answer to the next request
                if not answer:
                    self.close()
            if not answer:
                raise ConnectionError("the server that forks children has ended")
            self.children += -1 if "reap" in request else 1
            return int(answer)

    def close(self) -> None:
        """End the server, and with it the children that it still has."""
        self.is_ready = False
        self.process.kill()
        self.process.wait()
        self.channel.close()
        atexit.unregister(self.close)


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
    if server is not None and server.is_ready:  # Where it is not, a fresh child shows why.
        with suppress(ConnectionError):
            return Forked(server, command, {name: env[name] for name in OWN if name in env}, streams)
    return None


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
        server = _servers.pop(key)
        if server is None:
            _make_room()
            server = ForkServer(variables)
        _servers[key] = server  # at the end, since it is the one used last
        return server


def _make_room() -> None:
    """End the servers that were not used for longest and have no children, so that one more may run."""
    running = [(key, server) for key, server in _servers.items() if server is not None and server.is_ready]
    idle = [(key, server) for key, server in running if not server.children]
    for key, server in idle[: max(0, len(running) + 1 - MOST_SERVERS)]:
        del _servers[key]
        server.close()


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork at each request. Return it in the child; the server itself ends with its client."""
    signal.alarm(ANSWER_SECONDS)  # An import that hangs would outlive a client that was killed.
    for name in (*MODULES, *COMMAND_LINE):
        importlib.import_module(name)
    lifetime: Any = importlib.import_module("ortgpu.provider.lifetime")
    signal.alarm(0)
    set_process_option, server = ctypes.CDLL(None).prctl, os.getpid()
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
                set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:  # The server ended before that call.
                    os._exit(1)
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
        while thread != own and not is_idle(thread):
            time.sleep(0.001)


def is_idle(thread: str) -> bool:
    """Return whether a thread of this process sleeps or has ended."""
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
    return True


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
    sys.orig_argv[1:] = [option, program, *arguments]
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
