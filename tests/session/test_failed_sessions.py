"""What an error of a session that failed keeps alive: no C++ session, and, once it was handled, nothing.

The session of ONNX Runtime that failed has taken memory of the GPU by then, weights for instance. A program that goes
on with a smaller model, in the ``except`` clause or after it, must find that free, whenever garbage is collected next.
"""

from __future__ import annotations

import pytest

from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, NVML, Cuda

TWO = tuple(GPU(uuid=f"GPU-{n}0000000-0000-0000-0000-000000000000") for n in (1, 2))


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
    code = f"mine, found = attempt({action})\nreport([*found, mine() is None])"
    result = machine.run_program(code, behind="machines session.failed_sessions")
    assert result.ok().json == [error, 0, True]
