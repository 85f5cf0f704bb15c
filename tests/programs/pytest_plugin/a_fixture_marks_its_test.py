import pytest


@pytest.fixture
def model(gpu_session):
    return "model"


def test_device(gpu_device):
    pass


def test_session(gpu_session):
    pass


def test_through_another(model):
    pass


def test_plain():
    pass
