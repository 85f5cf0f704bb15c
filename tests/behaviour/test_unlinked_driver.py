"""The driver's library without the link by which it is found, in a folder that this user cannot write."""

from __future__ import annotations

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.environment.gpu.driver import UnlinkedFile
from tests.faults.case import H200
from tests.faults.driver_library import unlinked
from tests.lab import NVML, Cuda
from tests.lab.fixtures import Lab
from tests.support.made_facts import HEALTHY, NO_DRIVER, all_of, part


def test_a_link_elsewhere_mends_it(lab: Lab) -> None:
    """No mode of a folder stops root, who runs tests too: the command is printed over facts, and run in truth."""
    machine = lab.machine()
    unlinked(lab, machine.overlay)
    folder = machine.overlay.root / "driver"
    file = UnlinkedFile(str(folder / "libcuda.so.580.65.06"), writable=False)
    fix = find_problems(all_of(NO_DRIVER, part("driver", libcuda_unlinked=(file,)))(HEALTHY))[0].fixes[0]
    assert fix.executable
    answers = {**Cuda(devices=(H200,)).variables(), **NVML(gpus=(H200,)).variables()}
    for path in (str(folder), None):
        code = f"open_session({str(lab.models.relu)!r}, {{}})"
        found = machine.run(code, first=str(fix), env={"LD_LIBRARY_PATH": path, **answers}).ok()
        assert found.json["error"]["type"] == "DriverUnusableError", "the stub is found, and opens no device"
