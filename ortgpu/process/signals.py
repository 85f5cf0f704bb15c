"""Recognise exceptions of signal handlers, which are no failures of the code that they interrupt."""

from __future__ import annotations

import functools
import signal
from typing import Any


def is_of_a_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised ``error``, such as that of a time limit."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            codes.add(getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None
