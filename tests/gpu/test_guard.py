"""The guard where there is a GPU: what asks for CUDA, or for nothing, gets it, by whatever name, in any library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.models import Models
from tests.support.children import child_environment, run_child
from tests.support.guarded_libraries import LIBRARIES

from .plugin import not_at_start, registered_only

pytestmark = [pytest.mark.ortgpu, registered_only]

TESTS = Path(__file__).resolve().parent.parent
PROGRAMS = TESTS / "support" / "guarded_programs.py"
ON_GPU, ON_CPU = "CUDAExecutionProvider,CPUExecutionProvider", "CPUExecutionProvider"


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Models(tmp_path_factory.mktemp("models")).relu


def start(
    *arguments: str,
    folder: Path,
    before: tuple[str, ...] = (),
    deadline: float = 120,
    env: dict[str, str] | None = None,
) -> Any:
    """What a program of the guard's tests reports."""
    changes = {"GUARD_TESTS_ON": "gpu", **(env or {})}
    child = run_child(
        [sys.executable, *before, *arguments], env=child_environment(changes), deadline=deadline, cwd=folder
    )
    if child.returncode != 0 or "json" not in child.reports:
        pytest.fail(child.output, pytrace=False)
    return child.json


@pytest.mark.parametrize("program", ["names_before", "names_after"])
def test_every_name_gets_the_gpu(program: str, relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), program, str(relu), folder=tmp_path)
    found.pop("loaded", None)
    assert found == dict.fromkeys(found, ON_GPU)
    assert len(found) == 14


@pytest.fixture(scope="module")
def asked(relu: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(str(PROGRAMS), "requests", str(relu), folder=tmp_path_factory.mktemp("asked"))


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
        "directml, cuda",
        "unknown, cuda",
        "unknown arguments",
        "fallback",
    ],
)
def test_cuda_or_nothing_gets_the_gpu(asked: Any, request_: str) -> None:
    assert asked[request_] == ON_GPU


def test_all_that_there_are_gets_the_gpu(asked: Any) -> None:
    """The list names TensorRT too, which is used where it is installed and is no reason to refuse where it is not.

    That of the package without CUDA names Azure.
    """
    bound = asked["all that there are"].replace("AzureExecutionProvider,", "")
    assert bound.removeprefix("TensorrtExecutionProvider,") == ON_GPU


@pytest.mark.parametrize("request_", ["cpu", "cpu twice", "openvino"])
def test_other_providers_pass(asked: Any, request_: str) -> None:
    assert asked[request_] == ON_CPU


@pytest.mark.parametrize("request_", ["typo", "typo, cpu", "no list"])
def test_what_cannot_be_meant_is_refused(asked: Any, request_: str) -> None:
    assert asked[request_] == "ProviderRequestError"


def test_scopes(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "scopes", str(relu), folder=tmp_path)
    assert found["left over"] == []
    inside = {"inside", "nested", "after the inner one", "function", "coroutine", "installed", "uninstalled inside"}
    assert {found[name] for name in inside} == {ON_GPU}
    assert {found[name] for name in ("after", "after an exception", "after a coroutine", "uninstalled")} == {ON_CPU}


def test_threads(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "threads", str(relu), folder=tmp_path)
    assert (found["other thread"], found["many"], found["count"]) == ([ON_GPU], [ON_GPU], 64)


def test_a_verified_session_is_a_gpu_session(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "verified", str(relu), folder=tmp_path)
    for name, type_ in {"plain": "InferenceSession", "pickable": "Pickable"}.items():
        assert found[name]["type"] == type_
        assert found[name]["instance"] == [True, True]
        assert found[name]["result"] == [0, 0, 1, 2]
        assert found[name]["device"].startswith("cuda:0 (")
        assert found[name]["falls back"] is False
        assert found[name]["providers"] == ON_GPU.split(",")
    assert found["while running"] == "ProviderFailureError"
    assert found["sent"] == found["copied"] == ["ortgpu.session.GPUSession", True]
    assert found["pickable sent"] == ["tests.support.guarded_sessions.Pickable", True]


def test_set_providers(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "other_providers", str(relu), folder=tmp_path)
    assert found["cpu to cuda"] == found["cuda to nothing"] == f"{ON_GPU} True"
    assert found["cpu to a typo"] == "ProviderRequestError"
    assert found["cpu to cpu"] == found["cuda to cpu"] == found["cuda to cpu, uninstalled"] == f"{ON_CPU} False"
    assert found["result on the cpu"] == [0, 0, 1, 2]
    assert found["its own class"] is True
    assert found["sessions on the cpu"] == found["sessions, uninstalled"] == ["cpu"]
    assert found["back to cuda"] == f"{ON_GPU} True"
    assert found["mine"] == "kept"


def test_sessions_are_listed(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "list_sessions", str(relu), folder=tmp_path)
    kinds = [(one["kind"], one["device"].partition(" ")[0], one["nodes"]) for one in found["all"]]
    on_gpu = {"CUDAExecutionProvider": 1}
    recorded = kinds[0][2] != {}  # ONNX Runtime records it since 1.24
    assert kinds == [
        ("GPUSession", "cuda:0", on_gpu if recorded else {}),
        ("guarded", "cuda:0", on_gpu if recorded else {}),
        ("guarded", "cuda:0", on_gpu if recorded else {}),
        ("cpu", "cpu", {}),
        ("other", "cpu", {}),
        ("unguarded", "cpu", {}),
    ]
    assert found["left"] == []
    assert found["in a forked child"][:3] == [["GPUSession", False], ["guarded", False], ["guarded", False]]


@not_at_start
def test_variable(relu: Path, tmp_path: Path) -> None:
    found = start(str(PROGRAMS), "by_variable", str(relu), folder=tmp_path, env={"ORTGPU_ENFORCE": "1"})
    assert (
        found["loaded at start"] == []
    )  # what plain ONNX Runtime binds until then depends on the machine's loader path
    assert found["after the import"] == ON_GPU


def test_exec(relu: Path, tmp_path: Path) -> None:
    under_exec = ("-m", "ortgpu", "exec", "--", sys.executable)
    found = start(str(PROGRAMS), "by_variable", str(relu), folder=tmp_path, before=under_exec)
    assert found["before the import"] == ON_GPU
    found = start(str(PROGRAMS), "spawned", str(relu), folder=tmp_path, before=under_exec)
    assert found == {"here": ON_GPU, "there": ON_GPU}


@pytest.mark.parametrize("library", sorted(LIBRARIES))
@pytest.mark.parametrize("mode", ["before", "after"])
def test_libraries_run_on_the_gpu(library: str, mode: str, tmp_path: Path) -> None:
    """Those that are importable here; their own sessions, made as their documentation says."""
    program = str(TESTS / "support" / "guarded_libraries.py")
    offline = {"HF_HUB_OFFLINE": "1", "REMBG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    found = start(program, library, mode, str(tmp_path), folder=tmp_path, deadline=250, env=offline)
    if "not importable" in found:
        pytest.skip(f"{library} cannot be imported here: {found['not importable']}")
    assert "error" not in found, found["error"]
    assert found["result"]
    assert found["sessions"]
    for session in found["sessions"]:
        assert session["kind"] == "guarded", session
        assert session["device"].startswith("cuda:"), session
        assert "CUDAExecutionProvider" in session["providers"]
        if session["nodes"]:
            assert session["nodes"].get("CUDAExecutionProvider", 0) > 0, session
