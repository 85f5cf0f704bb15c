import pytest

pytestmark = pytest.mark.ortgpu(count=2, memory="8GiB", allow_cpu=True)


def test_devices(gpu_devices):
    assert [str(each) for each in gpu_devices] == ["cpu", "cpu"]


def test_session(gpu_session, gpu_leak_check):
    assert gpu_session("model").options == {"allow_cpu": True}
    assert gpu_session("model", allow_cpu=None).options == {"allow_cpu": None}


@pytest.mark.ortgpu(allow_cpu=False)
def test_on_a_gpu(gpu_device):
    assert gpu_device.is_gpu
