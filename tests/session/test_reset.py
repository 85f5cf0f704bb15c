"""Another library resets the GPU: no use of a session reaches ONNX Runtime, which would use memory that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.child import Machine
from tests.lab.fixtures import Lab

PROGRAM = Path(__file__).parents[1] / "programs" / "reset_sessions.py"
WAYS = (
    "run", "run_with_iobinding", "bind_cpu_input", "run_with_ort_values", "run_async", "run_on_device", "map",
)  # fmt: skip


@pytest.fixture(scope="module")
def machine(module_lab: Lab, provider_library: str) -> Machine:
    return module_lab.machine_that_places(provider_library)


@pytest.mark.parametrize(
    ("context", "outcomes"),
    [
        ("1", "ran ran"),
        ("2", "ProviderFailureError ProviderFailureError"),  # something has made another context since
        ("0", "ProviderFailureError ProviderFailureError"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_session_refuses_after_a_reset(
    machine: Machine, module_lab: Lab, way: str, context: str, outcomes: str
) -> None:
    child = machine.run(argv=[str(PROGRAM), str(module_lab.models.relu), way, context])
    assert child.ok().stdout.strip() == outcomes
