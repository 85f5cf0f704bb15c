"""Tests that need a GPU.

pytest examples/test_with_gpu.py                     # where no GPU can be used: skipped, and the reason says why
pytest examples/test_with_gpu.py --ortgpu=require    # on a machine that is meant to have one: then that is a failure
pytest examples/test_with_gpu.py -n 4                # with pytest-xdist: the workers are spread over the GPUs
"""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


@pytest.fixture
def model() -> bytes:
    return onnx.parser.parse_model(RELU).SerializeToString()


def test_result(gpu_session, model):
    session = gpu_session(model, cpu_nodes="forbid")  # takes what GPUSession takes, and is closed after the test
    assert session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0].tolist() == [[0, 0, 1, 2]]


@pytest.mark.ortgpu(memory="2GiB", compute_capability=(7, 0))
def test_device(gpu_device):
    assert gpu_device.total_memory is None or gpu_device.total_memory >= 2 * 2**30


@pytest.mark.usefixtures("gpu_leak_check")  # fails a test that leaves GPU memory behind
def test_memory(gpu_session, model):
    gpu_session(model)
