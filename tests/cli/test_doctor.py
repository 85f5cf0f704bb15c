"""The doctor on machines of the lab: exit codes, what is found, and how much is shown of it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ortgpu
from ortgpu.__main__ import main
from ortgpu.cli.findings import Report
from ortgpu.diagnosis.diagnosing import Diagnosis
from ortgpu.diagnosis.probe.result import ProbeResult
from ortgpu.diagnosis.requirements import check_inference
from ortgpu.environment.inspection import Environment, inspect_environment
from ortgpu.environment.libraries.catalogue import major_of
from ortgpu.errors import ConflictingPackagesError, GPUError, NoDeviceError
from tests.lab import GPU, NVML, Cuda
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA, LINKS_CUDNN, soname
from tests.support.doctor_runs import EVERYTHING, H200, doctor, document
from tests.support.made_facts import HEALTHY

CUFFT = soname("libcufft")


def rows_on_a_screen(text: str, columns: int = 80) -> int:
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


def test_healthy_as_far_as_looking_goes(lab: Lab) -> None:
    """The stub driver opens no session: that a probe succeeds is for a machine with a GPU to show."""
    result = doctor(lab.machine(**EVERYTHING), "--no-probe").ok()
    lines = result.stdout.splitlines()
    assert lines[-1] == "OK: no fault found. Nothing was opened to make sure (--no-probe)."
    assert rows_on_a_screen(result.stdout) <= 24
    for expected in ("onnxruntime-gpu", "580.65.06", "NVIDIA H200", H200.uuid, "nvidia wheels", "not run (--no-probe)"):
        assert expected in result.stdout
    assert re.search(r"requirements +\d+ met$", result.stdout, re.MULTILINE)
    assert "NOT FOUND" not in result.stdout


def test_no_driver_is_one_screen(lab: Lab) -> None:
    result = doctor(lab.machine())
    assert result.returncode == 1
    order = ["DriverNotFoundError: ", "  - libcuda.so.1: ", "To fix it:", "More: ortgpu explain ", "What was found"]
    positions = [result.stdout.index(text) for text in order]
    assert positions == sorted(positions)
    assert positions[0] == 0
    assert rows_on_a_screen(result.stdout[: positions[-1]]) <= 24
    assert "driver FAILED" in result.stdout


def test_document_of_a_machine_without_a_driver(lab: Lab) -> None:
    found = document(lab.machine())
    assert list(found) == ["schema", "ortgpu", "ok", "model", "problems", "requirements", "environment", "probe"]
    assert (found["schema"], found["ortgpu"], found["model"]) == (1, ortgpu.__version__, None)
    problem = found["problems"][0]
    assert set(problem) == {
        "type", "code", "severity", "summary", "evidence", "fixes", "consequence_of", "others", "details"
    }  # fmt: skip
    assert problem["code"] == "driver-not-found"
    assert {key for fix in problem["fixes"] for key in fix} == {"text", "kind", "needs"}
    assert {key for row in found["requirements"] for key in row} == {
        "name", "minimum", "recommended", "found", "status_minimum", "status_recommended", "note"
    }  # fmt: skip
    assert set(found["environment"]) == {field.name for field in dataclasses.fields(Environment)}
    assert found["probe"]["steps"][0]["name"] == "driver"
    assert found["probe"]["completed"] is True


def test_every_key_of_the_document_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    diagnosis = Diagnosis((NoDeviceError("none"),), inspect_environment(), None)
    made = Report(None, diagnosis, check_inference(diagnosis.environment)).document()
    assert {key for key in made if f'"{key}"' not in shown} == set()
    words = set(re.findall(r"\w+", shown))
    assert {field.name for field in dataclasses.fields(Environment)} <= words
    assert {field.name for field in dataclasses.fields(ProbeResult)} <= words
    assert {*made["problems"][0], *made["requirements"][0]} <= words


def test_cpu_only_package(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)
    result = doctor(machine)
    assert result.returncode == 1
    assert result.stdout.startswith("CPUOnlyPackageError: ")
    assert "uninstall" in result.stdout
    assert "unknown (no provider file says which)" in result.stdout


def test_import_fails(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.replace("onnxruntime/__init__.py", b"import no_such_module\n")
    found = document(machine)
    assert found["problems"][0]["code"] == "broken-package"
    assert any("no_such_module" in fact for problem in found["problems"] for fact in problem["evidence"])


def test_nothing_is_installed(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.uninstall("onnxruntime-gpu").remove("nvidia", "nvidia_*.dist-info")
    result = doctor(machine, "--verbose")
    assert result.returncode == 1
    assert result.stdout.startswith("OnnxRuntimeNotInstalledError: ")
    assert re.search(r"ONNX Runtime +not installed$", result.stdout, re.MULTILINE)


def test_a_folder_of_that_name_is_no_onnxruntime(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine()
    machine.overlay.uninstall("onnxruntime-gpu")
    (tmp_path / "onnxruntime" / "models").mkdir(parents=True)
    result = machine.run(argv=["-m", "ortgpu", "doctor"], cwd=tmp_path)
    assert result.stdout.startswith("OnnxRuntimeNotInstalledError: ")
    assert f"ONNX Runtime  nothing to import in {tmp_path}/onnxruntime\n" in result.stdout


def test_a_probe_that_cannot_be_started_says_why(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(devices=(H200,)), nvml=NVML(gpus=(H200,)))
    code = "import sys; sys.frozen = True; from ortgpu.__main__ import main; sys.exit(main(['doctor']))"
    result = machine.run(code)
    assert result.returncode == 1
    last = result.stdout.splitlines()[-1]
    assert last.startswith("No check found a fault, but the probe failed: start, this program is frozen")


def test_missing_libraries_are_all_named(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10", f"nvidia/*/lib/{soname('libcudart')}")
    machine.overlay.truncate(f"nvidia/*/lib/{CUFFT}", 1000)
    result = doctor(machine, "--no-probe")
    assert result.returncode == 1
    assert result.stdout.startswith("LibraryNotFoundError: ")
    assert f"cudart {CUDA}, curand 10: NOT FOUND\n" in result.stdout
    at_need = not LINKS_CUDNN
    of_cufft = f"cufft {major_of(CUFFT)}: NOT FOUND{' (loaded only on demand)' * at_need}, 1 unusable file\n"
    assert of_cufft in result.stdout
    assert ("warning: " in result.stdout) == at_need
    assert "unusable: " not in result.stdout
    full = doctor(machine, "--no-probe", "--verbose").stdout
    assert re.search(rf"unusable: \S+{CUFFT} \(nvidia wheels\): truncated", full)


@pytest.mark.parametrize("nvml", [None, NVML(init=9), NVML(error=999)], ids=["absent", "no-driver", "errors"])
def test_nvml_that_does_not_work(lab: Lab, nvml: NVML | None) -> None:
    machine = lab.machine(cuda=Cuda(devices=(H200,)), nvml=nvml)
    result = doctor(machine, "--no-probe").ok()
    assert "NVML does not work: " in result.stdout
    assert "unknown (NVML unavailable)" in result.stdout
    assert H200.uuid in doctor(machine).stdout, "CUDA itself was asked for it"
    rows = {row["name"]: row["status_minimum"] for row in document(machine, "--no-probe")["requirements"]}
    assert rows["compute capability"] == rows["GPU memory"] == "unknown"
    assert rows["driver"] == "pass"


def test_driver_that_kills_the_process(lab: Lab) -> None:
    """The child dies, and the doctor says in what."""
    machine = lab.machine(**EVERYTHING)
    broken = lab.folder / "broken"
    broken.mkdir()
    source = broken / "libcuda.c"
    source.write_text("#include <stdlib.h>\nint cuInit(unsigned f) { (void)f; abort(); }\n", encoding="utf-8")
    target = broken / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True, timeout=60)
    result = doctor(machine, env={"LD_LIBRARY_PATH": str(broken)})
    assert result.returncode == 1
    assert "SIGABRT" in result.stdout
    assert re.search(r"ended with SIGABRT in: driver$", result.stdout, re.MULTILINE)


def test_it_opens_nothing_in_its_own_process(lab: Lab) -> None:
    code = """
