import pytest


@pytest.mark.ortgpu(allow_cpu=True)
def test_one(gpu_device):
    assert gpu_device.is_gpu


@pytest.mark.ortgpu(count=2, allow_cpu=True)
def test_two():
    pass
