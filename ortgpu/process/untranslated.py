"""English messages of the C library in a program of any language: diagnoses read them."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_LC_MESSAGES_MASK = 1 << 5  # locale.h of glibc


@contextlib.contextmanager
def untranslated() -> Iterator[None]:
    """Let the loader speak English until the block ends, in this thread alone; setlocale would change all threads.

    A program chooses its language with ``setlocale(LC_ALL, "")``, and so does Qt.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):  # The C library musl translates nothing.
        yield
        return
    libc.newlocale.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    libc.uselocale.argtypes = libc.duplocale.argtypes = libc.freelocale.argtypes = (ctypes.c_void_p,)
    libc.newlocale.restype = libc.uselocale.restype = libc.duplocale.restype = ctypes.c_void_p
    before = libc.uselocale(None)
    english = libc.newlocale(_LC_MESSAGES_MASK, b"C", libc.duplocale(before))  # It takes the copy as its own.
    libc.uselocale(english)  # Without memory this is None, and changes nothing.
    try:
        yield
    finally:
        libc.uselocale(before)
        if english is not None:
            libc.freelocale(english)
