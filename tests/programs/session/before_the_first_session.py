"""Programs of ``tests/session/test_before_the_first_session.py``."""

from __future__ import annotations

from tests.programs.machines import report


def steps() -> None:
    import sys

    import numpy as np
    import onnxruntime

    import ortgpu

    steps = {
        "OrtValue": lambda: onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(4, np.float32), "cuda", 0).device_name(),
        "add_provider": lambda: onnxruntime.SessionOptions().add_provider("CUDAExecutionProvider", {"device_id": "0"}),
        "operators": lambda: onnxruntime.SessionOptions().register_custom_ops_library(sys.argv[1]),
    }
    if len(sys.argv) > 2:
        assert ortgpu.preload().ok
    outcomes = {}
    for name, step in steps.items():
        try:
            outcomes[name] = step()
        except Exception as error:
            outcomes[name] = type(error).__name__
    report(outcomes)
