"""The guard, without a GPU: every InferenceSession that asks for CUDA, or for nothing, raises the cause instead of
running on the CPU, by whatever name it was imported, as long as the guard is in force and no longer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from ortgpu import guard_policy
from ortgpu.cli.exec import prepare, refuse_the_deaf
from tests.lab import Cuda, Machine
from tests.lab.child import ChildResult
from tests.lab.fixtures import Lab
from tests.lab.models import Models

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).with_name("guarded_programs.py")
STARTUP = ROOT / "ortgpu" / "startup"

CAUSE = "DriverNotFoundError"  # of the machine without a driver
REFUSED = "ProviderRequestError"
ON_CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """Everything installed, and no driver."""
    return module_lab.machine(env={"PYTHONPATH": str(ROOT)})


Run = Callable[..., Any]


@pytest.fixture
def run(machine: Machine, models: Models) -> Run:
    """What a program of guarded_programs.py reports."""

    def start(program: str, *, on: Machine = machine, argv: tuple[str, ...] = (), **env: str) -> Any:
        result = on.run(argv=[*argv, str(PROGRAMS), program, str(models.relu)], env=env).ok()
        assert result.json is not None, result.output
        assert result.stdout == "", "a library does not print"
        return result.json

    return start


# By whatever name


def test_every_name_is_guarded_when_it_was_imported_before(run: Run) -> None:
    found = run("names_before")
    assert found == dict.fromkeys(found, CAUSE)
    assert len(found) == 14


def test_every_name_is_guarded_when_it_is_imported_afterwards(run: Run) -> None:
    found = run("names_after")
    assert found.pop("loaded") == [], "the guard alone loads nothing heavy"
    assert found == dict.fromkeys(found, CAUSE)
    assert len(found) == 14


def test_nothing_is_guarded_unless_asked(run: Run) -> None:
    found = run("names_unguarded")
    assert found == dict.fromkeys(found, ON_CPU)


def test_onnxruntime_imported_by_another_thread_meanwhile(run: Run) -> None:
    assert run("importing_meanwhile") == {"made": CAUSE, "in force": True}


def test_module_that_is_loaded_again(run: Run) -> None:
    found = run("imported_again")
    assert found == {"first": CAUSE, "second": CAUSE, "loader": "SourceFileLoader", "different": True}


# What was asked for


@pytest.fixture(scope="module")
def asked(machine: Machine, models: Models) -> Any:
    return machine.run(argv=[str(PROGRAMS), "requests", str(models.relu)]).ok().json


@pytest.mark.parametrize(
    "request_",
    [
        "none",
        "empty",
        "cuda",
        "cuda, cpu",
        "cpu, cuda",
        "cuda with options",
        "options beside",
        "cuda twice",
        "all that there are",
        "tensorrt",
        "directml, cuda",
        "unknown, cuda",
        "unknown arguments",
    ],
)
def test_cuda_or_nothing_raises_the_cause(asked: Any, request_: str) -> None:
    assert asked[request_] == CAUSE


@pytest.mark.parametrize("request_", ["typo", "typo, cpu", "no list", "no names", "wrong lengths", "fallback"])
def test_a_request_that_cannot_be_meant_is_refused(asked: Any, request_: str) -> None:
    assert asked[request_] == REFUSED


def test_an_unknown_option_is_refused(asked: Any) -> None:
    assert asked["unknown option"] == "ProviderOptionError"


@pytest.mark.parametrize("request_", ["cpu", "cpu with options", "cpu twice", "openvino"])
def test_other_providers_pass(asked: Any, request_: str) -> None:
    assert asked[request_] == ON_CPU


def test_what_is_not_about_the_gpu_stays_as_it_is(asked: Any) -> None:
    assert asked["no such file"] == "NoSuchFile"


CUDA, TENSORRT, OPENVINO = "CUDAExecutionProvider", "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
GPU_BUILD = (TENSORRT, CUDA, ON_CPU)
CPU_BUILD = ("AzureExecutionProvider", ON_CPU)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide which providers the installed ONNX Runtime has, and whether TensorRT's libraries are there."""

    def have(*available: str, tensorrt: bool = False) -> None:
        monkeypatch.setattr(guard_policy, "_available", lambda: available)
        monkeypatch.setattr(guard_policy, "_known", lambda: {*GPU_BUILD, *CPU_BUILD, OPENVINO})
        monkeypatch.setattr(guard_policy, "_tensorrt_is_loadable", lambda: tensorrt)

    have(*GPU_BUILD)
    return have


