"""Messages about a session between a pool and its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...provider.devices import Device, DeviceRequest
from ...provider.interfaces import Value


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that a pool holds open, so that its content stays available after a change of its path.

    ``descriptor`` is an index of the process's inherited descriptors.
    """

    location: str  # the name in the model, or for the model itself its path
    descriptor: int
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """The session that a worker process has to open.

    ``files``: the model, and the files with its weights. ``path`` None: the first file is a model as bytes. No files:
    the path could not be opened, and the session raises the reason. ``devices`` None: all devices that CUDA shows in
    the process. ``place`` is an index of the devices. ``session_class`` returns GPUSession, and ``options`` are its
    pickled arguments.
    """

    path: str | None
    files: Sequence[KeptFile]
    channels: int
    devices: list[DeviceRequest] | None
    place: int
    session_class: Callable[[], Any]
    options: bytes


@dataclass(slots=True)
class Declared:
    """An input or output of a model."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True, slots=True)
class Opened:
    """The open session of a worker process. ``chosen`` are the devices, as ordinals if the driver lists any."""

    device: Device
    declared: tuple[Sequence[Value], Sequence[Value]]  # inputs and outputs
    chosen: list[DeviceRequest]
    warnings: Sequence[Warning]


@dataclass(frozen=True, slots=True)
class Warming:
    """A request for plans for the shapes of this number of feeds. It replaces the names of outputs."""

    feeds: int
