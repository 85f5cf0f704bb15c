"""The doctor: exit codes, what is shown in which order, and that it works where everything else does not."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ortgpu
from ortgpu.__main__ import main
from ortgpu.cli import doctor as command
from ortgpu.cli.redaction import Redactor, redact, redactor_for_this_process
from ortgpu.diagnosis import Diagnosis
from ortgpu.diagnosis.probe import ProbeResult, ProbeStep
from ortgpu.diagnosis.requirements import check_inference
from ortgpu.environment.inspection import Environment, inspect_environment
from ortgpu.errors import (
    DriverNotFoundError,
    GPUError,
    LibraryNotFoundError,
    NoDeviceError,
    PlacementError,
    catalogue,
    manual,
    shell,
)
from ortgpu.placement import PlacedNode
from tests.lab import GPU, NVML, WITHOUT_ITS_FOLDER, Cuda, Machine
from tests.lab.child import ChildResult
from tests.lab.fixtures import Lab

LOOK = ("doctor", "--no-probe")
H200 = GPU()
EVERYTHING: dict[str, Any] = {"cuda": Cuda(devices=(H200,)), "nvml": NVML(gpus=(H200,))}


def doctor(machine: Machine, *options: str, **settings: Any) -> ChildResult:
    """``python -m ortgpu doctor`` on a machine of the lab."""
    result = machine.run(argv=["-m", "ortgpu", "doctor", *options], **settings)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.stdout
    return result


def document(machine: Machine, *options: str, **settings: Any) -> dict[str, Any]:
    result = doctor(machine, "--json", *options, **settings)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if found["ok"] else 1)
    return found


def rows_on_a_screen(text: str, columns: int = 80) -> int:
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


# On machines of the lab


def test_training_has_a_table_and_checks_of_its_own(lab: Lab) -> None:
    found = document(lab.machine(**EVERYTHING), "--no-probe", "--profile", "training")
    assert {"NCCL", "MPI", "onnxruntime-training"} <= {row["name"] for row in found["requirements"]}
    assert found["problems"][0]["code"] == "training-unavailable", "what is installed is for inference"
    assert found["problems"][0]["details"]["reason"] == "not installed"
    assert set(found["training"]) == {"environment", "ssh", "shared_folder"}
    shown = doctor(lab.machine(**EVERYTHING), "--profile", "training", "--verbose")
    assert shown.returncode == 1
    for row in ("NCCL", "MPI", "network"):
        assert re.search(rf"^  {row} ", shown.stdout, re.MULTILINE)
    assert "training: FAILED, ImportError: cannot import name 'training'" in shown.stdout


def test_training_tries_a_folder_and_hosts_where_asked(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    options = ("--no-probe", "--profile", "training", "--shared-folder", str(lab.folder), "--ssh", "-x")
    found = document(machine, *options, env={"PATH": str(lab.folder)})
    assert found["training"]["shared_folder"]["world_size"] == 1
    assert found["training"]["ssh"][0]["host"] == "-x"
    assert "distributed-error" in {problem["code"] for problem in found["problems"]}
    shown = doctor(machine, *options, env={"PATH": str(lab.folder)}).stdout
    assert "written and read by this process alone" in shown
    assert "ssh to -x cannot be tried: there is no ssh program on PATH" in shown


def test_a_rank_that_is_not_known_is_an_error_in_the_document(lab: Lab) -> None:
    options = ("--no-probe", "--profile", "training", "--shared-folder", str(lab.folder))
    result = doctor(lab.machine(**EVERYTHING), "--json", *options, env={"RANK": "1"})
    assert result.returncode == 1, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["ok"], found["error"]["type"]) == (1, False, "LauncherConflictError")
    shown = doctor(lab.machine(**EVERYTHING), *options, env={"RANK": "1"})
    assert shown.returncode == 1
    assert shown.stderr.startswith("LauncherConflictError: ")


def test_healthy_as_far_as_looking_goes(lab: Lab) -> None:
    """The stub driver opens no session: that a probe succeeds is for a machine with a GPU to show."""
    result = doctor(lab.machine(**EVERYTHING), "--no-probe")
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "OK: no fault found. Nothing was opened to make sure (--no-probe)."
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
    made = command.Report(None, diagnosis, check_inference(diagnosis.environment)).as_dict()
    assert {key for key in made if f'"{key}"' not in shown} == set()
    words = set(re.findall(r"\w+", shown))
    assert {field.name for field in dataclasses.fields(Environment)} <= words
    assert {field.name for field in dataclasses.fields(ProbeResult)} <= words
    below = {*made["problems"][0], *made["requirements"][0]}
    assert below <= words
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert {key for key in {*made, *below} if f"`{key}`" not in readme} == set()


def test_cpu_only_package(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)
    result = doctor(machine)
    assert result.returncode == 1
    assert result.stdout.startswith("CPUOnlyPackageError: ")
    assert "uninstall" in result.stdout
    assert "not known: no provider file says which" in result.stdout


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


def test_missing_libraries_are_all_named(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10", "nvidia/*/lib/libcudart.so.13")
    machine.overlay.truncate("nvidia/*/lib/libcufft.so.12", 1000)
    result = doctor(machine, "--no-probe")
    assert result.returncode == 1
    assert result.stdout.startswith("LibraryNotFoundError: ")
    assert "cudart 13, curand 10: NOT FOUND\n" in result.stdout
    assert "cufft 12: NOT FOUND, opened at need only, 1 passed over\n" in result.stdout
    assert "warning: " in result.stdout
    assert "passed over: " not in result.stdout
    full = doctor(machine, "--no-probe", "--verbose").stdout
    assert re.search(r"passed over: \S+libcufft.so.12 \(nvidia wheels\): truncated", full)


@pytest.mark.parametrize("nvml", [None, NVML(init=9), NVML(error=999)], ids=["absent", "no-driver", "errors"])
def test_nvml_that_does_not_work(lab: Lab, nvml: NVML | None) -> None:
    machine = lab.machine(cuda=Cuda(devices=(H200,)), nvml=nvml)
    result = doctor(machine, "--no-probe")
    assert result.returncode == 0, result.output
    assert "NVML does not work: " in result.stdout
    assert "not known without NVML" in result.stdout
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


def test_model(lab: Lab) -> None:
    machine = lab.machine(**EVERYTHING)
    machine.overlay.remove("nvidia/cudnn")
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


# Where it is called from


@pytest.mark.parametrize("options", [(), ("--json",), ("--redact",)], ids=" ".join)
def test_working_directory_that_is_gone(lab: Lab, options: tuple[str, ...]) -> None:
    machine = lab.machine(**EVERYTHING)
    code = "import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())\n"
    code += f"from ortgpu.__main__ import main; report(main({['doctor', '--no-probe', *options]!r}))"
    result = machine.run(code, env=WITHOUT_ITS_FOLDER)
    assert result.json == 0, result.output
    assert result.stderr == ""


@pytest.mark.parametrize("options", [("--no-probe",), ()], ids=["looking", "probing"])
def test_no_home_no_locale_and_bytes_that_are_no_text(lab: Lab, options: tuple[str, ...]) -> None:
    machine = lab.machine(**EVERYTHING)
    surroundings: dict[str, str | None] = {
        "HOME": None, "LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
        "CUDA_HOME": "/opt/caf\udce9", "CUDNN_HOME": "/opt/gr\u00fcn",
    }  # fmt: skip
    for more in ((), ("--json",), ("--verbose", "--redact")):
        result = doctor(machine, *options, *more, env=surroundings)
        assert result.stdout.isascii()
        assert "/opt/caf\\udce9" in result.stdout
        assert result.returncode == (0 if options else 1)


def test_nothing_is_written(lab: Lab) -> None:
    """By looking: no folder needs to be writable, a temporary one included."""
    code = """
