"""What a pool and its worker processes tell each other about a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...provider.devices import Device, DeviceRequest
from ...provider.interfaces import Value


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file that a pool holds open, so that its content stays available whatever becomes of its path.

    ``descriptor`` is an index of the descriptors that the process inherits.
    """

    location: str  # as the model names it; the path of the model itself
    descriptor: int
    stamp: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """The session that a worker process is to open.

    ``files``: the model, and the files with its weights. ``path`` None: the first of them is a model as bytes. No
    files: the path could not be opened, and the session says why. ``devices`` None: all that CUDA shows there;
    ``place`` is an index of them. ``session_class`` returns GPUSession, and ``options`` are its pickled arguments.
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
    """The session that a worker process has opened. ``chosen`` are the devices, as ordinals if the driver lists any."""

    device: Device
    declared: tuple[Sequence[Value], Sequence[Value]]  # inputs and outputs
    chosen: list[DeviceRequest]
    warnings: Sequence[Warning]


@dataclass(frozen=True, slots=True)
class Warming:
    """What stands in place of the names of outputs where a worker is to plan for the shapes of so many feeds."""

    feeds: int
