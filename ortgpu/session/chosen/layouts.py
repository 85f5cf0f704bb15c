"""Layouts of images by name, and how a program asks for one."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...provider.requests import CUDA
from ...provider.settings import SETTINGS

CHANNELS_FIRST = "channels-first"
LAYOUTS: Mapping[str, Mapping[str, str]] = {name: effect.options for name, effect in SETTINGS["layout"].items()}


def in_a_program(layout: str) -> str:
    """Return the line of a program that opens a session with ``layout``."""
    return f'GPUSession(model, providers=[("{CUDA}", {json.dumps(LAYOUTS[layout])})])'