import sys
from ortgpu.__main__ import main
code = main(["doctor"])
maps = open("/proc/self/maps").read()
report({"code": code, "onnxruntime": "onnxruntime" in sys.modules, "onnx": "onnx" in sys.modules,
        "cudart": "libcudart" in maps, "provider": "providers_cuda" in maps})
"""
    machine = lab.machine(cuda=Cuda(init=999, devices=(H200,)), nvml=NVML(gpus=(H200,)))
    result = machine.run(code, env={"STUB_CUDA_TRACE": "1"})
    assert result.json == {"code": 1, "onnxruntime": False, "onnx": False, "cudart": False, "provider": False}
    assert "DriverUnusableError" in result.stdout
    assert "call cuInit" not in result.stderr, "the child's stderr is the probe's: this is our own process"


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("nvidia/cudnn", marks=pytest.mark.skipif(LINKS_CUDNN, reason="linked: no model does without")),
        "nvidia/cudnn/lib/libcudnn_ops.so.9",
    ],
)
def test_model(lab: Lab, lost: str) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.remove(lost)
    assert document(machine, "--no-probe", "--model", str(lab.models.relu))["ok"] is True
    found = document(machine, "--no-probe", "--model", str(lab.models.conv))
    assert found["model"] == str(lab.models.conv)
    assert found["problems"][0]["code"] == "library-not-found"
    assert "Conv" in found["problems"][0]["summary"]


def test_several_gpus_take_a_line_for_each_kind(lab: Lab) -> None:
    gpus = tuple(GPU(uuid=f"GPU-{n}", name="NVIDIA H200" if n < 7 else "NVIDIA A100") for n in range(8))
    machine = lab.machine(cuda=Cuda(devices=gpus), nvml=NVML(gpus=gpus))
    shown = doctor(machine, "--no-probe").stdout
    assert "7 x NVIDIA H200, compute capability 9.0, 141 GiB\n" in shown
    assert "GPU-3" not in shown
    full = doctor(machine, "--no-probe", "--verbose").stdout
    assert all(gpu.uuid in full for gpu in gpus)
    assert "compute mode default" in full


def judged(monkeypatch: pytest.MonkeyPatch, *problems: GPUError, environment: Environment) -> list[dict[str, Any]]:
    """Have the doctor find these problems. Return the arguments that it passes on."""
    asked: list[dict[str, Any]] = []

    def diagnose(model: Any, **named: Any) -> Diagnosis:
        asked.append({"model": model, **named})
        return Diagnosis(problems, environment, None)

    monkeypatch.setattr(ortgpu, "diagnose", diagnose)
    return asked


FATAL, WARNING = NoDeviceError("none"), ConflictingPackagesError("two", severity="warning")


@pytest.mark.parametrize(
    ("problems", "code"),
    [((), 0), ((WARNING,), 0), ((FATAL,), 1), ((WARNING, FATAL), 1)],
    ids=["none", "a warning", "a fatal one", "both"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
def test_a_problem_that_keeps_sessions_off_the_gpu_is_the_exit_code(
    problems: tuple[GPUError, ...],
    code: int,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    judged(monkeypatch, *problems, environment=HEALTHY.environment)
    assert main(["doctor", *(["--json"] if as_json else [])]) == code
    if as_json:
        shown = json.loads(capsys.readouterr().out)
        assert (shown["ok"], [each["code"] for each in shown["problems"]]) == (not code, [e.code for e in problems])


PASSED_ON: list[tuple[list[str], dict[str, Any]]] = [
    ([], {}),
    (["--no-probe"], {"probe": False}),
    (["--timeout", "7"], {"timeout": 7}),
    (["--profile", "training", "--ssh", "a", "--ssh", "b"], {"profile": "training", "ssh": ("a", "b")}),
    (["--profile", "training", "--shared-folder", "/d"], {"profile": "training", "shared_folder": "/d"}),
]


@pytest.mark.parametrize(("words", "changes"), PASSED_ON, ids=[" ".join(words) for words, _ in PASSED_ON])
def test_each_option_of_the_doctor_reaches_the_diagnosis(
    words: list[str], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {
        "model": None, "probe": True, "timeout": 30, "profile": "inference", "ssh": (), "shared_folder": None
    }  # fmt: skip
    asked = judged(monkeypatch, environment=HEALTHY.environment)
    main(["doctor", *words])
    assert asked == [{**usual, **changes}]
