"""The functions of a worker process. It has one GPUSession, and for each channel a thread that answers its requests.

The process ends at once when its parent dies or closes the control channel. After a sticky CUDA error or the loss of
its GPU it can open no other session: it reports the error, and ends, too.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ExecutionError, ProviderRequestError, manual
from ...model.files import is_ort_format, stamp_of
from ...process import parent
from ...process.background import Thread
from ...process.channel import Channel, PickledError
from ...provider import lifetime
from ...provider.devices import Device, DeviceRequest, choose_devices
from ...provider.interfaces import Value
from ...running.cudart import runtime_of
from .shared_memory import Exchange
from .workers import is_lost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .sessions import OpenSession

WARM: Any = ...  # stands for the names of outputs in a request for plans

Files = Sequence[tuple[str, tuple[int, ...] | None]]  # the location of each file in the model, and its stamp


@dataclass(frozen=True, slots=True)
class Opened:
    """The open session of a worker process. ``chosen`` are the devices, as ordinals if the driver lists any."""

    device: Device
    declared: tuple[Sequence[Value], Sequence[Value]]  # inputs and outputs
    chosen: list[DeviceRequest]
    warnings: Sequence[Warning]


def serve(
    path: str | None,
    files: Files,
    channels: int,
    session_class: Callable[[], Any],
    devices: list[DeviceRequest] | None,
    place: int,
    options: Mapping[str, Any],
) -> Opened:
    """Open a session, and serve each inherited channel in a thread.

    ``files`` are the model and the files with its weights; their descriptors are inherited. ``path`` None: the first
    file is a model as bytes. No files: the path could not be opened, and the session raises the reason. ``devices``
    None: all devices that CUDA shows in the process. ``place`` is an index of the devices. ``session_class`` returns
    GPUSession, and ``options`` are its other arguments.
    """
    numbers = iter(parent.descriptors)
    inherited = [(next(numbers), next(numbers)) for _ in range(channels)]
    chosen = choose_devices(devices)
    options = dict(options)
    if callable(options.get("sess_options")):
        options["sess_options"] = options["sess_options"]()
    open_session = functools.partial(session_class(), device=chosen[place])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        session = None
        if path is not None and _is_as_it_was(path, files):
            session = open_session(path, **options)
            if not _is_as_it_was(path, files):  # A file was replaced meanwhile.
                session.close()
                session = None
        if session is None:
            session = _open_kept(path, files, list(numbers), open_session, options)
    caught_warnings = [warning.message for warning in caught if isinstance(warning.message, Warning)]
    inputs, outputs = (
        [SimpleNamespace(name=value.name, type=value.type, shape=list(value.shape)) for value in declared]
        for declared in (session.get_inputs(), session.get_outputs())
    )
    serving = _Serving(session)
    for end, file in inherited:
        channel = Channel(socket.socket(fileno=end))
        Thread(functools.partial(serving.serve, channel, file), "ortgpu-serve").start()
    return Opened(session.device, (inputs, outputs), chosen, caught_warnings)


def is_alive() -> bool:
    """Answer the parent after a second. The parent asks again and again."""
    time.sleep(1)
    return True


def _is_as_it_was(path: str, files: Files) -> bool:
    """Return True if the paths of the model still lead to the pool's open files, or the pool has none."""
    folder = os.path.dirname(path)
    return all(stamp_of(os.path.join(folder, location)) == stamp for location, stamp in files)


def _open_kept(
    path: str | None, files: Files, descriptors: list[int], open_session: Any, options: dict[str, Any]
) -> OpenSession:
    """Open the session on the parent's open files, since their paths lead elsewhere or do not exist.

    Raises ExecutionError if a file was written to meanwhile: its old content is gone.
    """
    for (location, stamp), descriptor in zip(files, descriptors, strict=True):
        if stamp_of(descriptor) != stamp and path is not None:
            raise ExecutionError(
                f"{location} has changed since the pool was opened, so that no worker can be replaced",
                fixes=[manual("write a new model to another file and rename it over the old one; open a new pool")],
            )
    model: Any = f"/proc/self/fd/{descriptors[0]}"
    with ExitStack() as opened:
        if path is None or is_ort_format(path):  # ONNX Runtime knows the format by the file's name.
            with _mapped(descriptors[0]) as content:
                model = bytes(content)
        contents = [opened.enter_context(_mapped(descriptor)) for descriptor in descriptors[1:]]
        if contents:
            import onnxruntime  # Import it late: GPUSession diagnoses its absence.

            sess_options = options.get("sess_options") or onnxruntime.SessionOptions()
            locations = [location for location, _ in files[1:]]
            sess_options.add_external_initializers_from_files_in_memory(locations, contents, list(map(len, contents)))
            options = {**options, "sess_options": sess_options}
        session: OpenSession = open_session(model, **options)
        return session


def _mapped(descriptor: int) -> Any:
    size = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else memoryview(b"")


class _Serving:
    def __init__(self, session: OpenSession) -> None:
        self._session = session
        self._of_thread = threading.local()
        self._runtime = runtime_of(lifetime.device_of(session)) if session._pinned_memory_limit else None
        from ...running.staging import StagedRunner  # Import it late: it imports ONNX Runtime.

        runner = session._gpu_runner.own
        if isinstance(runner, StagedRunner):
            runner.place = lambda shape, dtype: self._of_thread.exchange.try_empty(shape, dtype)

    def serve(self, channel: Channel, file: int) -> None:
        """Answer requests until the parent closes the channel."""
        exchange = self._of_thread.exchange = Exchange(channel, file, runtime=self._runtime)
        with suppress(EOFError, OSError):
            while True:
                try:
                    exchange.send(*self._answer(*exchange.receive()))
                except (EOFError, OSError):
                    raise
                except BaseException as error:  # noqa: BLE001 - there is no room, and the caller raises the error
                    exchange.send(PickledError.of(error))
                exchange.end(frees=False)

    def _answer(self, request: Any, arrays: list[NDArray[Any]]) -> tuple[PickledError | None, list[NDArray[Any]]]:
        """Return the error of a request, or None, and its outputs."""
        output_names, input_names = request
        left = iter(arrays)
        feeds = [dict(zip(names, left)) for names in input_names]  # noqa: B905 - each takes its part
        try:
            if output_names is not WARM:
                return None, _checked(self._session.run(output_names, feeds[0]))
            self._session.warm(feeds)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            if is_lost(self._session, error):
                parent.end(error)
            return PickledError.of(error), []
        return None, []


def _checked(outputs: Any) -> list[NDArray[Any]]:
    """Return the outputs. Raises ProviderRequestError if an output is no array of numbers."""
    for output in outputs:
        if not isinstance(output, np.ndarray) or output.dtype.hasobject:
            kind = "text" if isinstance(output, np.ndarray) else f"a {type(output).__name__}"
            raise ProviderRequestError(
                f"an output is {kind}, and a pool with isolate=True returns arrays of numbers only",
                fixes=[manual("name the other outputs in output_names, or use a pool without isolate")],
                requested="isolate",
            )
    return list(outputs)
