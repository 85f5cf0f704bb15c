import os

import pytest

from ortgpu import testing

testing._warm_up = lambda gpu: None
testing._SETTLING = 0.2


def set_use(own, free):
    entry = "uuid=GPU-00000000-0000-0000-0000-0000000000bb|total=1000000000000|free=" + str(free)
    processes = f"|processes=1:5000000000,{os.getpid()}:{own}" if own else "|processes=1:5000000000"
    os.environ["STUB_NVML_GPUS"] = entry + processes


@pytest.fixture(params=[True, False], ids=["shown", "not shown"])
def shown(request):
    set_use(500_000_000 if request.param else None, 900_000_000_000)
    return request.param


def test_leak(shown, gpu_leak_check):
    set_use(shown and 600_000_000, 899_900_000_000)


def test_growth(shown, gpu_leak_check):
    set_use(shown and 550_000_000, 899_950_000_000)


def test_others(shown, gpu_leak_check):
    set_use(shown and 500_000_000, 800_000_000_000)
