import pytest


@pytest.mark.xfail(reason="a test that fails")
def test_it(request):
    request.getfixturevalue("gpu_device")
