"""Signals that end a command while it waits for a process that it started."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # as a shell reports it


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """What ends this process at once would leave alive what it waits for: so it ends as by an error.

    Only while it waits: Python cannot raise anything in a process that hangs in a library, where nothing but the
    signal's own effect ends it.
    """
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
