import pytest


def test_plain():
    pass


@pytest.mark.ortgpu
def test_marked():
    pass


def test_fixture(gpu_device):
    pass
