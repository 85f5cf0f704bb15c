"""Restore a session if opening it again fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def set_class(session: object, cls: type[Any]) -> None:
    """Set the class of a session, bypassing a ``__setattr__`` that its class may define."""
    object.__setattr__(session, "__class__", cls)


@contextlib.contextmanager
def unchanged_on_error(session: object) -> Iterator[None]:
    """Restore an InferenceSession, its class and its attributes, if the block raises."""
    cls, held = type(session), dict(vars(session))
    pinned = vars(session).pop("_pinned", None)  # else opening it again would close it
    try:
        yield
    except BaseException:
        set_class(session, cls)
        vars(session).clear()
        vars(session).update(held)
        raise
    if pinned is not None:
        pinned.close()
