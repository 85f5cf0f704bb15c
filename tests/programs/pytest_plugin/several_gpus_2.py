import pytest


@pytest.mark.ortgpu(memory="16GiB")
def test_one(gpu_devices):
    assert [(gpu.ordinal, gpu.uuid[-2:]) for gpu in gpu_devices] == [(0, "bb")]


@pytest.mark.ortgpu(count=2)
def test_two():
    pass