def test_all_that_a_cpu_build_has_is_nothing_in_particular(build: Callable[..., None]) -> None:
    assert guard_policy.judge(CPU_BUILD, None) == "other"
    build(*CPU_BUILD)
    assert guard_policy.judge(list(CPU_BUILD), None) == "guarded"
    assert guard_policy.judge([ON_CPU], None) == "cpu"


@pytest.mark.parametrize(
    ("providers", "options", "left"),
    [
        ([TENSORRT, CUDA, ON_CPU], None, [(CUDA, {}), (ON_CPU, {})]),
        ([(TENSORRT, {"a": 1}), (CUDA, {"device_id": 1})], None, [(CUDA, {"device_id": "1"})]),
        ([OPENVINO, CUDA], [{"b": 1}, {"device_id": 1}], [(CUDA, {"device_id": "1"})]),
        (["ROCMExecutionProvider", CUDA, ON_CPU], None, [(CUDA, {}), (ON_CPU, {})]),
        ([(CUDA, {"device_id": 1}), CUDA], None, [(CUDA, {"device_id": "1"})]),
        ((CUDA, CUDA), ({"device_id": 1}, {"device_id": 2}), [(CUDA, {"device_id": "1"})]),
    ],
)
def test_what_cannot_be_had_beside_cuda_is_left_out(
    build: Callable[..., None], providers: Any, options: Any, left: Any
) -> None:
    assert guard_policy.attainable(providers, options) == (left, None)


def test_tensorrt_that_is_there_is_used(build: Callable[..., None]) -> None:
    build(*GPU_BUILD, tensorrt=True)
    kept, _ = guard_policy.attainable([TENSORRT, CUDA], None)
    assert [name for name, _ in kept] == [TENSORRT, CUDA]


@pytest.mark.parametrize("providers", [None, [], [TENSORRT], [ON_CPU, TENSORRT], CUDA, [1, CUDA], [[CUDA, {}]]])
def test_what_is_refused_or_says_nothing_stays_as_it_was(build: Callable[..., None], providers: Any) -> None:
    assert guard_policy.attainable(providers, None) == (providers, None)


def test_a_build_without_cuda_is_not_hidden(build: Callable[..., None]) -> None:
    build(*CPU_BUILD)
    assert guard_policy.attainable([CUDA, ON_CPU], None) == ([CUDA, ON_CPU], None)


# The cause


def test_missing_library_is_named(run: Run, lab: Lab) -> None:
    broken = lab.machine(cuda=Cuda(init=100))
    broken.overlay.remove("nvidia/*/lib/libcurand.so.10")
    found = run("error", on=broken)
    assert found["type"] == "LibraryNotFoundError"
    assert found["details"]["missing"] == ["libcurand.so.10"]
    assert "To fix it:" in found["text"]


def test_no_device_is_named(run: Run, lab: Lab) -> None:
    assert run("error", on=lab.machine(cuda=Cuda(init=100)))["type"] == "NoDeviceError"


def test_cpu_package_is_named_though_the_library_asks_for_what_that_has(run: Run, lab: Lab) -> None:
    broken = lab.machine()
    broken.overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)
    assert run("error", on=broken)["type"] == "CPUOnlyPackageError"


def test_the_cpu_can_be_allowed(run: Run) -> None:
    found = run("allowed_cpu", ORTGPU_ALLOW_CPU="1")
    assert found["providers"] == [ON_CPU]
    (warned,) = found["warnings"]
    assert warned["type"] == "CPUExecutionWarning"
    assert CAUSE in warned["error"]
    assert warned["file"] == str(PROGRAMS), "points to who makes the session"
    (session,) = found["sessions"]
    assert (session["kind"], session["device"], session["providers"]) == ("guarded", "cpu", [ON_CPU])


# For how long


def test_scopes(run: Run) -> None:
    found = run("scopes")
    suspended = "enforce() cannot decorate a generator: it would stay in force while that is suspended"
    assert found.pop("generator") == suspended
    assert found.pop("class").startswith("enforce() decorates functions, not <class")
    assert found.pop("nothing") == "enforce() decorates functions, not 1"
    assert found.pop("left over") == []
    assert found.pop("finders") is True
    assert found.pop("in force") is False
    guarded = {
        "inside",
        "nested",
        "after the inner one",
        "twice the same",
        "function",
        "function, without parentheses",
        "coroutine",
        "installed",
        "uninstalled inside",
    }
    assert {name for name, came in found.items() if came == CAUSE} == guarded
    assert {came for name, came in found.items() if name not in guarded} == {ON_CPU}


