"""In which CUDA context a session was opened, and whether the process still has it.

Another library may reset the GPU (numba's ``Device.reset()``, ``cudaDeviceReset``, ``cuDevicePrimaryCtxReset``): all
memory and streams of the process on it are gone then. CUDA says so at some later call, by one code or another, and what
writes into pinned memory, or destroys a session, dies of it.
"""

from __future__ import annotations

from .environment.cuda import context_id


class Context:
    """The context that this process has on a device when this is made."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._id = context_id(ordinal)

    def is_gone(self) -> bool:
        """Whether it was destroyed since, and with it what was made in it. False too where that is not known."""
        return bool(self._id) and context_id(self._ordinal) not in (self._id, None)


_opened_in: dict[int, Context] = {}  # by id() of the session


def remember(key: int, ordinal: int) -> None:
    """Note the context of a session that has just been opened; ``key`` is its ``id()``."""
    _opened_in[key] = Context(ordinal)


def forget(key: int) -> None:
    _opened_in.pop(key, None)


def is_gone(key: int) -> bool:
    """Whether the context that a session was opened in was destroyed."""
    context = _opened_in.get(key)
    return context is not None and context.is_gone()
