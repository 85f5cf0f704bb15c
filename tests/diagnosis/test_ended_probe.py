"""A probe that was ended: what ended it is not always the library in whose code it was."""

from __future__ import annotations

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.probe.result import ProbeStep
from ortgpu.errors import BrokenPackageError
from tests.faults.case import H200, library, own_path, with_gpus
from tests.lab.child import outcome_of
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA, GPU_DISTRIBUTION, LINKS_DRIVER, older_than
from tests.support.made_facts import HEALTHY, SITE, part, probed

DRIVER = ProbeStep("driver", True, "cuInit 0, devices: 1")
CURAND = f"{SITE}/nvidia/cu13/lib/libcurand.so.10"


@pytest.mark.parametrize("step", ["libraries", "import", "provider", "session", "model"])
@pytest.mark.parametrize(
    ("signal", "says", "needs"),
    [
        ("SIGKILL", "memory runs out", "host"),
        ("SIGSYS", "seccomp", "host"),
        ("SIGILL", "no such instruction", "hardware"),
        ("exception 0xC000001D", "no such instruction", "hardware"),
    ],
)
def test_what_the_system_ended_is_not_installed_again(step: str, signal: str, says: str, needs: str) -> None:
    facts = probed(DRIVER, died_in=step, signal=signal, opening=CURAND)(part("host", memory_total=512 << 20)(HEALTHY))
    (error,) = find_problems(facts)
    assert error.code == "provider-fallback"
    assert signal in error.summary
    assert says in error.summary
    assert [fix.needs for fix in error.fixes] == [needs]
    assert "memory of this machine or container: 512 MiB" in error.evidence
    assert f"it was opening {CURAND}" in error.evidence


def test_in_the_driver_it_is_not_mended_by_a_reboot() -> None:
    (error,) = find_problems(probed(died_in="driver", signal="SIGKILL")(HEALTHY))
    assert error.code == "driver-unusable"
    assert [fix.needs for fix in error.fixes] == ["host"]


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_what_a_library_ended_is_its_own(signal: str) -> None:
    (error,) = find_problems(probed(DRIVER, died_in="libraries", signal=signal, opening=CURAND)(HEALTHY))
    assert error.code == "broken-package"


@pytest.mark.parametrize("path", ["/usr/local/cuda-13.0/lib64/libcurand.so.10", CURAND])
def test_a_library_of_no_package_is_not_mended_by_another_onnx_runtime(path: str) -> None:
    (error,) = find_problems(probed(DRIVER, died_in="libraries", opening=path)(HEALTHY))
    assert isinstance(error, BrokenPackageError)
    assert error.package is None
    assert error.files == (path,)
    assert [str(fix) for fix in error.fixes] == ["/venv/bin/python -m pip install 'nvidia-curand~=10.0'"]


@pytest.mark.skipif(CUDA != 13, reason="which bytes of a library are of use at its start is known of those for CUDA 13")
@pytest.mark.skipif(older_than(LINKS_DRIVER) is not None, reason=str(older_than(LINKS_DRIVER)))
@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("onnxruntime/capi/onnxruntime_pybind11_state*.so", GPU_DISTRIBUTION),
        (library("libcudart"), "nvidia-cuda-runtime"),
        ("numpy/_core/_multiarray_umath*.so", "numpy"),
    ],
)
def test_a_hole_in_a_library_is_found_after_the_crash(lab: Lab, file: str, named: str) -> None:
    """As a machine leaves it that went down while the file was written: all of its length, and zeros in the middle."""
    machine = lab.machine(**with_gpus(H200))
    path = own_path(machine.overlay, file)
    content = bytearray((machine.overlay.site / path).read_bytes())
    start, end = int(len(content) * 0.3), int(len(content) * 0.4)
    content[start:end] = bytes(end - start)
    machine.overlay.replace(path, bytes(content))
    error = outcome_of(machine.run("diagnose_here(True)")).error
    assert error is not None
    assert error.type == "BrokenPackageError", error.text
    assert path.rpartition("/")[2] in error.evidence[-1]
    assert f"--force-reinstall --no-deps {named}==" in error.fixes[0]
    assert any("ended the process" in str(other.summary) for other in error.others)
