"""The start of a pool's processes, with the unchanged model, the arguments of the session, and the channels."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ...environment.child_process import ChildProcess
from ...environment.packages.plugins import environ_of_child
from ...errors import ExecutionError, manual
from ...model.contents import data_files
from ...model.files import ModelSource, stamp_of_descriptor
from ...process.background import is_of_a_handler
from ...process.channel import avoid_standard_streams
from ...provider.devices import DeviceRequest
from ...provider.options import not_sent
from .messages import KeptFile, Opening
from .shared_memory import memory_file


class Launch:
    """The model, the arguments and the environment that all processes of a pool share.

    The files of the model stay open, so that a new process serves the same model even after a change of the path.
    Raises ExecutionError if there is no room for a model as bytes, or no more files can be open.
    """

    def __init__(self, model: ModelSource, session_class: Callable[[], Any], channels: int) -> None:
        self.channels = channels
        self._session_class = session_class
        self.path = None if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))
        self.files: list[KeptFile] = []
        self.descriptors: list[int] = []
        self._environ = environ_of_child()
        try:
            if isinstance(model, bytes):
                descriptor = memory_file("ortgpu-model")
                self._keep("", descriptor)
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(model)
            else:
                self._keep_files()
        except OSError as error:
            self.close()
            raise not_prepared(error) from None
        except BaseException:
            self.close()
            raise

    def _keep_files(self) -> None:
        assert self.path is not None
        try:
            model = avoid_standard_streams(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (FileNotFoundError, PermissionError, ValueError):
            return  # The session raises the reason.
        self._keep(self.path, model)
        for location in data_files(self.path):
            try:
                path = os.path.join(os.path.dirname(self.path), location)
                self._keep(location, avoid_standard_streams(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)))
            except (FileNotFoundError, PermissionError, ValueError):
                pass  # The session raises the reason here, too.

    def _keep(self, location: str, descriptor: int) -> None:
        self.descriptors.append(descriptor)
        self.files.append(KeptFile(location, len(self.descriptors) - 1, stamp_of_descriptor(descriptor)))

    def start(self, page: int, ends: Sequence[int]) -> ChildProcess:
        """Start a process that inherits the model, a page and the ends of sockets. Raises ExecutionError."""
        return ChildProcess(environ=self._environ, descriptors=[page, *ends, *self.descriptors])

    def opening(self, devices: list[DeviceRequest] | None, place: int, options: Mapping[str, Any]) -> Opening:
        return Opening(self.path, self.files, self.channels, devices, place, self._session_class, pickle.dumps(options))

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Sockets:
    """The sockets and the page of one process. Our ends stay open; its ends are closed here once it has started."""

    def __init__(self, channels: int) -> None:
        self.ours: list[socket.socket] = []
        with ExitStack() as failed, ExitStack() as self.theirs:
            self.ends = []
            for _ in range(channels):
                ours, their = socket.socketpair()
                failed.callback(ours.close)
                self.ours.append(ours)
                end = avoid_standard_streams(their.detach())
                self.theirs.callback(os.close, end)
                self.ends.append(end)
            self.page = memory_file("ortgpu-begun")
            self.theirs.callback(os.close, self.page)
            os.posix_fallocate(self.page, 0, mmap.PAGESIZE)
            self.begun = mmap.mmap(self.page, mmap.PAGESIZE)
            failed.pop_all()
            self.theirs = self.theirs.pop_all()


def not_prepared(error: OSError) -> ExecutionError:
    return ExecutionError(
        "a worker process cannot be prepared",
        evidence=[str(error)],
        fixes=[
            manual("give this process more open files (ulimit -n) and larger ones (ulimit -f)"),
            manual("give its container more memory"),
        ],
    )


def portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options after a check that they pickle. Raises TypeError or ProviderRequestError otherwise."""
    carried = dict(options)
    sess_options = carried.get("sess_options")
    if sess_options is not None and not callable(sess_options):
        if type(sess_options).__name__ != "SessionOptions":
            raise TypeError(
                f"sess_options must be a function that returns SessionOptions, with isolate=True, not {sess_options!r}"
            )
        raise not_sent()
    for name, value in carried.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise TypeError(f"{name} of a GPUSessionPool with isolate=True must pickle: {error}") from None
    return carried
