"""What is wrong with installed packages: files that were changed, or that this user may not read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.probe.result import ProbeStep
from ortgpu.environment.packages.installed import RefusedPath
from tests.support.made_facts import (
    AVAILABLE,
    CPU_ENGINE,
    ENGINE,
    EXTENSION,
    FOLDER,
    HEALTHY,
    PROVIDER,
    SITE,
    SYMBOL,
    Change,
    all_of,
    engine,
    observed,
    part,
    preloaded,
    probed,
    variables,
)

EXTENSION_FILE, PROVIDER_FILE = (f"onnxruntime/capi/{path.rpartition('/')[2]}" for path in (EXTENSION, PROVIDER))
TAKEN_BY_THE_IMPORT = ("onnxruntime/capi/_pybind_state.py", EXTENSION_FILE)


ALL_FILES = (*TAKEN_BY_THE_IMPORT, PROVIDER_FILE)


IMPORTED = observed(available_providers=AVAILABLE)


def tried(name: str, ok: bool, detail: str = "") -> Change:
    return all_of(probed(ProbeStep(name, ok, detail)), IMPORTED)


@pytest.mark.parametrize(
    ("seen", "harmless"),
    [
        (observed(), ()),
        (IMPORTED, TAKEN_BY_THE_IMPORT),
        (all_of(IMPORTED, observed(has_session=False)), ()),
        (all_of(IMPORTED, observed(import_error="ImportError: no such thing")), ()),
        (observed(available_providers=("CPUExecutionProvider",)), ()),
        (all_of(IMPORTED, preloaded()), ALL_FILES),
        (all_of(IMPORTED, preloaded(driver_missing=True)), TAKEN_BY_THE_IMPORT),
        (all_of(IMPORTED, preloaded(), observed(provider_error=SYMBOL)), TAKEN_BY_THE_IMPORT),
        (tried("provider", False, SYMBOL), TAKEN_BY_THE_IMPORT),
        (tried("provider", True), ALL_FILES),
        (tried("session", True), ALL_FILES),
        (tried("session", False, "TypeError: 'NoneType' object is not callable"), ()),
        (tried("session", False, "CUDA failure 46: all CUDA-capable devices are busy"), ALL_FILES),
    ],
)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("file", ALL_FILES)
def test_a_changed_file_that_does_its_work_is_a_warning(
    file: str, missing: bool, seen: Change, harmless: tuple[str, ...]
) -> None:
    """Our own advice of patchelf makes such a file, and so does an editor."""
    owner = replace(ENGINE, missing_files=(file,)) if missing else replace(ENGINE, altered_files=(file,))
    severity = "warning" if file in harmless else "fatal"
    broken = next(one for one in find_problems(seen(engine(owners=(owner,))(HEALTHY))) if one.code == "broken-package")
    assert broken.severity == severity
    assert file in str(broken)
    assert ("works, though" in broken.summary) == (severity == "warning")
    twins = {problem.code: problem for problem in find_problems(seen(engine(owners=(CPU_ENGINE, owner))(HEALTHY)))}
    assert twins["conflicting-packages"].severity == severity


def test_a_file_that_the_import_does_without_may_be_unreadable() -> None:
    refused = RefusedPath(f"{FOLDER}/capi/convert_npz_to_onnx_adapter.py", "-rw-------", False)
    facts = part("packages", refused=(refused,))(HEALTHY)
    (problem,) = find_problems(facts)
    assert refused.path in str(problem)
    assert find_problems(IMPORTED(facts)) == ()


@pytest.mark.parametrize("name", ["ortgpu_enforce.pth", "_ortgpu_waiting.py", "_ortgpu_hook.py"])
def test_a_guard_that_this_user_may_not_read_is_told(name: str) -> None:
    """Python passes over such a .pth file without a word."""
    facts = part("packages", refused=(RefusedPath(f"{SITE}/{name}", "-rw-------", False),))(HEALTHY)
    assert find_problems(facts) == (), "nobody asked for the guard"
    (problem,) = find_problems(variables(ORTGPU_ENFORCE="1")(facts))
    assert (problem.severity, problem.details()["files"]) == ("warning", (f"{SITE}/{name}",))
    assert str(problem.fixes[0]) == f"sudo chmod -R a+rX {SITE}/{name}"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("onnxruntime-gpu", "broken-package"),
        ("onnxruntime_gpu-cuda13", "broken-package"),
        ("onnxruntime-webgpu", "cpu-only-package"),
        ("onnxruntime-directml", "cpu-only-package"),
        ("onnxruntime", "cpu-only-package"),
    ],
)
def test_a_build_without_the_provider_is_damaged_if_it_is_for_cuda(name: str, code: str) -> None:
    """WebGPU is another interface to a GPU: its build has no provider of CUDA to lose."""
    seen = engine(build_name=name, provider_library=None, owners=())(HEALTHY)
    assert next(problem.code for problem in find_problems(seen)) == code
