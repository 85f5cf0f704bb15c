import pytest


@pytest.fixture
def gpu_device():
    return "theirs"


@pytest.fixture
def gpu_session(gpu_device):
    return gpu_device
