"""``ortgpu exec``: the guard for a program that knows nothing of it, and whatever that starts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from ortgpu.cli.exec import reject_isolated_python
from ortgpu.session.guard.inheritance import prepare
from tests.lab import Machine
from tests.lab.fixtures import Lab
from tests.lab.models import Models
from tests.support.children import Child, run_child

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parents[1] / "support" / "guarded_programs.py"
STARTUP = ROOT / "ortgpu" / "session" / "guard" / "startup"
EXEC = ("-m", "ortgpu", "exec", "--")

CAUSE = "DriverNotFoundError"  # of the machine without a driver


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """Everything installed, and no driver."""
    return module_lab.machine(env={"PYTHONPATH": str(ROOT)})


@pytest.fixture
def run_exec(machine: Machine) -> Callable[..., Child]:
    def start(*command: str) -> Child:
        return machine.run(argv=[*EXEC, *command])

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
    assert "ImportError: ORTGPU_ENFORCE is set, but the guard does not work in" in result.stderr, result.output


AN_OLD_PYTHON = """
import collections, sys
sys.version_info = collections.namedtuple("version_info", "major minor micro")(3, 9, 18)
import _ortgpu_waiting, json
print("without it", flush=True)
import onnxruntime
"""
TOO_OLD = "it is Python 3.9, and ortgpu needs 3.10 or newer"


def test_a_python_that_is_too_old_for_the_guard() -> None:
    """What does not import ONNX Runtime is left alone."""
    environment = {"PYTHONPATH": str(STARTUP), "ORTGPU_ENFORCE": "1"}
    done = run_child([sys.executable, "-S", "-c", AN_OLD_PYTHON], env=environment)
    assert done.stdout == "without it\n"
    assert done.stderr.splitlines()[-1].startswith("ImportError: ORTGPU_ENFORCE is set"), done.output
    assert done.stderr.splitlines()[-1].endswith(TOO_OLD), done.output


def test_a_real_python_that_is_too_old_for_the_guard(tmp_path: Path) -> None:
    python = shutil.which("python3.9")
    if python is None or run_child([python, "-c", ""]).returncode != 0:
        pytest.skip("python3.9 is not on PATH")
    (tmp_path / "onnxruntime.py").write_text("print('imported')", encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path)}
    prepare(environment)
    alone = run_child([python, "-c", "import json; print('without it')"], env=environment).ok()
    assert (alone.stdout, alone.stderr) == ("without it\n", "")
    done = run_child([python, "-c", "import onnxruntime"], env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert TOO_OLD in done.stderr, done.output


def test_the_environments_own_sitecustomize_is_run(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__", encoding="utf-8")
    code = "import sys; print(theirs, sys.modules['sitecustomize'].__file__)"
    result = machine.run(argv=[*EXEC, "python", "-c", code], env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).ok()
    assert result.stdout.split() == [str(tmp_path / "sitecustomize.py")] * 2


LAUNCHER = """
import os, sys
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "of_the_launcher")
os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """As opentelemetry-instrument: it puts a ``sitecustomize`` first that runs no other."""
    (tmp_path / "launch.py").write_text(LAUNCHER, encoding="utf-8")
    (tmp_path / "of_the_launcher").mkdir()
    (tmp_path / "of_the_launcher" / "sitecustomize.py").write_text("import builtins; builtins.theirs = 1", "utf-8")
    return str(tmp_path / "launch.py")


@pytest.mark.parametrize("installed", ["with its .pth", "without", "not at all"])
def test_a_launcher_with_a_sitecustomize_of_its_own(lab: Lab, models: Models, launcher: str, installed: str) -> None:
    machine = lab.machine()
    if installed != "with its .pth":
        machine.overlay.remove("ortgpu_enforce.pth", "_ortgpu_waiting.py")
    if installed == "not at all":
        machine.overlay.remove("ortgpu", "ortgpu-*", "__editable__*ortgpu*")
    environment: dict[str, str] = {}
    prepare(environment)
    code = f"""
import importlib, pathlib, sys
assert theirs
sys.path += [pathlib.Path("of a program"), None]  # which the import system passes over
import onnxruntime.capi.onnxruntime_pybind11_state, onnxruntime
assert onnxruntime.__file__.endswith("__init__.py") and importlib.import_module("onnxruntime") is onnxruntime
assert {str(STARTUP)!r} not in sys.path
onnxruntime.InferenceSession({str(models.relu)!r})
"""
    result = machine.run(argv=[launcher, "-c", code], env=environment)
    assert f"ortgpu.errors.{CAUSE}: " in result.stderr, result.output


