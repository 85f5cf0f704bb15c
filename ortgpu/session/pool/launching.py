"""The start of a pool's processes, with the unchanged model, the arguments of the session, and the channels."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...environment.child_process import ChildProcess
from ...environment.packages.plugins import environ_of_child
from ...errors import ExecutionError, manual
from ...model.contents import data_files
from ...model.files import ModelSource, stamp_of
from ...process.background import is_of_a_handler
from ...process.channel import avoid_standard_streams
from ...provider.devices import Device, DeviceRequest
from ...provider.interfaces import Value
from ...provider.options import not_sent
from .shared_memory import memory_file

if TYPE_CHECKING:
    from .host_feeds import ProcessFeeds


Deadlines = tuple[float | None, float | None]  # seconds for a run, and for the first run of a shape

#: Asks for plans for the shapes of feeds, in the place of the names of outputs.
WARM = "warm"


@dataclass(frozen=True, slots=True)
class Opening:
    """The session that a worker process has to open.

    ``files``: the model, and the files with its weights, each with its location in the model and its stamp; their
    descriptors are inherited. ``path`` None: the first file is a model as bytes. No files: the path could not be
    opened, and the session raises the reason. ``devices`` None: all devices that CUDA shows in the process. ``place``
    is an index of the devices. ``session_class`` returns GPUSession, and ``options`` are its pickled arguments.
    """

    path: str | None
    files: Sequence[tuple[str, tuple[int, ...] | None]]
    channels: int
    devices: list[DeviceRequest] | None
    place: int
    session_class: Callable[[], Any]
    options: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The open session of a worker process. ``chosen`` are the devices, as ordinals if the driver lists any."""

    device: Device
    declared: tuple[Sequence[Value], Sequence[Value]]  # inputs and outputs
    chosen: list[DeviceRequest]
    warnings: Sequence[Warning]


class Launch:
    """The model, the arguments and the environment that all processes of a pool share.

    The files of the model stay open, so that a new process serves the same model even after a change of the path.
    Raises ExecutionError if there is no room for a model as bytes, or no more files can be open.
    """

    def __init__(
        self,
        model: ModelSource,
        session_class: Callable[[], Any],
        channels: int,
        deadlines: Deadlines,
        feeds: ProcessFeeds,
    ) -> None:
        self.channels, self.deadlines, self.feeds = channels, deadlines, feeds
        self._session_class = session_class
        self._path = None if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))
        self._files: list[tuple[str, tuple[int, ...] | None]] = []
        self._descriptors: list[int] = []
        self._environ = environ_of_child()
        try:
            if isinstance(model, bytes):
                self._keep("", memory_file("ortgpu-model"))
                with open(self._descriptors[0], "wb", closefd=False) as file:
                    file.write(model)
            elif self._path is not None:
                self._keep_file(self._path, self._path)
                for location in data_files(self._path) if self._files else ():
                    self._keep_file(location, os.path.join(os.path.dirname(self._path), location))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _not_prepared(error) from None
            raise

    def _keep_file(self, location: str, path: str) -> None:
        with suppress(FileNotFoundError, PermissionError, ValueError):  # The session raises the reason.
            self._keep(location, avoid_standard_streams(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)))

    def _keep(self, location: str, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        self._files.append((location, stamp_of(descriptor)))

    def start(self) -> tuple[ChildProcess, list[tuple[socket.socket, list[int]]]]:
        """Start a process that inherits the model and the channels. Raises ExecutionError.

        Return the channels, too: a socket, and files in memory for feeds and for results.
        """
        channels: list[tuple[socket.socket, list[int]]] = []
        numbers: list[int] = []
        with ExitStack() as failed, ExitStack() as theirs:
            try:
                for _ in range(self.channels):
                    our, their = socket.socketpair()
                    failed.callback(our.close)
                    numbers.append(avoid_standard_streams(their.detach()))
                    theirs.callback(os.close, numbers[-1])
                    for name in ("ortgpu-feeds", "ortgpu-results"):
                        numbers.append(memory_file(name))
                        failed.callback(os.close, numbers[-1])
                    channels.append((our, numbers[-2:]))
            except OSError as error:
                raise _not_prepared(error) from None
            process = ChildProcess(environ=self._environ, descriptors=[*numbers, *self._descriptors])
            failed.pop_all()
            return process, channels

    def opening(self, devices: list[DeviceRequest] | None, place: int, options: Mapping[str, Any]) -> Opening:
        return Opening(
            self._path, self._files, self.channels, devices, place, self._session_class, pickle.dumps(options)
        )

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _not_prepared(error: OSError) -> ExecutionError:
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
