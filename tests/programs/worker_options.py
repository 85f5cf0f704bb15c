"""Functions that make SessionOptions, for other processes to call."""

from __future__ import annotations

from typing import Any

initialisers: list[Any] = []  # SessionOptions do not keep them


def make_options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def fix_dimension() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name("n", 3)
    return options


def ten_times() -> Any:
    """Return options that put 10 in the place of an initialiser ``w`` and 4 in that of a dimension ``n``."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    ten = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(1, 10, np.float32))
    initialisers.append(ten)
    options.add_initializer("w", ten)
    options.add_free_dimension_override_by_name("n", 4)
    return options
