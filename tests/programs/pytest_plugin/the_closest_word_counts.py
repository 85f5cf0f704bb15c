import pytest

pytestmark = pytest.mark.ortgpu(count=3, compute_capability=(8, 0))


@pytest.mark.ortgpu(memory="1GiB")
class TestClass:
    def test_of_the_module(self, gpu_devices):
        assert 0, "three GPUs, and two have the memory"

    @pytest.mark.ortgpu(count=2)
    def test_of_the_function(self, gpu_devices):
        assert [gpu.ordinal for gpu in gpu_devices] == [1, 2]


@pytest.mark.ortgpu
def test_bare(gpu_devices):
    assert len(gpu_devices) == 3
