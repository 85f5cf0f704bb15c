"""When a result counts as wrong beside that of plain ONNX Runtime."""

from __future__ import annotations

import numpy as np

from ortgpu.session.tuning.comparing import compare

RIGHT = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)


def test_an_error_that_is_everywhere_is_worse_than_one_in_a_single_value() -> None:
    """The largest difference is the same; the root mean square tells them apart."""
    single, everywhere = RIGHT.copy(), RIGHT + np.float32(1e-3)
    single[0, 0] += np.float32(1e-3)
    assert "typically" in str(compare(RIGHT, single, everywhere)[1])
    assert compare(RIGHT, everywhere, single)[1] is None
