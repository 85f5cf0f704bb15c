import pytest


def names(gpus):
    return [(gpu.ordinal, gpu.uuid[-2:]) for gpu in gpus]


@pytest.mark.ortgpu(count=3)
def test_all(gpu_devices):
    assert names(gpu_devices) == [(0, "aa"), (1, "bb"), (2, "cc")]


@pytest.mark.ortgpu(compute_capability=(8, 0))
def test_new(gpu_devices):
    assert names(gpu_devices) == [(1, "bb")]


@pytest.mark.ortgpu(memory="16GiB")
def test_large(gpu_device):
    assert (gpu_device.name, gpu_device.total_memory, gpu_device.compute_capability) == (
        "NVIDIA H200",
        141 * 2**30,
        (9, 0),
    )


@pytest.mark.ortgpu(memory="14GiB", count=2)
def test_two(gpu_devices):
    assert names(gpu_devices) == [(0, "aa"), (1, "bb")]


@pytest.mark.ortgpu(memory="3GiB", count=2, compute_capability=(8, 0))
def test_none():
    pass


@pytest.mark.ortgpu(count=4)
def test_four():
    pass
