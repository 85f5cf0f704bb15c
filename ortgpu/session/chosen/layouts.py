"""Layouts of images by name, and how a program asks for one."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...provider.requests import CUDA

# fuse_conv_bias never stands alone: ONNX Runtime 1.31 then clears a buffer of the convolution on another stream than
# the one that fills it (conv.cc), and some results are wrong.
CHANNELS_FIRST = "channels-first"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    CHANNELS_FIRST: {"prefer_nhwc": "0"},
    "channels-last": {"prefer_nhwc": "1"},
    "channels-last, biases fused": {"prefer_nhwc": "1", "fuse_conv_bias": "1"},
}


def in_a_program(layout: str) -> str:
    """Return the line of a program that opens a session with ``layout``."""
    return f'GPUSession(model, providers=[("{CUDA}", {json.dumps(LAYOUTS[layout])})])'
