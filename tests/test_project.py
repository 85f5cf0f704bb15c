"""What holds for the project as a whole: what an import costs, what an extra brings, what the README may say."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ortgpu.errors
from ortgpu.__main__ import main
from ortgpu.diagnosis.remedies import releases
from ortgpu.distributed.diagnosis import packages as training_packages
from ortgpu.environment.libraries import catalogue, wheel
from tests.support.children import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = [f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.md"))]
PAGES = ["README.md", *GUIDE, "benchmarks/FIGURES.md", "benchmarks/README.md", "tests/README.md"]
HEAVY = {"onnxruntime", "onnx", "numpy", "rich", "click", "torch", "pynvml"}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules_after(statement: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(name.partition('.')[0] for name in sys.modules)))"
    child = run_python(code).ok()
    return set(json.loads(child.stdout))


def installed_owner_of(file_names: Iterable[str]) -> dict[str, str]:
    """The installed NVIDIA distribution that ships each file."""
    wanted = set(file_names)
    owners: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name.startswith("nvidia-"):
            owners.update({file.name: name for file in distribution.files or () if file.name in wanted})
    return owners


# Imports


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import ortgpu", HEAVY),
        ("import ortgpu.errors", HEAVY),
        ("from ortgpu import GPUError, CPUExecutionWarning", HEAVY),
        ("import ortgpu.__main__", HEAVY),
        ("import ortgpu.cli", HEAVY - {"rich", "click"}),
    ],
)
def test_import_is_light(statement: str, unwanted: set[str]) -> None:
    assert not modules_after(statement) & unwanted


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc/self/maps tells what a process has loaded")
def test_import_loads_no_cuda_library() -> None:
    code = "import ortgpu, pathlib; print(pathlib.Path('/proc/self/maps').read_text())"
    child = run_python(code).ok()
    assert not re.findall(r"lib(?:cuda|cudart|cublas|cudnn|nvidia)[^/\n]*\.so", child.stdout)


# Packaging


@pytest.mark.parametrize(("extra", "major"), [("cuda13", 13), ("cuda12", 12)])
def test_extra_names_every_wheel_of_the_catalogue(pyproject: dict[str, Any], extra: str, major: int) -> None:
    requirements = {r.name: r for r in map(Requirement, pyproject["project"]["optional-dependencies"][extra])}
    needed = {Requirement(spec.wheels[major]) for spec in catalogue.LIBRARIES if major in spec.wheels}
    assert {r.name for r in needed} | {"onnxruntime-gpu"} == set(requirements)
    for wanted in needed:  # a fix that names a wheel and the extra must not contradict each other
        newest = "99.99.99"
        assert not requirements[wanted.name].specifier.contains(newest), "a new major version has another soname"


@pytest.mark.parametrize("release", [releases.FOR_CUDA_12, releases.FOR_CUDA_13], ids=["cuda12", "cuda13"])
def test_extra_and_advice_name_the_same_releases(pyproject: dict[str, Any], release: releases.Release) -> None:
    assert release.requirement in pyproject["project"]["optional-dependencies"][f"cuda{release.cuda_major}"]


def test_extra_for_training_is_what_the_error_advises(pyproject: dict[str, Any]) -> None:
    extra = {line.name: line for line in map(Requirement, pyproject["project"]["optional-dependencies"]["training"])}
    advised = {line.name: line for line in map(Requirement, training_packages.REQUIREMENTS)}
    assert set(extra) == set(advised)
    assert str(extra["onnxruntime-training-cpu"]) == training_packages.TRAINING_PACKAGE
    for onnx in (extra["onnx"], advised["onnx"]):
        assert [version for version in ("1.16.2", "1.17.0", "1.18.0") if onnx.specifier.contains(version)] == [
            "1.16.2", "1.17.0"
        ]  # fmt: skip


def test_extra_brings_every_library_that_the_provider_links(pyproject: dict[str, Any]) -> None:
    spec = importlib.metadata.files("onnxruntime-gpu") if _installed("onnxruntime-gpu") else None
    found = [str(file.locate()) for file in spec or () if file.name == "libonnxruntime_providers_cuda.so"]
    if not found:
        pytest.skip("no onnxruntime-gpu wheel for Linux is installed here")
    provider = wheel.read_provider(found[0])
    assert provider.cuda_major in (12, 13)
    linked = {soname for soname in provider.needed if catalogue.spec_for(soname)}
    assert linked, provider.needed

    owners = installed_owner_of(linked)
    assert set(owners) == linked, "installed by no distribution"
    extra = pyproject["project"]["optional-dependencies"][f"cuda{provider.cuda_major}"]
    assert set(owners.values()) <= {Requirement(line).name for line in extra}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_cuda_extra_is_one_set_for_each_python(pyproject: dict[str, Any]) -> None:
    lines = [Requirement(line) for line in pyproject["project"]["optional-dependencies"]["cuda"]]
    for version in ("3.10", "3.11", "3.14"):
        chosen = [r for r in lines if r.marker and r.marker.evaluate({"python_version": version})]
        assert len(chosen) == 1, version
        assert chosen[0].extras == {"cuda12" if version == "3.10" else "cuda13"}


def test_nothing_but_a_mac_gets_the_cpu_package(pyproject: dict[str, Any]) -> None:
    (line,) = [line for line in map(Requirement, pyproject["project"]["dependencies"]) if line.name == "onnxruntime"]
    assert line.marker
    assert [s for s in ("linux", "win32", "darwin") if line.marker.evaluate({"sys_platform": s})] == ["darwin"]


def test_version_is_one(pyproject: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    version = pyproject["project"]["version"]
    assert importlib.metadata.version("ortgpu") == version
    changes = (ROOT / "examples" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+), 20\d\d-\d\d-\d\d$", changes, re.MULTILINE)[0] == version
    assert getattr(ortgpu, "__version__", version) == version
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ortgpu {version}\n"


def test_version_is_that_of_the_code_and_not_of_another_one(tmp_path: Path) -> None:
    """A source tree on PYTHONPATH stands before what is installed."""
    metadata = tmp_path / "ortgpu-99.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ortgpu\nVersion: 99\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "ortgpu", "--version"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().split() == ["ortgpu", ortgpu.__version__]


def test_console_script_is_the_module() -> None:
    (script,) = [s for s in importlib.metadata.entry_points(group="console_scripts") if s.name == "ortgpu"]
    assert script.load() is main


def test_type_information_is_shipped(pyproject: dict[str, Any]) -> None:
    assert (ROOT / "ortgpu" / "py.typed").exists()
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"]["ortgpu"]


# What is written about it


@pytest.mark.parametrize("page", ["README.md", "examples/DOCTOR.md"])
def test_pages_name_only_commands_that_exist(page: str) -> None:
    from ortgpu.cli import COMMANDS

    named = set(re.findall(r"(?<!from )\bortgpu ([a-z]+)\b", (ROOT / page).read_text(encoding="utf-8")))
    assert named
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("folder", ["ortgpu", "examples"])
def test_nothing_tells_people_to_fetch_it_by_name_from_an_index(folder: str) -> None:
    """No index has it. It comes from a clone, a wheel or a URL; see ortgpu/environment/packages/origin.py."""
    by_name = re.compile(r"\b(?:pip install|uv add|uv tool install|pipx \w+|uvx)(?: +-\S+)* +['\"]?ortgpu\b(?!\S* @)")
    files = [ROOT / "README.md", *(ROOT / folder).rglob("*")]
    read = [path for path in files if path.suffix in (".md", ".py", ".yml", "") and path.is_file()]
    assert [(path.name, found) for path in read for found in by_name.findall(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {ROOT / path for path in re.findall(r"`((?:ortgpu|tests|examples|benchmarks|\.ci)/[\w./]*)`", text)}
    named |= {(ROOT / page).parent / path for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    assert named
    assert sorted(path for path in named if not path.exists()) == []


@pytest.mark.parametrize("page", GUIDE)
def test_links_of_the_guide_lead_to_headings_that_exist(page: str) -> None:
    here = ROOT / page
    for path, heading in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", here.read_text(encoding="utf-8")):
        target = (here.parent / path if path else here).read_text(encoding="utf-8")
        titles = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["README.md", *GUIDE])
def test_code_and_commands_of_a_page_name_only_what_exists(page: str) -> None:
    from ortgpu.cli import COMMANDS

    text = (ROOT / page).read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        compile(block, page, "exec", dont_inherit=True)
        for module, names in re.findall(r"^from (ortgpu[\w.]*) import ([\w, ]+)", block, re.MULTILINE):
            home = importlib.import_module(module)
            assert {name.partition(" ")[0] for name in names.split(", ")} <= set(dir(home))
    known_errors = {cls.__name__ for cls in ortgpu.errors.catalogue().values()}
    assert set(re.findall(r"`(\w+Error)`", text)) <= known_errors
    for name, rest in re.findall(r"\bortgpu ([a-z]+)((?: (?!-- )[^ `\n#|]+)+)", text):
        if name in COMMANDS:
            command = getattr(importlib.import_module(f"ortgpu.cli.{name}"), name)
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(re.findall(r" (--[a-z-]+)", rest)) <= known, f"ortgpu {name}{rest}"


def test_readme_is_short_and_begins_with_what_a_reader_needs_first() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    places = [
        README.index(each)
        for each in (
            "ONNX Runtime moves the model",
            "python3 -m venv .venv && . .venv/bin/activate\n",
            "pip install '.[cuda]' && ortgpu demo --save model.onnx\n",
            "# app.py",
            "\nrunning on cuda:0 (NVIDIA H200, GPU-",
            "$ python app.py",
            "## Uses",
            "## Guarantees",
            "## Figures",
            "## Contributing",
            "pip install -e '.[cuda,test]' && pytest\n",
        )
    ]
    assert places == sorted(places)
    assert README[: places[3]].count("\n") < 15, "code comes at once"


def test_table_from_inference_session_names_what_both_have() -> None:
    from onnxruntime import InferenceSession

    from ortgpu import GPUSession

    page = (ROOT / "examples" / "SESSION.md").read_text(encoding="utf-8")
    table = page.partition("| with InferenceSession |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) == 12
    for side, cls in enumerate((InferenceSession, GPUSession)):
        names = re.findall(r"\b(?:session|GPUSession)\.(\w+)", " ".join(row[side] for row in rows))
        assert names
        assert [name for name in names if not hasattr(cls, name) and name not in ("device", "placement")] == []
    arguments = set(re.findall(r"`(\w+)=", " ".join(row[1] for row in rows)))
    assert arguments
    assert arguments <= set(inspect.signature(GPUSession).parameters)


def test_guide_counts_the_faults_as_they_were_recorded() -> None:
    recorded = (ROOT / "tests" / "faults" / "README.md").read_text(encoding="utf-8")
    [found] = re.findall(r"^\| all \| (\d+) \| (\d+)/\1 \| (\d+)/(\d+) \|", recorded, re.MULTILINE)
    cases, right, fixes, true = found
    assert (cases, fixes) == (right, true)
    promises, doctor = (
        (ROOT / "examples" / f"{name}.md").read_text(encoding="utf-8") for name in ("PROMISES", "DOCTOR")
    )
    assert f"[{cases} faults]" in doctor
    assert f"[{cases} faults]" in promises
    assert f"{right} right errors. {fixes} fixes are commands" in promises
    assert f"In [{cases} deliberately broken environments](tests/faults/README.md)" in README
    assert f"all {true} printed commands worked" in README


def test_guide_names_every_page_and_example() -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in GUIDE]
    guide = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    linked = {f"examples/{name}" for name in re.findall(r"\]\((\w+\.md)\)", guide)}
    assert linked | {"examples/README.md"} == set(GUIDE)
    named = {name for text in pages for name in re.findall(r"\[`(\w+\.py)`\]\(\1\)", text)}
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_ci_runs_what_the_readme_does_and_the_laboratory() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "pip install -e '.[cuda,test]' && pytest\n" in README
    assert "`pytest -n auto`" in README
    assert 'selected="not matrix and not slow"' in lines
    assert 'pytest -n auto --maxprocesses=4 -m "$selected"' in lines
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], timeout=10, check=False).returncode == 0
