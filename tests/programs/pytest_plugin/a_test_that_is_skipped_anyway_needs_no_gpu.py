import pytest


@pytest.mark.ortgpu
@pytest.mark.skip(reason="not today")
def test_it():
    pass
