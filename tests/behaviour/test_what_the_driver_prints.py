"""A driver that fails says why on its own standard error, and ONNX Runtime's provider is not to blame."""

from __future__ import annotations

from ortgpu.diagnosis.probe.probing import MARK, parse_report
from tests.lab.fixtures import Lab

TEGRA = """
#include <stdio.h>
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuTensorMapEncodeTiled(void) { return 801; }  /* which the provider links */
int cuInit(unsigned flags) {
    (void)flags;
    fprintf(stderr, "NvRmMemInitNvmap failed with Permission denied\\n\\n****NvRmMemMgrInit failed****\\n");
    return 999;
}
"""

DIAGNOSE = """
import ortgpu
report([[type(problem).__name__, list(problem.evidence)] for problem in ortgpu.diagnose(probe=True).problems])
"""


def test_what_the_driver_printed_is_evidence(lab: Lab) -> None:
    machine = lab.machine()
    made = lab.stubs.compile("tegra", TEGRA, "-Wl,-soname,libcuda.so.1")
    folder = machine.overlay.root / "driver"
    folder.mkdir()
    (folder / "libcuda.so.1").write_bytes(made.read_bytes())
    problems = machine.run(DIAGNOSE, env={"LD_LIBRARY_PATH": str(folder)}).ok().json
    # Nor is cuDNN's run-time compiler missing, which this driver has not the functions for.
    assert [name for name, _ in problems] == ["DriverUnusableError"]
    (_, evidence) = problems[0]
    assert "it printed: NvRmMemInitNvmap failed with Permission denied" in evidence
    assert "it printed: ****NvRmMemMgrInit failed****" in evidence


def test_each_step_has_its_own() -> None:
    lines = [
        "before",
        MARK + '{"begin": "driver"}',
        *(f"line {number}" for number in range(40)),
        "",
        MARK + '{"end": "driver", "ok": false, "data": {"code": 999}}',
        MARK + '{"begin": "libraries"}',
        "of the libraries",
        MARK + '{"end": "libraries", "ok": true}',
        MARK + '{"done": true}',
    ]
    result = parse_report("\n".join(lines), 0, 1.0)
    driver, libraries = result.steps
    assert driver.data == {"code": 999, "printed": [f"line {number}" for number in (*range(10), *range(20, 40))]}
    assert libraries.data == {}