def test_a_block_that_was_not_entered_leaves_no_guard(run: Run) -> None:
    assert run("interrupted") == {"in force after the interrupt": False, "inside": CAUSE, "after": ON_CPU}


def test_a_change_of_somebody_else_is_left_alone(run: Run) -> None:
    assert run("over_ours") == {"inside": CAUSE, "after": ON_CPU, "theirs": True}


def test_threads(run: Run) -> None:
    found = run("threads")
    assert found == {"other thread": [CAUSE], "many": [CAUSE], "count": 160, "after": ON_CPU}


# Sessions that are verified


@pytest.fixture(scope="module")
def verified(machine: Machine, models: Models) -> Any:
    return machine.run(argv=[str(PROGRAMS), "verified", str(models.relu)]).ok().json


@pytest.mark.parametrize(("name", "type_"), [("plain", "InferenceSession"), ("pickable", "Pickable")])
def test_a_verified_session_is_both(verified: Any, name: str, type_: str) -> None:
    assert verified[name] == {
        "type": type_,
        "instance": [True, True],
        "result": [0.0, 0.0, 1.0, 2.0],
        "device": "cuda:0 (pretended, GPU-1)",
        "falls back": False,
        "to cpu": REFUSED,
        "providers": ["CUDAExecutionProvider", ON_CPU],
    }


def test_a_subclass_keeps_what_it_has(verified: Any) -> None:
    assert verified["own attributes"] is True


def test_failures_while_running_are_typed(verified: Any) -> None:
    assert verified["while running"] == "ProviderFailureError"


def test_pickling(verified: Any) -> None:
    library = "tests.guarded_sessions.Pickable"
    assert verified["sent"] == ["ortgpu.session.GPUSession", True]
    assert verified["copied"] == ["ortgpu.session.GPUSession", True]
    assert verified["pickable sent"] == [library, True]
    assert verified["reducing sent"] == ["tests.guarded_sessions.Reducing", True]
    assert verified["pickable sent to nobody"] == [library, False], "no guard was in force where it arrived"


def test_set_providers(run: Run) -> None:
    found = run("other_providers")
    (session,) = found.pop("sessions")
    assert session["kind"] == "guarded"
    assert found == {
        "cpu to cpu": f"{ON_CPU} False",
        "cpu to openvino": f"{ON_CPU} False",
        "cpu to a typo": REFUSED,
        "after the typo": f"{ON_CPU} False",
        "cpu to cuda": f"CUDAExecutionProvider,{ON_CPU} True",
        "cuda to nothing": f"CUDAExecutionProvider,{ON_CPU} True",
        "cuda to cpu": REFUSED,
        "mine": "kept",
        "cuda to cpu, uninstalled": REFUSED,
        "closed to cuda": "ExecutionError",
    }


# What there is


@pytest.fixture(scope="module")
def sessions(machine: Machine, models: Models) -> Any:
    return machine.run(argv=[str(PROGRAMS), "list_sessions", str(models.relu)]).ok().json


def test_sessions_are_listed_in_order(sessions: Any, models: Models) -> None:
    found = [(one["kind"], one["model"], one["device"], one["nodes"]) for one in sessions["all"]]
    cuda, model = "cuda:0 (pretended, GPU-1)", str(models.relu)
    assert found == [
        ("GPUSession", "<bytes>", cuda, {ON_CPU: 1}),
        ("guarded", model, cuda, {ON_CPU: 1}),
        ("guarded", model, cuda, {ON_CPU: 1}),
        ("cpu", model, "cpu", {}),
        ("other", model, "cpu", {}),
        ("unguarded", model, "cpu", {}),
    ]
    assert all(one["alive"] for one in sessions["all"])
    assert {one["pid"] for one in sessions["all"]} == {sessions["pid"], None}


