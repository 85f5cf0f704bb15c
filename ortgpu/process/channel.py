"""Messages between a process and its children, over sockets that the children inherit."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .background import this_thread

if sys.platform != "win32":
    import fcntl

_LENGTH = struct.Struct("<Q")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # SIGPIPE at its default would end the process.
_LONGEST = 2_000_000  # The most seconds for a call of poll(), about: it takes milliseconds as an int of C.
_STANDARD = 2  # The last descriptor of the standard streams.
_MFD_CLOEXEC = 1  # The constant is in linux/memfd.h.


class Channel:
    """One end of a socket for pickled messages.

    One thread at a time receives. Any thread may send, also a signal handler or a finalizer that interrupts another
    send of its thread: the interrupted call then sends both messages. Programs that this process starts do not inherit
    the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.set_inheritable(False)
        self._end = end
        self._sending = threading.RLock()
        self._is_sending = False
        self._postponed: list[memoryview] = []

    def send(self, message: object, timeout: float | None = None) -> None:
        """Send a message. A failure amid the message ends the channel for both sides.

        Raises:
            OSError: the other end is gone.
            TimeoutError: the other end did not take the message within ``timeout`` seconds.
            Exception: the message cannot be pickled.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = memoryview(_LENGTH.pack(len(body)) + body)
        until = None if timeout is None else time.monotonic() + timeout
        with this_thread.holds, self._sending:
            if self._is_sending:
                self._postponed.append(data)
                return
            self._is_sending = True
            try:
                self._send(data, until)
                while self._postponed:
                    self._send(self._postponed.pop(0), until)
            finally:
                self._is_sending = False

    def _send(self, data: memoryview, until: float | None) -> None:
        rest = data
        try:
            while rest:
                try:
                    rest = rest[self._end.send(rest, _NO_SIGNAL) :]
                except BlockingIOError:
                    self._wait_until(until, to_send=True)
        except BaseException:
            if len(rest) < len(data):
                self.shut()
            raise

    def receive(self, timeout: float | None = None) -> Any:
        """Return a message.

        Raises:
            EOFError: the other end is gone.
            ConnectionResetError: it is gone and, on Linux, has not read all messages.
            TimeoutError: no whole message came within ``timeout`` seconds. The channel is of no use after that.
        """
        until = None if timeout is None else time.monotonic() + timeout
        size = _LENGTH.unpack(self._exactly(_LENGTH.size, until))[0]
        return pickle.loads(self._exactly(size, until))  # noqa: S301 - parent and child trust each other

    def _exactly(self, size: int, until: float | None) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._end.recv_into(rest)
            except BlockingIOError:
                self._wait_until(until)
                continue
            if not count:
                raise EOFError
            rest = rest[count:]
        return data

    def _wait_until(self, until: float | None, *, to_send: bool = False) -> None:
        if not self.has_message(None if until is None else until - time.monotonic(), to_send=to_send):
            raise TimeoutError("the other process did not answer in time")

    def has_message(self, timeout: float | None, *, to_send: bool = False) -> bool:
        """Wait for a message, the end of the channel, or room ``to_send``, for up to ``timeout`` seconds."""
        if self._end.fileno() < 0:
            raise EOFError
        timeout = None if timeout is None else min(max(timeout, 0), _LONGEST)
        if sys.platform == "win32":
            ends = [self._end]
            return any(select.select([] if to_send else ends, ends if to_send else [], [], timeout))
        waiting = select.poll()
        waiting.register(self._end, select.POLLOUT if to_send else select.POLLIN)
        return bool(waiting.poll(None if timeout is None else timeout * 1000))

    def shut(self) -> None:
        """End the channel for both sides, also if a forked child has a copy of this end."""
        with suppress(OSError):  # The other side may have done so.
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def avoid_standard_streams(descriptor: int) -> int:
    """Return a descriptor above the standard streams, since a child replaces these. Closes the given descriptor.

    If a program starts without standard streams, its files get their numbers.
    """
    if descriptor > _STANDARD or sys.platform == "win32":
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _STANDARD + 1)
    finally:
        os.close(descriptor)


def memory_file(name: str) -> int:
    """Return the descriptor of an empty file in memory. A child started with ``exec`` does not inherit it.

    Pythons built for an older glibc, for instance by conda and uv, have no ``os.memfd_create``.

    Raises:
        OSError: the process has too many open files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(name.encode(), _MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return avoid_standard_streams(descriptor)


@dataclass(frozen=True, slots=True)
class PickledError:
    """An exception on its way to another process."""

    data: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> PickledError:
        text = f"{type(error).__name__}: {error}"
        try:
            data = pickle.dumps(error)
            pickle.loads(data)  # noqa: S301 - made above: many exceptions pickle, and raise here
        except Exception:  # noqa: BLE001 - anything that its class may raise
            data = None
        return cls(data, text)

    def error(self) -> BaseException:
        """Return the exception; a RuntimeError with its text if this process cannot make it."""
        with suppress(Exception):  # This process may be unable to import its module.
            if self.data is not None:
                error = pickle.loads(self.data)  # noqa: S301 - of a child
                if isinstance(error, BaseException):
                    return error
        return RuntimeError(self.text)


def log_record(record: logging.LogRecord) -> None:
    """Log a child's record by the handlers of this process. Exceptions of filters and handlers end nothing."""
    try:
        target = logging.getLogger(record.name)
        if target.isEnabledFor(record.levelno):
            target.handle(record)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise  # The exception may be Ctrl-C.
