"""What an error of a session that failed keeps alive: no C++ session, and, once it was handled, nothing.

The session of ONNX Runtime that failed has taken memory of the GPU by then, weights for instance. A program that goes
on with a smaller model, in the ``except`` clause or after it, must find that free, whenever garbage is collected next.
"""

from __future__ import annotations

import pytest

from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, NVML, Cuda

TWO = tuple(GPU(uuid=f"GPU-{n}0000000-0000-0000-0000-000000000000") for n in (1, 2))

ATTEMPT = """
import gc, os, traceback, warnings, weakref
warnings.simplefilter("ignore")
import onnxruntime, ortgpu
from onnxruntime.capi import onnxruntime_pybind11_state as native
from ortgpu.diagnosis.probe.probing import RELU
gc.disable()

class Mine:
    pass

def natives_in(error):
    tracebacks = error.__traceback__.tb_next, error.__cause__ and error.__cause__.__traceback__
    frames = [frame for each in tracebacks for frame, _ in traceback.walk_tb(each)]
    values = [value for frame in frames for value in frame.f_locals.values()]
    return sum(isinstance(value, native.InferenceSession) for value in values)

def attempt(action):
    mine = Mine()
    try:
        action()
    except ortgpu.GPUError as error:
        found = [type(error).__name__, natives_in(error)]
    return weakref.ref(mine), found

def guarded():
    with ortgpu.enforce():
        onnxruntime.InferenceSession(RELU)

def no_longer_allowed():
    os.environ["ORTGPU_ALLOW_CPU"] = "1"
    session = ortgpu.GPUSession(RELU, allow_cpu=None)
    del os.environ["ORTGPU_ALLOW_CPU"]
    session.set_providers()

"""


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("lambda: ortgpu.GPUSession(RELU)", "DriverUnusableError"),
        ("lambda: ortgpu.GPUSessionPool(RELU)", "DriverUnusableError"),
        ("guarded", "DriverUnusableError"),
        ("no_longer_allowed", "DriverUnusableError"),
    ],
)
def test_an_error_keeps_no_session_and_nothing_of_its_caller(lab: Lab, action: str, error: str) -> None:
    machine = lab.machine(cuda=Cuda(devices=TWO), nvml=NVML(TWO))
    result = machine.run(f"{ATTEMPT}mine, found = attempt({action})\nreport([*found, mine() is None])")
    assert result.ok().json == [error, 0, True]
