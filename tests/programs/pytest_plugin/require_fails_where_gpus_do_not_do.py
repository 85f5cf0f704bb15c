import pytest


@pytest.mark.ortgpu(count=2)
def test_two():
    pass


@pytest.mark.ortgpu
def test_one():
    pass