def test_who_created_a_session(sessions: Any) -> None:
    own, by_library, by_subclass, *_, unguarded = [one["created_by"] for one in sessions["all"]]
    library = str(PROGRAMS.with_name("guarded_sessions.py"))
    program = str(PROGRAMS.with_name("guarded_verified.py"))
    assert own.startswith(f"{program}:")
    assert own.endswith(" list_sessions")
    assert by_library.startswith(f"{library}:")
    assert by_library.endswith(" make_one")
    assert by_subclass.startswith(f"{program}:"), "not the constructor of the subclass"
    assert unguarded is None


def test_a_record_is_one_line(sessions: Any, models: Models) -> None:
    first, *_ = (one["text"] for one in sessions["all"] if one["kind"] == "guarded")
    start = f"{models.relu} on cuda:0 (pretended, GPU-1) [guarded], nodes: {ON_CPU} 1, created by "
    assert first.startswith(start)
    assert "\n" not in first


def test_sessions_that_are_gone_are_not_listed(sessions: Any) -> None:
    assert sessions["left"] == []


def test_sessions_of_the_parent_are_not_alive(sessions: Any) -> None:
    if "in a forked child" not in sessions:
        pytest.skip(f"{sys.platform} does not fork")
    assert sessions["in a forked child"] == [
        ["GPUSession", False],
        ["guarded", False],
        ["guarded", False],
        ["cpu", False],
        ["other", False],
        ["unguarded", True],
    ]


# ORTGPU_ENFORCE and `ortgpu exec`


@pytest.mark.parametrize("value", ["1", "true"])
def test_variable_takes_effect_at_the_start_where_ortgpu_is_installed(
    machine: Machine, models: Models, value: str
) -> None:
    assert machine.overlay.path("ortgpu_enforce.pth").is_file(), "tests run where `pip install -e .` put it"
    argv = [str(PROGRAMS), "by_variable", str(models.relu)]
    found = machine.run(argv=argv, env={"ORTGPU_ENFORCE": value}).ok().json
    assert found["loaded at start"] == []
    assert (found["before the import"], found["after the import"]) == (CAUSE, CAUSE)


@pytest.mark.parametrize("value", ["1", "true"])
def test_variable_takes_effect_at_the_import_elsewhere(lab: Lab, models: Models, value: str) -> None:
    machine = lab.machine()
    machine.overlay.remove("ortgpu_enforce.pth")
    argv = [str(PROGRAMS), "by_variable", str(models.relu)]
    found = machine.run(argv=argv, env={"ORTGPU_ENFORCE": value}).ok().json
    assert found["loaded at start"] == []
    assert (found["before the import"], found["after the import"]) == (ON_CPU, CAUSE)


@pytest.mark.parametrize("value", ["", "0"])
def test_variable_that_says_no(run: Run, value: str) -> None:
    assert run("by_variable", ORTGPU_ENFORCE=value)["after the import"] == ON_CPU


EXEC = ("-m", "ortgpu", "exec", "--")


@pytest.fixture
def run_exec(machine: Machine) -> Callable[..., ChildResult]:
    def start(*command: str, on: Machine = machine, **env: str) -> ChildResult:
        return on.run(argv=[*EXEC, *command], env=env)

    return start


def test_exec_guards_a_program_that_knows_nothing_of_it(machine: Machine, models: Models) -> None:
    found = machine.run(argv=[*EXEC, "python", str(PROGRAMS), "by_variable", str(models.relu)]).ok().json
    assert found["loaded at start"] == [], "not before it is needed"
    assert found["before the import"] == CAUSE
    assert str(STARTUP) not in found["path"], "the program's own path is as it was"


def test_exec_guards_what_the_program_starts(machine: Machine, models: Models) -> None:
    assert machine.run(argv=[*EXEC, "python", str(PROGRAMS), "spawned", str(models.relu)]).ok().json == {
        "here": CAUSE,
        "there": CAUSE,
    }
    shell = f"cd / && exec python {PROGRAMS} by_variable {models.relu}"
    assert machine.run(argv=[*EXEC, "sh", "-c", shell]).ok().json["before the import"] == CAUSE


def test_exec_where_ortgpu_is_not_installed(lab: Lab, models: Models) -> None:
    other = lab.machine()
    other.overlay.remove("ortgpu", "ortgpu-*", "__editable__*ortgpu*")
    code = f"import onnxruntime\nonnxruntime.InferenceSession({str(models.relu)!r})"
    environment: dict[str, str] = {}
    prepare(environment)
    result = other.run(argv=["-c", code], env=environment)
    assert f"ortgpu.errors.{CAUSE}: " in result.stderr, result.output


