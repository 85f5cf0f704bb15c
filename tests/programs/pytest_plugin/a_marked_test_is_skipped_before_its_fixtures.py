import pytest


@pytest.fixture(scope="session", autouse=True)
def of_the_run():
    raise RuntimeError


@pytest.fixture(scope="module")
def of_the_module():
    raise RuntimeError


@pytest.mark.ortgpu
def test_it(of_the_module):
    pass
