import pytest


@pytest.mark.ortgpu(cuont=2)
def test_it():
    print("a test ran")
