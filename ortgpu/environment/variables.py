"""Facts about environment variables: as they are now, and as they were when the process started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variables:
    """``now`` and ``at_start`` hold only the variables that matter here. ``at_start`` None: unknown.

    The dynamic loader reads LD_LIBRARY_PATH once, at start: what a program writes to os.environ later changes nothing.
    """

    now: Mapping[str, str]
    at_start: Mapping[str, str] | None
