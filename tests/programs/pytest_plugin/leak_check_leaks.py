import pytest

from ortgpu.testing import hold  # type: ignore[attr-defined]  # set here, or of the type that it is


class Held:
    def __init__(self):
        hold(2**30)
        self.itself = self

    def __del__(self):
        hold(-(2**30))


@pytest.fixture
def value(gpu_device):
    return Held()


kept = []
