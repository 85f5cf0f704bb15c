"""Programs of ``tests/session/test_request.py``."""

from __future__ import annotations

import os

import numpy as np

import ortgpu
from tests.programs.on_cpu import NEG, report


def a_size_that_a_pool_of_processes_is_given_as_text() -> None:
    import tempfile

    path = os.path.join(tempfile.mkdtemp(), "neg.onnx")
    open(path, "wb").write(NEG)
    with ortgpu.GPUSessionPool(path, isolate=True, pinned_memory_limit="64MB") as pool:
        report(pool.run(None, {"x": np.ones(1 << 20, np.float32)})[0][:2].tolist())
