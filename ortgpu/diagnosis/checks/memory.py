"""Whose sessions fill a GPU: often this process's own, in a notebook whose cell was run again for instance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import Fix, manual
from ...provider.requests import CUDA, TENSORRT

if TYPE_CHECKING:
    from ...provider.living import SessionRecord

_NAMED = 5


def on_gpu(sessions: Iterable[SessionRecord], uuid: str | None) -> list[SessionRecord]:
    """Those that hold memory of the GPU, or may: a plain InferenceSession does not say where it is."""
    return [
        session
        for session in sessions
        if session.alive
        and {CUDA, *TENSORRT}.intersection(session.providers)
        and (uuid is None or session.device is None or session.device.uuid in (uuid, None))
    ]


def named(sessions: list[SessionRecord]) -> list[str]:
    """Lines of evidence."""
    lines = [
        f"open in this process: {session.model}" + (f", created by {session.created_by}" if session.created_by else "")
        for session in sessions[:_NAMED]
    ]
    if len(sessions) > _NAMED:
        lines.append(f"and {len(sessions) - _NAMED} more, which ortgpu.sessions() lists")
    return lines


def close_those_that_are_done_with() -> Fix:
    return manual(
        "close() the sessions of this process that are done with; they stay open while anything refers to them: a "
        "variable, a notebook's Out, the traceback of an exception"
    )
