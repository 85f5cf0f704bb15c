"""The driver is initialised in a thread; where it fails, that thread imports what a diagnosis needs."""

from __future__ import annotations

import pytest

from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, Cuda

PROGRAM = """
import sys
from ortgpu.environment.cuda import initialising
from ortgpu.session import _import_diagnosis
print(initialising(_import_diagnosis).result().code, "ortgpu.diagnosis" in sys.modules)
"""


@pytest.mark.parametrize(
    ("cuda", "printed"),
    [
        pytest.param(Cuda(devices=(GPU(),)), "0 False", id="well"),
        pytest.param(Cuda(init=100), "100 True", id="no device"),
        pytest.param(None, "None True", id="no driver"),
    ],
)
def test_only_a_failure_imports_the_diagnosis(lab: Lab, cuda: Cuda | None, printed: str) -> None:
    assert lab.machine(cuda=cuda).run(PROGRAM).ok().stdout.split("\n")[0] == printed
