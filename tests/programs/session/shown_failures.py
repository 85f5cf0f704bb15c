"""The program of ``tests/session/test_shown_failures.py``."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import numpy as np

import ortgpu
from ortgpu import GPUSession, GPUSessionPool
from tests.support.children import report


def what_python_shows_of_lines() -> None:
    """The arguments: the path of a model, and lines that raise, as JSON."""
    names = {"ortgpu": ortgpu, "GPUSession": GPUSession, "GPUSessionPool": GPUSessionPool}
    names |= {"model": sys.argv[1], "wrong": {"no such input": np.zeros(1, np.float32)}}
    for line in json.loads(sys.argv[2]):
        shown = io.StringIO()
        try:
            exec(line, names)
        except Exception:
            with contextlib.redirect_stderr(shown):
                sys.excepthook(*sys.exc_info())
        report(line, shown.getvalue())
