"""In which CUDA context a session was opened, and whether the process still has it.

Another library may reset the GPU (numba's ``Device.reset()``, ``cudaDeviceReset``, ``cuDevicePrimaryCtxReset``): all
memory and streams of the process on it are gone then. CUDA says so at some later call, by one code or another, and what
writes into pinned memory, or destroys a session, dies of it.
"""

from __future__ import annotations

from .environment.cuda import context_id

_opened_in: dict[int, tuple[int, int]] = {}  # by id() of the session: ordinal, and the context at that time


def remember(key: int, ordinal: int) -> None:
    """Note the context of a session that has just been opened; ``key`` is its ``id()``."""
    context = context_id(ordinal)
    if context:
        _opened_in[key] = (ordinal, context)


def forget(key: int, opened_in: dict[int, tuple[int, int]] = _opened_in) -> None:
    """At the end of the process, too, when Python has taken this module apart."""
    opened_in.pop(key, None)


def is_gone(key: int) -> bool:
    """Whether the context that a session was opened in was destroyed. False too where that is not known."""
    if key not in _opened_in:
        return False
    ordinal, context = _opened_in[key]
    return context_id(ordinal) not in (context, None)
