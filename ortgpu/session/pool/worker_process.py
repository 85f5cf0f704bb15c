"""The program of a worker process: one GPUSession, and a thread for each channel that makes the runs asked for there.

The process ends at once when its parent dies or closes the control channel. After a sticky CUDA error or the loss of
its GPU it can open no other session: it says why, and ends too.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ProviderRequestError, manual
from ...process.background import Thread
from ...process.channel import Channel, PickledError
from ...provider import lifetime
from ...running.cudart import CudaCallError, CudaRuntime, runtime_of
from ..lazily import gpu_session_class
from .isolated import Declared, Opened, Opening
from .shared_memory import Exchange
from .workers import choose_devices, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..gpu_session import GPUSession

logger = logging.getLogger("ortgpu.pool")


def main() -> None:
    """Open a session as the control channel asks, and serve the other channels. Never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal and a container send them to all processes
        signal.signal(ignored, signal.SIG_IGN)
    page, *numbers = map(int, sys.argv[1:])
    control, *channels = (Channel(socket.socket(fileno=each)) for each in numbers)
    orders: SimpleQueue[Opening] = SimpleQueue()
    Thread(functools.partial(_watch, control, orders), "ortgpu-watch").start()
    try:
        opening = orders.get()
        records = logging.getLogger("ortgpu")
        records.addHandler(_Records(control))
        records.setLevel(opening.log_level)
        records.propagate = False
        session, opened = _open(opening)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        _end(control, error)
    serving = _Serving(control, session, mmap.mmap(page, mmap.PAGESIZE))
    for number, channel in enumerate(channels):
        Thread(functools.partial(serving.serve, channel, number), f"ortgpu-serve_{number}").start()
    control.send(opened)
    SimpleQueue[None]().get()


class _Records(QueueHandler):
    """Sends what is logged to the parent, whose program has chosen what becomes of it."""

    def __init__(self, control: Channel) -> None:
        super().__init__(SimpleQueue())
        self._control = control

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the parent has ended, and this process will
            self._control.send(record)


def _watch(control: Channel, orders: SimpleQueue[Opening]) -> None:
    """Pass on what the parent asks for. End the process when the parent closes the channel or has ended."""
    with suppress(BaseException):
        while True:
            orders.put(control.receive()[0])
    os._exit(0)


def _end(control: Channel, error: BaseException) -> None:
    """Tell the parent why, and end the process."""
    with suppress(BaseException):
        control.send(PickledError.of(error))
    os._exit(1)


def _open(opening: Opening) -> tuple[GPUSession, Opened]:
    chosen = choose_devices(opening.devices)
    model: Any = opening.path
    if opening.descriptor is not None:
        with mmap.mmap(opening.descriptor, opening.size, prot=mmap.PROT_READ) as content:
            model = content[:]
        os.close(opening.descriptor)
    options = pickle.loads(opening.options)  # noqa: S301 - the parent's
    if options.get("sess_options") is not None:
        options["sess_options"] = options["sess_options"].options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        session = gpu_session_class()(model, device=chosen[opening.place], **options)
    said = [each.message for each in caught if isinstance(each.message, Warning)]
    inputs, outputs = (
        [Declared(each.name, each.type, list(each.shape)) for each in declared]
        for declared in (session.get_inputs(), session.get_outputs())
    )
    return session, Opened(session.device, (inputs, outputs), chosen, said)


class _Serving:
    def __init__(self, control: Channel, session: GPUSession, begun: mmap.mmap) -> None:
        self._begun = begun
        self._control = control
        self._session = session
        self._of_thread = threading.local()
        self._ending = threading.Lock()
        runtime = runtime_of(lifetime.device_of(session)) if session._pinned_memory_limit else None
        self._pin = functools.partial(_pin, runtime) if runtime is not None else None
        from ...running.staging import StagedRunner  # not above: it imports ONNX Runtime

        if isinstance(session._gpu_runner, StagedRunner):
            session._gpu_runner.place = self._place

    def serve(self, channel: Channel, number: int) -> None:
        """Answer requests until the parent closes the channel."""
        exchange = self._of_thread.exchange = Exchange(channel, self._pin)
        with suppress(EOFError, OSError):
            while True:
                try:
                    self._answer(exchange, number)
                except (EOFError, OSError):
                    raise
                except BaseException as error:  # noqa: BLE001 - no room, and the caller raises it
                    exchange.send(PickledError.of(error))

    def _answer(self, exchange: Exchange, number: int) -> None:
        (output_names, input_names), arrays = exchange.receive()
        self._begun[number] = 1
        outputs = self._run(output_names, dict(zip(input_names, arrays, strict=True)))
        del arrays
        if isinstance(outputs, PickledError):
            exchange.send(outputs)
        else:
            exchange.send(None, outputs)
        exchange.drop_if_large()

    def _run(self, output_names: Any, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]] | PickledError:
        try:
            return _checked(self._session.run(output_names, feed))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            if is_lost(self._session, error):
                with self._ending:  # for ever: the first error counts
                    _end(self._control, error)
            return PickledError.of(error)

    def _place(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        exchange: Exchange = self._of_thread.exchange
        return exchange.ours.try_empty(shape, dtype)


def _pin(runtime: CudaRuntime, address: int, size: int) -> Callable[[], None]:
    """Pin shared memory, as a Pin does. If the system refuses, the GPU copies from ordinary memory."""
    try:
        runtime.pin(address, size)
    except CudaCallError as error:
        logger.debug("%d shared bytes cannot be pinned: %s", size, error)
        return lambda: None

    def unpin() -> None:
        with suppress(CudaCallError):  # a lost context has done it
            runtime.unpin(address)

    return unpin


def _checked(outputs: Any) -> list[NDArray[Any]]:
    """Return the outputs. Raises ProviderRequestError if one is no array of numbers."""
    for output in outputs:
        if not isinstance(output, np.ndarray) or output.dtype.hasobject:
            kind = "text" if isinstance(output, np.ndarray) else f"a {type(output).__name__}"
            raise ProviderRequestError(
                f"an output is {kind}, and a pool with isolate=True returns arrays of numbers only",
                fixes=[manual("name the other outputs in output_names, or use a pool without isolate")],
                requested="isolate",
            )
    return list(outputs)
