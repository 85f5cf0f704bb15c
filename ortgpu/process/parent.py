"""The child's side of a child process: it calls the functions that its parent names, one after another.

A request is a pickled pair of the function, or its name as "module:function", and its arguments. It is pickled within
the message, so a failure to unpickle it is an exception of the request. ``main`` is all of the program. The process
ends at once when its parent ends or closes the channel; if the system gives it no thread, after the function that runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, NoReturn

from .background import Thread
from .channel import Channel, PickledError


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request. An exception comes as a PickledError instead."""

    result: Any


@dataclass(frozen=True, slots=True)
class Note:
    content: Any


#: The descriptors of the parent's ChildProcess, in their order. Programs that this process starts do not inherit them.
descriptors: list[int] = []

_control: Channel | None = None
_on_interrupt: Any = None  # The handler of SIGINT at the start of this process.


def main() -> NoReturn:
    """Serve the parent. Its socket, log level and further descriptors are the arguments of the program.

    On Windows the standard input says how to open the socket.
    """
    global _control, _on_interrupt
    # A terminal and a container send these signals to all processes.
    _on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end, level, *descriptors[:] = map(int, sys.argv[1:])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if sys.platform == "win32":
        control = _control = Channel(socket.fromshare(sys.stdin.buffer.read()))
    else:
        control = _control = Channel(socket.socket(fileno=end))
    records = logging.getLogger("ortgpu")
    records.addHandler(_Records(control))
    records.setLevel(level)
    records.propagate = False
    requests: SimpleQueue[bytes] = SimpleQueue()
    try:
        Thread(lambda: _watch(control, requests), "ortgpu-parent").start()
    except RuntimeError:  # The limit on threads is reached, and the parent may ask for it.
        with suppress(EOFError, OSError):  # The parent has closed the channel or has ended.
            while True:
                _answer(control, control.receive())
        os._exit(0)
    while True:
        _answer(control, requests.get())


def heed_interrupts() -> None:
    """Give SIGINT the handler that this process started with, as in any program of the same parent."""
    if _on_interrupt is not None:
        signal.signal(signal.SIGINT, _on_interrupt)


def tell(content: object) -> None:
    assert _control is not None, "this process is no child"
    _control.send(Note(content))


def end(error: BaseException) -> NoReturn:
    """End this process, and tell the parent that ``error`` is the cause."""
    with suppress(Exception):
        if _control is not None:
            _control.send(PickledError.of(error))
    os._exit(1)


class _Records(QueueHandler):
    """Sends log records to the parent, since its program has chosen the handlers."""

    def __init__(self, control: Channel) -> None:
        super().__init__(SimpleQueue())
        self._control = control

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # The parent has ended, and this process will end too.
            self._control.send(record)


def _watch(control: Channel, requests: SimpleQueue[bytes]) -> None:
    """Pass on the parent's requests. End the process when the parent closes the channel or has ended."""
    with suppress(BaseException):
        while True:
            requests.put(control.receive())
    os._exit(0)


def _answer(control: Channel, request: bytes) -> None:
    answer: object
    try:
        function, arguments = pickle.loads(request)  # noqa: S301 - of the parent
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        answer = Answer(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        answer = PickledError.of(error)
    try:
        try:
            control.send(answer)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - the result does not pickle
            control.send(PickledError.of(error))
    except OSError:  # The parent has ended.
        os._exit(0)
