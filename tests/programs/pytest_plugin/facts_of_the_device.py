import pytest

from ortgpu import Device


@pytest.mark.ortgpu(count=2)
def test_it(gpu_device, gpu_devices):
    assert isinstance(gpu_device, Device) and gpu_device is gpu_devices[0]
    assert (gpu_device.ordinal, gpu_device.uuid, gpu_device.total_memory) == (0, "GPU-0", 80 * 2**30)
    assert gpu_devices[1].uuid == "GPU-1"
