"""`ortgpu hold`: libraries that require `onnxruntime` are satisfied, and no installer replaces the GPU build."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from ortgpu.cli import hold as hold_command
from ortgpu.cli.hold import write_metadata
from ortgpu.cli.report import SessionReport
from ortgpu.diagnosis.checks.packages import conflicting
from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.remedies.fixes import why_not_held
from ortgpu.environment.packages.installed import Distribution
from ortgpu.environment.packages.installer import Manager
from ortgpu.environment.packages.plugins import Arrival
from ortgpu.errors import GPUError
from tests.faults.case import AS_A_USER
from tests.lab.environments import network_variables
from tests.support.children import Child, run_child
from tests.support.command_line import DEADLINE, example_report, ortgpu
from tests.support.made_facts import CPU_ENGINE, ENGINE, HEALTHY, all_of, engine, part
from tests.support.made_packages import ENGINE as FILES
from tests.support.made_packages import engine as read_engine
from tests.support.made_packages import install, read

#: Libraries whose installation replaced the GPU build by the CPU build.
LIBRARIES = ("fastembed", "rapidocr-onnxruntime", "rembg", "insightface", "chromadb", "magika", "faster-whisper")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with the files of a GPU build, of which none can be loaded, and with no pip."""
    folder = tmp_path / "with a space"
    venv.create(folder, with_pip=False)
    wheel = {"onnxruntime_gpu-1.31.1.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    install(site_of(folder), "onnxruntime_gpu", "1.31.1", {**FILES, **wheel})
    return folder


def site_of(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


def hold(environment: Path, *options: str) -> Child:
    return ortgpu("hold", "--python", str(environment), *options)


def names(site: Path) -> list[str]:
    return sorted(path.name for path in site.iterdir() if path.name.startswith((".", "onnxruntime")))


def library(folder: Path, requires: str) -> Path:
    """The wheel of a library that requires something."""
    path = folder / "library-1-py3-none-any.whl"
    said = f"Metadata-Version: 2.1\nName: library\nVersion: 1\nRequires-Dist: {requires}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("library-1.dist-info/METADATA", said)
        wheel.writestr("library-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("library-1.dist-info/RECORD", "library-1.dist-info/METADATA,,\n")
    return path


def pip(environment: Path, *arguments: str) -> Child:
    """Run this interpreter's pip on another environment, without an index."""
    command = [sys.executable, "-m", "pip", "--isolated", "--python", str(environment / "bin" / "python"), *arguments]
    return run_child(command, env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, deadline=DEADLINE)


def test_pip_is_satisfied_and_the_environment_is_consistent(environment: Path, tmp_path: Path) -> None:
    wanted = ("install", "--no-index", "--no-deps", str(library(tmp_path, "onnxruntime>=1.17")))
    pip(environment, *wanted).ok()
    before = pip(environment, "check")
    assert "library 1 requires onnxruntime, which is not installed" in before.stdout
    done = hold(environment).ok()
    assert done.stdout == "onnxruntime-gpu 1.31.1 is held: libraries that require onnxruntime leave it alone\n"
    assert "No broken requirements found" in pip(environment, "check").ok().stdout
    again = pip(environment, "install", "--no-index", "onnxruntime", str(tmp_path / "library-1-py3-none-any.whl")).ok()
    assert "Requirement already satisfied: onnxruntime" in again.stdout
    refused = pip(environment, "install", "--no-index", "onnxruntime>1.31.1")
    assert refused.returncode == 1, "what asks for a newer one is not satisfied"


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH")
def test_uv_plans_no_other_package(environment: Path, tmp_path: Path) -> None:
    wheel = library(tmp_path, "onnxruntime>=1.17")
    python = str(environment / "bin" / "python")
    command = ["uv", "pip", "install", "--offline", "--no-index", "--no-config", "--python", python, str(wheel)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    before = subprocess.run([*command, "--dry-run"], capture_output=True, env=variables, timeout=DEADLINE, check=False)
    assert before.returncode != 0
    hold(environment).ok()
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split("==")[0] for line in done.stderr.splitlines() if line.startswith(" ")] == [" + library"]
    check = ["uv", "pip", "check", "--python", python]
    assert subprocess.run(check, capture_output=True, env=variables, timeout=DEADLINE, check=False).returncode == 0


def test_what_is_held_is_metadata_alone_and_is_named(environment: Path) -> None:
    site = site_of(environment)
    before = names(site)
    hold(environment).ok()
    assert names(site) == sorted([*before, "onnxruntime-1.31.1.dist-info"])
    held = metadata.Distribution.at(site / "onnxruntime-1.31.1.dist-info")
    assert (held.metadata["Name"], held.version, held.requires) == ("onnxruntime", "1.31.1", ["onnxruntime-gpu"])
    assert {str(file) for file in held.files or ()} == {
        f"onnxruntime-1.31.1.dist-info/{name}" for name in ("METADATA", "WHEEL", "INSTALLER", "RECORD")
    }
    packages = read(site)
    assert [(one.name, one.version) for one in packages.held] == [("onnxruntime", "1.31.1")]
    assert [owner.name for owner in packages.onnxruntime.owners] == ["onnxruntime-gpu"]
    shown = ortgpu("doctor", "--no-probe", "--python", str(environment)).stdout
    assert "held: libraries that require onnxruntime find 1.31.1" in shown
    assert "ConflictingPackagesError" not in shown


def test_holding_twice_changes_nothing_and_releasing_twice_neither(environment: Path) -> None:
    site = site_of(environment)
    before = names(site)
    hold(environment).ok()
    after = names(site)
    assert "was held before" in hold(environment).ok().stdout
    assert names(site) == after
    assert hold(environment, "--release").ok().stdout.startswith("released: ")
    assert names(site) == before
    assert hold(environment, "--release").ok().stdout == "nothing is held in this environment\n"


@pytest.mark.parametrize("version", ["1.31.1", "1.30.0"], ids=["the same", "older"])
def test_metadata_that_cannot_be_written_leaves_the_earlier(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may repeat the command, and an upgrade on a full disk does not release the GPU build."""
    write_metadata(Distribution("onnxruntime-gpu", version, str(tmp_path)))
    gpu = Distribution("onnxruntime-gpu", "1.31.1", str(tmp_path))
    facts = engine(owners=(gpu,))(HEALTHY).environment
    packages = dataclasses.replace(facts.packages, held=read(tmp_path).held)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(hold_command, "write_metadata", refuse)
    with contextlib.ExitStack() as stack:
        if version != gpu.version:
            stack.enter_context(pytest.raises(PermissionError))
        assert "was held before" in hold_command._hold(dataclasses.replace(facts, packages=packages))
    assert [one.version for one in read(tmp_path).held] == [version]


def test_pip_removes_it_as_any_package(environment: Path) -> None:
    before = names(site_of(environment))
    hold(environment).ok()
    pip(environment, "uninstall", "-y", "onnxruntime").ok()
    assert names(site_of(environment)) == before


def test_after_an_upgrade_the_doctor_says_so_and_hold_follows(environment: Path) -> None:
    site = site_of(environment)
    hold(environment).ok()
    shutil.rmtree(site / "onnxruntime_gpu-1.31.1.dist-info")
    info = FILES["onnxruntime/capi/build_and_package_info.py"].replace("1.31.1", "1.32.0")
    install(site, "onnxruntime_gpu", "1.32.0", {**FILES, "onnxruntime/capi/build_and_package_info.py": info})
    shown = ortgpu("doctor", "--no-probe", "--python", str(environment)).stdout
    assert "warning: onnxruntime-gpu 1.32.0 is held as onnxruntime 1.31.1 (conflicting-packages)" in shown
    assert f"    {sys.executable} -m ortgpu hold --python '{environment / 'bin' / 'python'}'" in shown.splitlines()
    assert "onnxruntime-gpu 1.32.0 is held" in hold(environment).ok().stdout
    assert [one.version for one in read(site).held] == ["1.32.0"]
    assert "is held as" not in ortgpu("doctor", "--no-probe", "--python", str(environment)).stdout


def test_a_conflict_has_to_be_mended_first(environment: Path) -> None:
    """The last one of the two wins, and what is there is no whole GPU build."""
    site = site_of(environment)
    cpu = FILES["onnxruntime/capi/build_and_package_info.py"].replace("-gpu", "")
    install(site, "onnxruntime", "1.31.1", {**FILES, "onnxruntime/capi/build_and_package_info.py": cpu})
    before = names(site)
    done = hold(environment)
    assert done.returncode == 1
    assert done.stdout.startswith("ConflictingPackagesError: ")
    assert done.stdout.splitlines()[-1] == "not held: repair the packages first"
    assert names(site) == before
    (fix,) = [line for line in done.stdout.splitlines() if "pip uninstall" in line]
    assert fix.endswith(f" -m ortgpu hold --python '{environment / 'bin' / 'python'}'")


def test_a_folder_that_cannot_be_written_says_so(environment: Path) -> None:
    site = site_of(environment)
    site.chmod(0o555)
    try:
        words = ["hold", "--python", str(environment)]
        program = f"{AS_A_USER}\nfrom ortgpu.__main__ import main\nraise SystemExit(main({words!r}))"
        done = run_child([sys.executable, "-c", program], env=dict(os.environ), deadline=DEADLINE)
    finally:
        site.chmod(0o755)
    assert done.returncode == 1, done
    assert done.stdout.startswith(f"not held: {site.resolve()}")
    assert "Permission denied" in done.stdout
    assert [one for one in names(site) if one.startswith(".")] == []


def test_an_environment_without_the_gpu_package_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = hold(tmp_path / "bare")
    assert (done.returncode, done.stdout) == (1, "not held: onnxruntime-gpu is not installed in this environment\n")


def test_an_editable_install_is_not_taken_for_held(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime", "1.31.1", {"__editable__.onnxruntime-1.31.1.pth": "/sources"})
    assert read(tmp_path).held == ()


def test_without_the_gpu_package_what_is_held_is_no_onnxruntime(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime", "1.31.1", {})
    found = read_engine(tmp_path)
    assert (found.folder, found.owners, found.elsewhere) == (None, (), ())


CUSTOM = Distribution("onnxruntime", "1.31.1", ENGINE.location)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts, None),
        (part("host", frozen=True), "frozen"),
        (part("installer", for_one_run=True), "gone when its program has ended"),
        (part("installer", manager=Manager("uv", "/app/uv.lock", "uv add")), "uv.lock"),
        (part("installer", own=("/elsewhere",)), "does not look"),
        (engine(arrival=Arrival("plugin package", "/plugin.so")), "plugin"),
        (engine(owners=(CUSTOM,)), "itself named onnxruntime"),
        (engine(owners=(CPU_ENGINE,), provider_library=None), "not installed"),
    ],
    ids=["healthy", "frozen", "one run", "lock file", "elsewhere", "plugin", "of conda", "CPU package"],
)
def test_why_it_cannot_be_held(change: object, words: str | None) -> None:
    assert callable(change)
    reason = why_not_held(change(HEALTHY).environment)
    assert reason is None if words is None else words in str(reason)


def test_the_fix_of_a_conflict_ends_with_it() -> None:
    both = engine(owners=(ENGINE, CPU_ENGINE), build_name="onnxruntime", provider_library=None)

    def error(change: object) -> GPUError:
        assert callable(change)
        found = conflicting(change(HEALTHY))
        assert found is not None
        return found

    (fix,) = error(all_of(both, part("installer", hold="python -m ortgpu hold"))).fixes
    assert fix.executable
    assert fix.endswith(" && python -m ortgpu hold")
    for refused in (
        part("host", frozen=True),
        part("installer", manager=Manager("poetry", "/a/poetry.lock", "poetry add")),
    ):
        assert not any("ortgpu hold" in fix for fix in error(all_of(both, refused)).fixes)


def test_a_held_environment_is_healthy() -> None:
    held = part("packages", held=(CPU_ENGINE,))
    assert find_problems(held(HEALTHY)) == find_problems(HEALTHY)


def test_check_names_it() -> None:
    report: SessionReport = example_report()
    assert report.document()["held"] is None
    shown = SessionReport(**{**{name: getattr(report, name) for name in report.__slots__}, "held": "1.31.1"})
    assert shown._facts()["held"] == "libraries that require onnxruntime find 1.31.1 (ortgpu hold)"


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_real_library_does_not_replace_the_gpu_build(name: str, installer: str, tmp_path: Path) -> None:
    """Each replaced it when it was installed next, before there was a command to keep it."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    if installer == "uv" and shutil.which("uv") is None:
        pytest.skip("uv is not on PATH")
    command = ["uv", "pip", "install", "--python", python] if installer == "uv" else [python, "-m", "pip", "install"]
    variables = {**os.environ, **network_variables(tmp_path / "pip")}

    def call(*words: str) -> str:
        return run_child(words, env=variables, deadline=1500).ok().stdout

    call(*command, f"onnxruntime-gpu=={metadata.version('onnxruntime-gpu')}")
    hold(folder).ok()
    call(*command, name)
    providers = "import onnxruntime; print(onnxruntime.get_available_providers())"
    assert "CUDAExecutionProvider" in call(python, "-c", providers)
    assert "No broken requirements found" in call(python, "-m", "pip", "check")
    shown = ortgpu("doctor", "--no-probe", "--python", str(folder)).stdout
    assert "ConflictingPackagesError" not in shown
    assert "held: " in shown
    info = next(site_of(folder).glob(f"{name.replace('-', '_')}-*.dist-info"))
    required = metadata.Distribution.at(info).requires or []
    assert any(line.startswith("onnxruntime") for line in required), "else this test shows nothing"


def test_each_file_of_the_metadata_is_on_record(tmp_path: Path) -> None:
    """pip removes the files that are on record, and no others."""
    write_metadata(Distribution("onnxruntime-gpu", "1.31.1", str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    assert folder.name == "onnxruntime-1.31.1.dist-info"
    rows = [line.split(",") for line in (folder / "RECORD").read_text(encoding="utf-8").splitlines()]
    assert sorted(name for name, _, _ in rows) == sorted(f"{folder.name}/{file.name}" for file in folder.iterdir())


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["no space", "interrupted"])
def test_metadata_that_is_not_whole_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("ortgpu.cli.hold.os.rename", fail)
    with pytest.raises(type(error)):
        write_metadata(Distribution("onnxruntime-gpu", "1.31.1", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
