"""Signals that end a command while it waits for a process that it started."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # A shell reports a signal with this code.


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit while this process waits for a child, so that the child ends too.

    Use it only while this process waits. Python cannot raise in a process that hangs in a library, and only the default
    effect of a signal ends such a process.
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
