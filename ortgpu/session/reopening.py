"""Sessions that are opened again: what they were is put back where that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def set_class(session: Any, cls: type[Any]) -> None:
    """Whatever the class of the session makes of assignments to its attributes."""
    object.__setattr__(session, "__class__", cls)


@contextlib.contextmanager
def unchanged_on_error(session: Any) -> Iterator[None]:
    """Put an InferenceSession, its class and all that it holds, back as it was if the block raises."""
    cls, held = type(session), dict(vars(session))
    pinned = vars(session).pop("_pinned", None)  # or it would be closed as soon as another session is open
    try:
        yield
    except BaseException:
        set_class(session, cls)
        vars(session).clear()
        vars(session).update(held)
        raise
    if pinned is not None:
        pinned.close()
