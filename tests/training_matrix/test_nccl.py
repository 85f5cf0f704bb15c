"""NCCL of NVIDIA's wheels: one copy, two copies, packages over each other, none."""

from __future__ import annotations

from pathlib import Path

from tests.faults.advice import own
from tests.lab import Machine, Overlay
from tests.lab.fixtures import Lab
from tests.training_matrix.environments import DEADLINE, MARKS, bin_of, call, diagnosis, mend, problems

pytestmark = MARKS


def test_nccl_of_the_real_wheel(nccl: Path) -> None:
    found = diagnosis(nccl, "--no-probe")
    (library,) = found["training"]["environment"]["nccl"]["libraries"]
    wheel = next(iter(nccl.glob("nvidia_nccl_cu13-*.dist-info"))).name.split("-")[1].removesuffix(".dist")
    assert ".".join(map(str, library["version"])) == ".".join(wheel.split(".")[:3])
    assert library["cuda_version"][0] == 13
    assert library["source"] == "nvidia wheels"
    row = next(row for row in found["requirements"] if row["name"] == "NCCL")
    assert (row["status_minimum"], row["status_recommended"]) == ("pass", "pass")
    assert "library-conflict" not in problems(found)


def test_two_copies_of_nccl(nccl: Path, tmp_path: Path) -> None:
    """The first is the one that nccl4py really loads."""
    (tmp_path / "libnccl.so.2").write_bytes((nccl / "nvidia/nccl/lib/libnccl.so.2").read_bytes())
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    error = problems(diagnosis(nccl, "--no-probe", env=env))["library-conflict"]
    assert error["severity"] == "warning"
    copies = [str(nccl / "nvidia/nccl/lib/libnccl.so.2"), str(tmp_path / "libnccl.so.2")]
    assert error["details"]["libraries"] == copies
    code = "from nccl.bindings import nccl; nccl.get_version(); print(nccl.get_library_path())"
    assert call(nccl, str(bin_of(nccl) / "python"), "-c", code, env=env).stdout.strip() == copies[0]


def test_no_nccl(training: Path) -> None:
    found = diagnosis(training, "--no-probe")
    assert found["training"]["environment"]["nccl"]["libraries"] == []
    row = next(row for row in found["requirements"] if row["name"] == "NCCL")
    assert (row["status_minimum"], row["found"]) == ("fail", "no libnccl.so.2 was found")


def test_nccl_packages_over_each_other_and_the_fix(nccl: Path, lab: Lab) -> None:
    overlay = Overlay(lab.folder / "environment", nccl)
    own(overlay, overlay.site / "nvidia")
    for entry in overlay.site.glob("nvidia_nccl*"):
        own(overlay, entry)
    overlay.add_wheel(lab.wheels.get("nvidia-nccl-cu12", "2.32.3"))
    machine = Machine(overlay, lab.stubs)
    code = 'import ortgpu; report([describe(p) for p in ortgpu.diagnose(profile="training").problems])'
    (error,) = [
        problem for problem in machine.run(code, timeout=DEADLINE).json if problem["type"] == "LibraryConflictError"
    ]
    assert "nvidia-nccl-cu12 and nvidia-nccl-cu13" in error["summary"]
    (fix,) = error["fixes"]
    assert "install nvidia-nccl-cu12==2.32.3" in fix, "the library that is there now"
    left = mend(machine, fix, lab, code).json
    assert "LibraryConflictError" not in {problem["type"] for problem in left}
    version = "import ortgpu.distributed.environment as n; report(n.read_nccl().chosen.cuda_version[0])"
    assert machine.run(version, timeout=DEADLINE).json == 12
