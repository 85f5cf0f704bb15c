import pytest


@pytest.mark.ortgpu
@pytest.mark.xfail(reason="a test that fails")
def test_it():
    assert 0