import os, sys
writing = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        writing.append(str(arguments[0]))
    if event in ("os.mkdir", "os.remove", "os.rename"):
        writing.append(event)
from ortgpu.__main__ import main
sys.addaudithook(watch)
code = main(["doctor", "--no-probe", "--redact", "--verbose"])
seen = list(writing)
report({"code": code, "writing": seen})
"""
    assert lab.machine(**EVERYTHING).run(code).json == {"code": 0, "writing": []}


def ordinary(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """On this very machine, whatever it has."""
    return subprocess.run([sys.executable, "-m", "ortgpu", *arguments], timeout=100, check=False, **settings)


@pytest.mark.skipif(os.name == "nt", reason="file descriptors are inherited in another way on Windows")
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_streams_that_are_closed(closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    line = f'"$0" -m ortgpu doctor --no-probe {redirections}'
    result = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, timeout=100, check=False)
    assert result.returncode in (0, 1)
    assert result.stderr == b""
    assert (result.stdout == b"") is (1 in closed)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a disk without room")
def test_disk_without_room() -> None:
    with open("/dev/full", "wb") as full:
        result = ordinary(*LOOK, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 1
    assert result.stderr.startswith(b"ortgpu: the output cannot be written: ")
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--model", "/no/such/model.onnx"],
        ["doctor", "--model", os.curdir],
        ["doctor", "model.onnx"],
        ["doctor", "--timeout", "0"],
        ["doctor", "--timeout", "nan"],
        ["doctor", "--jsn"],
        ["doctor", "--profile", "nothing"],
        ["doctor", "--ssh", "host"],
        ["doctor", "--shared-folder", "."],
        ["doctor", "--profile", "training", "--model", __file__],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: ortgpu doctor" in captured.err


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    give_diagnosis(monkeypatch)
    assert main([*LOOK]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["doctor"]) == 0
    assert "in a child process" in terminal.getvalue()
    assert terminal.getvalue().isascii()
    assert "child process" not in capsys.readouterr().out


# What is shown of a diagnosis


def probe(*steps: ProbeStep, **changes: Any) -> ProbeResult:
    ended = ProbeResult(steps, True, 0, None, False, None, 1.25, "")
    return dataclasses.replace(ended, **changes)


def give_diagnosis(monkeypatch: pytest.MonkeyPatch, *problems: GPUError, probed: ProbeResult | None = None) -> None:
    made = Diagnosis(problems, inspect_environment(), probed)
    monkeypatch.setattr(ortgpu, "diagnose", lambda *_, **__: made, raising=False)


def example_problems() -> list[GPUError]:
    return [
        DriverNotFoundError(
            "there is no driver", evidence=[f"fact {n}" for n in range(9)], fixes=[manual("get one", needs="driver")]
        ),
        NoDeviceError("no GPU", evidence=["nothing"], fixes=[shell("never shown")], consequence_of="driver-not-found"),
        LibraryNotFoundError(
            "cuDNN is not there", evidence=["found nowhere"], fixes=[shell("pip install it")], severity="warning"
        ),
    ]


def test_root_first_then_consequences_then_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_diagnosis(monkeypatch, *example_problems())
    assert main([*LOOK]) == 1
    assert capsys.readouterr().out.partition("\nWhat was found")[0] == (
        "DriverNotFoundError: there is no driver\n"
        "  - fact 0\n  - fact 1\n  - fact 2\n  - fact 3\n  - fact 4\n  - fact 5\n"
        "  - ... 3 more with --verbose\n"
        "To fix it:\n"
        "    get one\n"
        "More: ortgpu explain driver-not-found\n"
        "Follows from it:\n"
        "  - no-device: no GPU (because of driver-not-found)\n"
        "warning: cuDNN is not there (library-not-found)\n"
        "    pip install it\n"
    )


def test_all_evidence_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give_diagnosis(monkeypatch, *example_problems())
    assert main([*LOOK, "--verbose"]) == 1
    shown = capsys.readouterr().out
    assert "fact 8" in shown
    assert "found nowhere" in shown
    assert "more with --verbose" not in shown
    assert "compute capability: " in shown
    assert re.search(r"minimum .*: (pass|fail|unknown)$", shown, re.MULTILINE)


def test_warnings_alone_are_healthy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done = probe(ProbeStep("driver", True), ProbeStep("session", True, "ran"))
    give_diagnosis(monkeypatch, example_problems()[2], probed=done)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["OK: a session opens on the GPU", "warning: cuDNN is not there (library-not-found)"]
    assert lines[-1] == "  probe         driver ok, session ok; 1.2 s"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (probe(ProbeStep("session", False, "no")), "failed all the same: session"),
        (probe(completed=False, died_in="start", returncode=1), "failed all the same: start"),
        (probe(completed=False, died_in="import", signal="SIGSEGV", returncode=-11), "ended with SIGSEGV in: import"),
        (probe(completed=False, died_in="driver", timed_out=True, returncode=None), "ran out of time in: driver"),
    ],
)
def test_a_probe_that_fails_is_a_problem_whatever_the_checks_know(
    result: ProbeResult, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_diagnosis(monkeypatch, probed=result)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert says in shown
    assert "OK" not in shown
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_arguments_reach_the_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    model = tmp_path / "model.onnx"
    model.touch()

    def diagnose(path: Path | None = None, **settings: Any) -> Diagnosis:
        seen.append((path, settings))
        return Diagnosis((), inspect_environment(), None)

    monkeypatch.setattr(ortgpu, "diagnose", diagnose, raising=False)
    main(["doctor", "--model", str(model), "--timeout", "7"])
    main([*LOOK])
    assert seen == [(model, {"probe": True, "timeout": 7}), (None, {"probe": False, "timeout": 30})]


# Redaction


REDACTOR = Redactor(
    ["/home/alice", "/data/people/alice", "/"], ["alice", "al", "root", ""], ["box17.example.org", "box17"]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/venv/bin/python", "~/venv/bin/python"),
        ("'/home/alice'", "'~'"),
        ("/home/alice2/x:/home/bob/y", "/home/<user>/x:/home/<user>/y"),
        ("/data/people/alice/x", "~/x"),
        ("/scratch/alice/x and pytest-of-alice", "/scratch/<user>/x and pytest-of-<user>"),
        ("/Users/Carol/x, /var/home/dave/x", "/Users/<user>/x, /var/home/<user>/x"),
        (r"C:\Users\Erin\AppData", r"C:\Users\<user>\AppData"),
        ("hostname=box17.example.org ;", "hostname=<host> ;"),
        ("on BOX17", "on <host>"),
        ("also, malice, /opt/al/x", "also, malice, /opt/<user>/x"),
        ("as root in /usr/lib/wsl, / and ~", "as root in /usr/lib/wsl, / and ~"),
        ("/opt/app/home/lib/x", "/opt/app/home/lib/x"),
    ],
)
def test_redaction_of_a_text(text: str, expected: str) -> None:
    assert REDACTOR(text) == expected


def test_redaction_keeps_what_things_are() -> None:
    node = PlacedNode("/home/alice/n", "Conv", "", "CPUExecutionProvider", "compute")
    error = PlacementError(
        "in /home/alice",
        evidence=["alice"],
        fixes=[shell("/home/alice/bin/pip install x", needs="root")],
        others=[NoDeviceError("alice")],
        consequence_of="no-device",
        severity="warning",
        nodes=(node,),
    )
    changed = redact(error, REDACTOR)
    assert type(changed) is PlacementError
    assert changed.summary == "in ~"
    assert changed.evidence == ("<user>",)
    assert (str(changed.fixes[0]), changed.fixes[0].kind, changed.fixes[0].needs) == (
        "~/bin/pip install x", "shell", "root"
    )  # fmt: skip
    assert changed.others[0].summary == "<user>"
    assert (changed.consequence_of, changed.severity) == ("no-device", "warning")
    assert changed.nodes == (dataclasses.replace(node, name="~/n"),)
    assert redact({"alice": ["alice", 1, None, frozenset({2})]}, REDACTOR) == {"alice": ["<user>", 1, None, {2}]}


def test_every_error_survives_redaction() -> None:
    for cls in catalogue().values():
        error = cls("alice", evidence=["alice"])
        assert redact(error, REDACTOR).as_dict() == cls("<user>", evidence=["<user>"]).as_dict()


@pytest.mark.parametrize("options", [("--json",), ("--verbose",)], ids=" ".join)
def test_redaction_of_a_whole_report(lab: Lab, options: tuple[str, ...]) -> None:
    home = lab.folder / "people" / "zaphodb"
    home.mkdir(parents=True)
    machine = lab.machine(
        **EVERYTHING,
        env={
            "HOME": str(home), "USER": "zaphodb", "LOGNAME": "zaphodb", "HOSTNAME": "heart-of-gold",
            "CUDA_HOME": f"{home}/cuda", "LD_PRELOAD": None,
            "PYTHONPATH": f"{home}/lib:/home/trillian/lib:/scratch/zaphodb/lib",
        },
    )  # fmt: skip
    plain = doctor(machine, "--no-probe", *options).stdout
    assert "zaphodb" in plain
    assert "trillian" in plain
    shown = doctor(machine, "--no-probe", "--redact", *options).stdout
    for name in ("zaphodb", "trillian", str(home)):
        assert name not in shown
    assert "~/cuda" in shown
    if options == ("--json",):
        assert set(json.loads(shown)) == set(json.loads(plain))


def test_this_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/elsewhere/of/fordp")
    monkeypatch.setenv("USER", "fordp")
    monkeypatch.setattr("socket.gethostname", lambda: "betelgeuse.example.org")
    replace = redactor_for_this_process()
    assert replace("/elsewhere/of/fordp/x on betelgeuse by fordp") == "~/x on <host> by <user>"
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("USER")
    monkeypatch.setattr("getpass.getuser", lambda: (_ for _ in ()).throw(KeyError("uid 12345")))
    assert redactor_for_this_process()("betelgeuse") == "<host>"


def test_redaction_of_what_training_adds(lab: Lab) -> None:
    home = lab.folder / "people" / "zaphodb"
    home.mkdir(parents=True)
    machine = lab.machine(**EVERYTHING, env={"HOME": str(home), "USER": "zaphodb", "OMPI_MCA_tmpdir": str(home)})
    options = ("--no-probe", "--json", "--profile", "training", "--shared-folder", str(home))
    assert "zaphodb" in doctor(machine, *options).stdout
    shown = doctor(machine, *options, "--redact").stdout
    assert "zaphodb" not in shown
    assert json.loads(shown)["training"]["environment"]["mpi"]["settings"] == {"OMPI_MCA_tmpdir": "~"}