def test_a_guard_that_cannot_come_into_force_keeps_onnxruntime_out(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "ortgpu.py").write_text("raise RuntimeError('broken')", encoding="utf-8")
    environment: dict[str, str] = {"PYTHONPATH": str(tmp_path)}
    prepare(environment)
    result = lab.machine().run(argv=["-c", "import json, onnxruntime"], env=environment)
    assert "ImportError: ORTGPU_ENFORCE is set, and the guard cannot watch" in result.stderr, result.output


def test_the_environments_own_sitecustomize_is_run(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__", encoding="utf-8")
    code = "import sys; print(theirs, sys.modules['sitecustomize'].__file__)"
    result = machine.run(argv=[*EXEC, "python", "-c", code], env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).ok()
    assert result.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_is_that_of_the_program(run_exec: Callable[..., ChildResult], code: int) -> None:
    result = run_exec("python", "-c", f"raise SystemExit({code})")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_a_program_that_is_killed(run_exec: Callable[..., ChildResult]) -> None:
    result = run_exec("python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert result.returncode == -signal.SIGTERM


def test_signals_reach_the_program() -> None:
    code = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("ready", flush=True)
        signal.pause()
    """
    command = [sys.executable, *EXEC, sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            assert process.wait(30) == 7
        finally:
            process.kill()


def test_a_closed_pipe_ends_the_program_as_ever(run_exec: Callable[..., ChildResult]) -> None:
    result = run_exec("python", "-c", "import signal; print(signal.getsignal(signal.SIGXFSZ))")
    assert result.ok().stdout.strip() in ("0", "1", "Handlers.SIG_IGN"), "Python itself ignores it again"
    assert run_exec("bash", "-c", "yes | head -1 >/dev/null; echo ${PIPESTATUS[0]}").stdout.strip() == "141"


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/", 126)])
def test_programs_that_cannot_be_started(run_exec: Callable[..., ChildResult], command: str, code: int) -> None:
    result = run_exec(command)
    assert result.returncode == code
    assert result.stderr.startswith(f"ortgpu exec: {command}: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("argv", [["exec"], ["exec", "--"], ["exec", "--", "python", "-I", "x.py"]])
def test_wrong_usage(machine: Machine, argv: list[str]) -> None:
    result = machine.run(argv=["-m", "ortgpu", *argv])
    assert result.returncode == 2
    assert "Usage: ortgpu exec" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["python", "app.py", "-I"],
        ["python", "-m", "app", "-E"],
        ["python", "-c", "pass", "-S"],
        ["python", "-bu", "-W", "ignore::E", "app.py"],
        ["python", "-WIgnore", "-XIE", "app.py"],
        ["python", "-X", "-I", "app.py"],
        ["python", "-cI"],
        ["python", "--check-hash-based-pycs", "always", "app.py"],
        ["python", "-", "-I"],
        ["python3.12t", "-u"],
        ["pythonish", "-I"],
        ["gunicorn", "-I"],
    ],
)
def test_interpreters_that_listen(command: list[str]) -> None:
    refuse_the_deaf(command)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-I"],
        ["/usr/bin/python3", "-uE", "app.py"],
        ["python3.11", "-W", "error", "-S", "-m", "app"],
        ["pypy3", "-B", "-I", "app.py"],
        ["python.exe", "-I"],
    ],
)
def test_interpreters_that_do_not(command: list[str]) -> None:
    with pytest.raises(click.UsageError, match="ignores the"):
        refuse_the_deaf(command)


def test_variables_of_exec() -> None:
    environment = {"PYTHONPATH": "/theirs", "OTHER": "1"}
    prepare(environment)
    prepare(environment)
    assert environment == {"PYTHONPATH": f"{STARTUP}:/theirs", "OTHER": "1", "ORTGPU_ENFORCE": "1"}
    environment = {}
    prepare(environment)
    assert environment["PYTHONPATH"] == str(STARTUP)


def test_startup_file_costs_nothing() -> None:
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"

    def modules(**env: str) -> set[str]:
        command = [sys.executable, "-c", code]
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        return set(json.loads(child.stdout))

    environment: dict[str, str] = {}
    prepare(environment)
    more = modules(**environment) - modules()
    assert {name.partition(".")[0] for name in more} <= {
        "sitecustomize",
        "_ortgpu_waiting",
        "importlib",
        "warnings",
        "_imp",
        "_warnings",
    }
