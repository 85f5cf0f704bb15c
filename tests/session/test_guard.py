"""The guard, without a GPU: every InferenceSession that asks for CUDA, or for nothing, raises the cause instead of
running on the CPU, by whatever name it was imported, as long as the guard is in force and no longer.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lab import Cuda, Machine
from tests.lab.fixtures import Lab
from tests.lab.installed import LINKS_DRIVER, PLACES, older_than
from tests.lab.models import Models
from tests.support.children import Child, run_child

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parents[1] / "support" / "guarded_programs.py"

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

    def start(program: str, *, on: Machine = machine, prints: bool = False, **env: str) -> Any:
        result = on.run(argv=[str(PROGRAMS), program, str(models.relu)], env=env).ok()
        assert result.json is not None, result.output
        assert bool(result.stdout) == prints, "a library does not print; ONNX Runtime may, of a session without a guard"
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


def test_threads_that_import_it_first_together(run: Run) -> None:
    """Each holds locks of imports that another comes to; they waited for each other, or one of them failed."""
    assert run("first_used_in_threads") == [CAUSE]


def test_threads_that_import_it_first_together_where_the_guard_waits(run: Run) -> None:
    startup = os.pathsep.join([str(ROOT / "ortgpu" / "session" / "guard" / "startup"), str(ROOT)])
    assert run("first_used_in_threads", ORTGPU_ENFORCE="1", PYTHONPATH=startup) == [CAUSE]


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
        "fallback",
        "backend of onnx",
    ],
)
def test_cuda_or_nothing_raises_the_cause(asked: Any, request_: str) -> None:
    assert asked[request_] == CAUSE


@pytest.mark.parametrize("request_", ["typo", "typo, cpu", "no list", "no names", "wrong lengths"])
def test_a_request_that_cannot_be_meant_is_refused(asked: Any, request_: str) -> None:
    assert asked[request_] == REFUSED


def test_an_unknown_option_is_refused(asked: Any) -> None:
    assert asked["unknown option"] == "ProviderOptionError"


@pytest.mark.parametrize(
    "request_",
    [
        "cpu",
        "cpu with options",
        "cpu twice",
        "openvino",
        "rocm",
        "snpe",
        "tvm",
        "unknown",
        "cpu as a text",
        "backend of onnx on the cpu",
    ],
)
def test_other_providers_pass(asked: Any, request_: str) -> None:
    assert asked[request_] == ON_CPU


def test_what_is_not_about_the_gpu_stays_as_it_is(asked: Any) -> None:
    assert asked["no such file"] == "NoSuchFile"


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
        "decorated coroutine",
        "installed",
        "uninstalled inside",
    }
    assert {name for name, came in found.items() if came == CAUSE} == guarded
    assert {came for name, came in found.items() if name not in guarded} == {ON_CPU}


@pytest.fixture(scope="module")
def lazily(machine: Machine, models: Models) -> Any:
    return machine.run(argv=[str(PROGRAMS), "lazily", str(models.relu)]).ok().json


def test_a_block_in_which_no_session_is_made_warns_once_for_each_place(lazily: Any) -> None:
    first, again = lazily["empty"]
    (warned,) = first
    assert warned[:2] == [str(PROGRAMS.with_name("guarded_scopes.py")), "UserWarning"]
    assert "no InferenceSession was made in this process while this enforce() block was in force" in warned[2]
    assert "call ortgpu.install()" in warned[2]
    assert again == []
    assert len(lazily["another"]) == 1, "of two blocks, the one after which there is no guard"
    for (one,) in lazily["stacked"]:
        assert one[:2] == warned[:2], "of each block the place, not that of the stack's own module"
    assert lazily["imported"] is False, "to warn needs no ONNX Runtime"


@pytest.mark.parametrize("block", ["installed", "decorated", "raising", "serving"])
def test_other_blocks_do_not_warn(lazily: Any, block: str) -> None:
    assert lazily[block] == []


def test_requests_for_cuda_that_ended_on_the_cpu_unguarded_are_told(lazily: Any) -> None:
    sessions = lazily["sessions"]
    assert {name: one["fell_back"] for name, one in sessions.items()} == {
        "cuda": True,
        "nothing": True,
        "cpu": False,
        "other": False,
        "on cuda": False,
        "on tensorrt": False,
        "later": True,
        "lost": True,
    }
    assert {one["kind"] for one in sessions.values()} == {"unguarded"}
    text = sessions["cuda"]["text"]
    assert f" on cpu [unguarded], fell back from CUDA, created by {PROGRAMS.with_name('guarded_scopes.py')}:" in text
    assert "fell back" not in sessions["cpu"]["text"]
    assert lazily["uninstalled"]["fell_back"] is False, "nothing is noted any more"


def test_a_block_that_was_not_entered_leaves_no_guard(run: Run) -> None:
    assert run("interrupted") == {"in force after the interrupt": False, "inside": CAUSE, "after": ON_CPU}


def test_a_change_of_somebody_else_is_left_alone(run: Run) -> None:
    found = run("over_ours")
    assert found.pop("kept")
    assert found == {"inside": CAUSE, "after": ON_CPU, "theirs": True, "fell back": [False]}, "not after uninstall()"


def test_threads(run: Run) -> None:
    found = run("threads", prints=older_than(LINKS_DRIVER) is not None)
    assert found == {"other thread": [CAUSE], "many": [CAUSE], "count": 64, "after": ON_CPU}


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
        "providers": ["CUDAExecutionProvider", ON_CPU],
    }


def test_a_subclass_keeps_what_it_has(verified: Any) -> None:
    assert verified["own attributes"] is True


def test_failures_while_running_are_typed(verified: Any) -> None:
    assert verified["while running"] == "ProviderFailureError"


def test_pickling(verified: Any) -> None:
    library = "tests.support.guarded_sessions.Pickable"
    assert verified["sent"] == ["ortgpu.session.GPUSession", True]
    assert verified["copied"] == ["ortgpu.session.GPUSession", True]
    assert verified["pickable sent"] == [library, True]
    assert verified["reducing sent"] == ["tests.support.guarded_sessions.Reducing", True]
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
        "cuda to cpu": f"{ON_CPU} False",
        "result on the cpu": [0.0, 0.0, 1.0, 2.0],
        "its own class": True,
        "sessions on the cpu": ["cpu"],
        "back to cuda": f"CUDAExecutionProvider,{ON_CPU} True",
        "to a missing option": "ValueError",
        "after that": f"CUDAExecutionProvider,{ON_CPU} True",
        "mine": "kept",
        "cuda to cpu, uninstalled": f"{ON_CPU} False",
        "sessions, uninstalled": ["cpu"],
        "closed to cuda": "ExecutionError",
        "closed to cpu": "ExecutionError",
    }


# What there is


@pytest.fixture(scope="module")
def sessions(machine: Machine, models: Models) -> Any:
    return machine.run(argv=[str(PROGRAMS), "list_sessions", str(models.relu)]).ok().json


def test_sessions_are_listed_in_order(sessions: Any, models: Models) -> None:
    found = [(one["kind"], one["model"], one["device"], one["nodes"]) for one in sessions["all"]]
    cuda, model = "cuda:0 (pretended, GPU-1)", str(models.relu)
    placed = {ON_CPU: 1} if older_than(PLACES) is None else {}
    assert found == [
        ("GPUSession", "<bytes>", cuda, placed),
        ("guarded", model, cuda, placed),
        ("guarded", model, cuda, placed),
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
    nodes = f", nodes: {ON_CPU} 1" if older_than(PLACES) is None else ""
    start = f"{models.relu} on cuda:0 (pretended, GPU-1) [guarded]{nodes}, created by "
    assert first.startswith(start)
    assert "\n" not in first


def test_sessions_that_are_gone_are_not_listed(sessions: Any) -> None:
    assert sessions["left"] == []


def test_sessions_of_the_parent_that_are_on_a_gpu_are_not_alive(sessions: Any) -> None:
    if "in a forked child" not in sessions:
        pytest.skip(f"{sys.platform} does not fork")
    assert sessions["in a forked child"] == [
        ["GPUSession", False],
        ["guarded", False],
        ["guarded", False],
        ["cpu", True],
        ["other", True],
        ["unguarded", True],
    ]


# ORTGPU_ENFORCE


@pytest.mark.parametrize("value", ["1", "true"])
def test_variable_takes_effect_at_the_start_where_ortgpu_is_installed(
    machine: Machine, models: Models, value: str
) -> None:
    assert machine.overlay.path("ortgpu_enforce.pth").is_file(), "tests run where `pip install -e .` put it"
    argv = [str(PROGRAMS), "by_variable", str(models.relu)]
    found = machine.run(argv=argv, env={"ORTGPU_ENFORCE": value}).ok().json
    assert found["loaded at start"] == []
    assert (found["before the import"], found["after the import"]) == (CAUSE, CAUSE)


@pytest.mark.parametrize("value", ["1", "true", '"1"', "1\r"])
def test_variable_takes_effect_at_the_import_elsewhere(lab: Lab, models: Models, value: str) -> None:
    machine = lab.machine()
    machine.overlay.remove("ortgpu_enforce.pth")
    argv = [str(PROGRAMS), "by_variable", str(models.relu)]
    found = machine.run(argv=argv, env={"ORTGPU_ENFORCE": value}).ok().json
    assert found["loaded at start"] == []
    assert (found["before the import"], found["after the import"]) == (ON_CPU, CAUSE)


def start_line() -> str:
    """Return the line of ortgpu_enforce.pth."""
    startup = ROOT / "ortgpu" / "session" / "guard" / "startup"
    module = ast.parse((startup / "build_backend.py").read_text(encoding="utf-8"))  # imports setuptools: not run
    written: dict[str, Any] = {}
    names: list[ast.stmt] = [node for node in module.body if isinstance(node, ast.Assign)]
    exec(compile(ast.Module(names, []), "build_backend.py", "exec"), written)
    line: str = written["LINE"]
    return line


class Started(NamedTuple):
    """A program that imports a stand-in for ONNX Runtime, in an environment that has lost ortgpu."""

    site: Path
    beyond: Path  # the folder four above, which is outside of the environment

    def run(self, value: str = "1") -> Child:
        environment = {**os.environ, "PYTHONPATH": str(self.beyond / "fake"), "ORTGPU_ENFORCE": value}
        # Twice, as in every virtual environment: Python reads the folder for the environment, and with all others.
        code = f"import site\nfor _ in range(2): site.addsitedir({str(self.site)!r})\nimport onnxruntime"
        return run_child([sys.executable, "-S", "-c", code], env=environment, cwd=self.site)


@pytest.fixture
def started(tmp_path: Path) -> Started:
    site = tmp_path / "venv" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    (site / "ortgpu_enforce.pth").write_text(start_line(), encoding="utf-8")
    for name in ("_ortgpu_waiting.py", "_ortgpu_hook.py"):
        shutil.copy(ROOT / "ortgpu" / "session" / "guard" / "startup" / name, site)
    (tmp_path / "fake" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "fake" / "onnxruntime" / "__init__.py").write_text("print('imported')", encoding="utf-8")
    return Started(site, tmp_path)


def test_code_above_the_environment_is_never_run(started: Started) -> None:
    """A moved checkout, or a program that takes site-packages off its path: the guard is not to be found then."""
    (started.beyond / "ortgpu").mkdir()
    (started.beyond / "ortgpu" / "__init__.py").write_text("print('another user')\ndef install(): pass\n", "utf-8")
    done = started.run()
    assert "ImportError: ORTGPU_ENFORCE is set, but the guard does not work in" in done.stderr, done.output
    assert done.stdout == ""


def test_a_guard_whose_files_cannot_be_read_keeps_onnxruntime_out(started: Started) -> None:
    """Python reports an error in a .pth file, and goes on."""
    assert started.run("0").stdout == "imported\n"
    (started.site / "_ortgpu_hook.py").unlink()
    done = started.run()
    assert "import of onnxruntime halted" in done.stderr, done.output
    assert done.stdout == ""


def test_the_guard_comes_before_onnxruntime(started: Started) -> None:
    (started.site / "ortgpu.py").write_text("def install(): print('guarded')", encoding="utf-8")
    done = started.run()
    assert done.ok().stdout == "guarded\nimported\n"


@pytest.mark.parametrize(("value", "waits"), [("1", True), ('"1"', True), ("1\r", True), ("", False), ("Off", False)])
def test_a_value_of_the_variable_that_is_no_no_is_a_yes_at_the_start(value: str, waits: bool) -> None:
    """A container's file of variables hands on quotes, and one of Windows a carriage return."""
    startup = ROOT / "ortgpu" / "session" / "guard" / "startup"
    code = start_line() + "import sys; print([type(each).__name__ for each in sys.meta_path])"
    environment = {**os.environ, "PYTHONPATH": str(startup), "ORTGPU_ENFORCE": value}
    done = run_child([sys.executable, "-S", "-c", code], env=environment).ok()
    assert ("ImportHook" in done.stdout) is waits


@pytest.mark.parametrize("value", ["", "0", "False", "off"])
def test_variable_that_says_no(run: Run, value: str) -> None:
    assert run("by_variable", ORTGPU_ENFORCE=value)["after the import"] == ON_CPU
