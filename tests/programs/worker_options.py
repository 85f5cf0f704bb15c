"""Functions that make SessionOptions, for worker processes to call."""

from __future__ import annotations

from typing import Any


def make_options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def fix_dimension() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name("n", 3)
    return options
