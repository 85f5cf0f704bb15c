import pytest

pytestmark = pytest.mark.ortgpu(memory="8GiB")


def test_of_the_module():
    pass


@pytest.mark.ortgpu(memory=None)
def test_of_the_function():
    pass
