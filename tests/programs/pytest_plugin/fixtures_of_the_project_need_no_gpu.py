import pytest


def test_theirs(gpu_device):
    assert gpu_device == "theirs"


def test_theirs_through_another(gpu_session):
    assert gpu_session == "theirs"


@pytest.mark.parametrize("gpu_devices", ["theirs"])
def test_a_parameter(gpu_devices):
    assert gpu_devices == "theirs"
