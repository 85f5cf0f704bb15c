import pytest


@pytest.mark.ortgpu(count=2)
def test_two():
    pass


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.ortgpu(count=2)
def test_numbers(number):
    pass


@pytest.mark.ortgpu(count=2)
class TestClass:
    def test_of_a_class(self):
        pass


@pytest.fixture
def devices(gpu_devices):
    return gpu_devices


@pytest.mark.ortgpu(count=2)
def test_through_a_fixture(devices):
    pass


@pytest.mark.xfail
@pytest.mark.ortgpu(count=2)
def test_that_may_fail():
    pass
