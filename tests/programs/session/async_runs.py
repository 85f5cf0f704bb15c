"""Programs of ``tests/session/test_async_runs.py``."""

from __future__ import annotations

import sys

from tests.programs.on_cpu import NEG, feeds, report
from tests.support.async_sessions import drop_sessions


def drop() -> None:
    report(drop_sessions(NEG, feeds(1, size=100_000)[0], int(sys.argv[1])))
