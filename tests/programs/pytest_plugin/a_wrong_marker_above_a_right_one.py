import pytest

pytestmark = pytest.mark.ortgpu(cuont=2)


@pytest.mark.ortgpu(count=1)
def test_it():
    pass
