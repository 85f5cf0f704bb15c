import os
import pathlib
import time

import pytest


@pytest.mark.parametrize("number", range(8))
def test_it(number, gpu_device):
    worker = os.environ["PYTEST_XDIST_WORKER"]
    pathlib.Path(f"{worker}-{gpu_device.ordinal}").touch()
    time.sleep(0.1)


def test_plain():
    pass