def test_such_a_launcher_and_a_program_that_uses_ortgpu(lab: Lab, models: Models, launcher: str) -> None:
    machine = lab.machine()
    machine.overlay.remove("ortgpu_enforce.pth")
    environment: dict[str, str] = {}
    prepare(environment)
    code = f"""
import pathlib, sys
assert theirs
sys.path += [pathlib.Path("of a program"), None]
from ortgpu import GPUSession
assert {str(STARTUP)!r} not in sys.path
GPUSession({str(models.relu)!r})
"""
    result = machine.run(argv=[launcher, "-c", code], env=environment)
    assert f"ortgpu.errors.{CAUSE}: " in result.stderr, result.output


def test_such_a_launcher_where_there_is_no_onnxruntime(lab: Lab, launcher: str) -> None:
    machine = lab.machine()
    machine.overlay.uninstall("onnxruntime-gpu")
    environment: dict[str, str] = {}
    prepare(environment)
    result = machine.run(argv=[launcher, "-c", "assert theirs; import onnxruntime"], env=environment)
    assert result.stderr.endswith("ModuleNotFoundError: No module named 'onnxruntime'\n"), result.output


def test_a_guard_of_another_release_is_installed_by_its_public_name(lab: Lab, tmp_path: Path) -> None:
    """The file that waits is copied when ortgpu is installed, and an editable install's ortgpu goes on."""
    (tmp_path / "ortgpu.py").write_text("def install(): print('installed')", encoding="utf-8")
    environment: dict[str, str] = {"PYTHONPATH": str(tmp_path)}
    prepare(environment)
    result = lab.machine().run(argv=["-c", "import onnxruntime"], env=environment).ok()
    assert result.stdout == "installed\n"


@pytest.mark.parametrize("path", ["{root}:", ":{root}", "{root}::/absent"])
def test_an_empty_entry_stays_the_working_directory(machine: Machine, tmp_path: Path, path: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "app.py").write_text("import of_the_project", encoding="utf-8")
    (tmp_path / "of_the_project.py").write_text("print('found')", encoding="utf-8")
    environment: dict[str, str | None] = {"PYTHONPATH": path.format(root=ROOT)}
    result = machine.run(argv=[*EXEC, "python", "scripts/app.py"], cwd=tmp_path, env=environment).ok()
    assert result.stdout == "found\n"


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_is_that_of_the_program(run_exec: Callable[..., Child], code: int) -> None:
    result = run_exec("python", "-c", f"raise SystemExit({code})")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_a_program_that_is_killed(run_exec: Callable[..., Child]) -> None:
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


def test_a_closed_pipe_ends_the_program_as_ever(run_exec: Callable[..., Child]) -> None:
    result = run_exec("python", "-c", "import signal; print(signal.getsignal(signal.SIGXFSZ))")
    assert result.ok().stdout.strip() in ("0", "1", "Handlers.SIG_IGN"), "Python itself ignores it again"
    assert run_exec("bash", "-c", "yes | head -1 >/dev/null; echo ${PIPESTATUS[0]}").stdout.strip() == "141"


@pytest.mark.parametrize(("command", "code"), [("no-such-program", 127), ("/", 126)])
def test_programs_that_cannot_be_started(run_exec: Callable[..., Child], command: str, code: int) -> None:
    result = run_exec(command)
    assert result.returncode == code
    assert result.stderr.startswith(f"ortgpu exec: {command}: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("argv", [["exec"], ["exec", "--"], ["exec", "--", ""], ["exec", "--", "python", "-I", "x.py"]])
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
    reject_isolated_python(command)


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
        reject_isolated_python(command)


def test_variables_of_exec() -> None:
    environment = {"PYTHONPATH": "/theirs", "OTHER": "1"}
    prepare(environment)
    prepare(environment)
    assert environment == {"PYTHONPATH": f"{STARTUP}:/theirs", "OTHER": "1", "ORTGPU_ENFORCE": "1"}
    for unset in ({}, {"PYTHONPATH": ""}):
        environment = dict[str, str](unset)
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
        "_ortgpu_hook",
        "importlib",
        "contextlib",  # of importlib.util; an editable install had loaded it before
        "warnings",
        "_imp",
        "_warnings",
    }
