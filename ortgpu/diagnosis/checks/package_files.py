"""Are the files of the installed packages those that were installed?"""

from __future__ import annotations

import os
import re

from ...environment.files.elf import wrong_machine
from ...environment.packages.installed import Distribution, OnnxRuntime
from ...errors import BrokenPackageError, Fix, GPUError
from ...provider.requests import CUDA
from ..facts import Facts
from ..messages import loader_words
from ..messages.runtime_words import says_why
from ..remedies import commands as remedies
from ..remedies import system as system_remedies


def broken_files(facts: Facts) -> GPUError | None:
    """Files of the only owner are gone or altered. Several owners are a conflict, which explains that.

    A warning where they were tried and did what they are for: somebody patched them on purpose, `patchelf` for one.
    """
    installed = facts.environment.packages.onnxruntime
    if installed.folder is None and not installed.owners:
        return None
    if not installed.importable:
        return None if is_of_somebody_else(installed) else _leftover(facts)
    if len(installed.owners) != 1:
        return None
    owner = installed.owners[0]
    # Images are trimmed of tools and licences on purpose: only what a session runs on counts.
    missing, altered = (list(filter(is_vital, names)) for names in (owner.missing_files, owner.altered_files))
    damaged = (*missing, *altered)
    if not damaged:
        return None
    evidence = [f"{owner.name} {owner.version} in {owner.location}"]
    evidence += [f"missing: {name}" for name in missing[:8]]
    evidence += [f"not the file that was installed: {name}" for name in altered[:8]]
    if len(damaged) > 16:
        evidence.append(f"{len(damaged)} files in all")
    works = all(did_its_work(facts, name) for name in damaged)
    return BrokenPackageError(
        f"the installed {owner.name} works, though {len(damaged)} of its files are missing or altered"
        if works
        else f"the installed {owner.name} is damaged: {len(damaged)} of its files are missing or altered",
        evidence=evidence,
        fixes=[_same_again(facts, owner, damaged)],
        severity="warning" if works else "fatal",
        package=owner.name,
        files=damaged,
    )


def _same_again(facts: Facts, owner: Distribution, damaged: tuple[str, ...]) -> Fix:
    wanted = remedies.published(owner.name, owner.version)
    provider = facts.environment.packages.onnxruntime.provider_library
    has_cuda = provider is not None or any("providers_cuda" in name for name in damaged)
    # What a distribution or anybody else built, or a nightly build: no index that is known here has it. Under the name
    # onnxruntime they have one without CUDA.
    if "==" not in wanted or (has_cuda and owner.name == "onnxruntime"):
        return remedies.reinstall_onnxruntime(facts.environment)
    return remedies.install(facts.environment, [wanted], again=True, instead_of=owner.location)


def is_of_somebody_else(installed: OnnxRuntime) -> bool:
    """A folder that happens to have this name: of models, or a clone of the project. An installed package hides it."""
    return not (installed.importable or installed.owners or installed.imported_as or is_for_packages(installed.home))


def is_for_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


def _leftover(facts: Facts) -> GPUError:
    installed = facts.environment.packages.onnxruntime
    names = [f"{owner.name} {owner.version}" for owner in installed.owners]
    return BrokenPackageError(
        "the folder onnxruntime has no file __init__.py, and importing it gives nothing: an uninstall left it behind, "
        "or it is made of links to nothing",
        evidence=[f"folder: {installed.folder}", f"installed on record: {', '.join(names) or 'nothing'}"],
        fixes=[remedies.reinstall_onnxruntime(facts.environment, leftover=installed.folder)],
        package=installed.owners[0].name if installed.owners else None,
        files=("onnxruntime/__init__.py",),
    )


_VITAL = re.compile(
    r"onnxruntime/(__init__\.py|capi/[^/]+\.py|capi/onnxruntime_pybind11_state[^/]*"
    r"|capi/(lib)?onnxruntime_providers_(cuda|shared)\.(so|dll))$"
)


def is_vital(name: str) -> bool:
    """Whether a session on the GPU needs this file of the package."""
    return _VITAL.search(name.replace("\\", "/")) is not None


def did_its_work(facts: Facts, name: str) -> bool:
    """Whether what this file is for was tried, and succeeded, so that it can be no obstacle. False: nobody tried."""
    observed = facts.observed
    session, preload = observed.step("session"), observed.preload
    if session is not None and not session.ok:  # with words that say why, it is none of the package's doing
        return says_why(session.detail)
    if session is not None:
        return True
    imported = CUDA in (observed.available_providers or ())
    if not imported or observed.import_error is not None or observed.has_session is False:
        return False
    if "onnxruntime_providers_" not in name:
        return True
    provider = observed.step("provider")
    if provider is not None:
        return provider.ok
    opened = preload is not None and preload.provider is not None and preload.ok and not preload.driver_missing
    return opened and observed.provider_error is None


def library_damaged(facts: Facts) -> GPUError | None:
    """A library of the package that would kill the process (SIGBUS) when it is opened."""
    environment = facts.environment
    installed = environment.packages.onnxruntime
    files = [file for file in (environment.extension, environment.bridge) if file is not None]
    here = environment.host.machine if environment.host.system == "Linux" else ""
    problems = {file.path: file.problem or wrong_machine(file.machine, here) for file in files}
    if environment.provider is not None:
        problems[environment.provider.path] = environment.provider.problem
    damaged = {path: problem for path, problem in problems.items() if problem is not None}
    recorded = {name for owner in installed.owners for name in (*owner.altered_files, *owner.missing_files)}
    if not damaged or any(name.endswith(os.path.basename(path)) for name in recorded for path in damaged):
        return None  # broken_files or conflicting says it
    blocked = [path for path, problem in damaged.items() if loader_words.is_blocked(problem)]
    whole = len(blocked) == len(damaged)
    return BrokenPackageError(
        f"{len(damaged)} of the libraries of the installed ONNX Runtime are "
        + ("refused to every program by this system" if whole else "damaged"),
        evidence=[f"{path}: {problem}" for path, problem in damaged.items()],
        fixes=[
            system_remedies.unblock(environment, blocked[0])
            if whole
            else remedies.reinstall_onnxruntime(facts.environment)
        ],
        package=installed.build_name,
        files=tuple(damaged),
    )


def numpy_damaged(facts: Facts) -> GPUError | None:
    """Seen only where its files were compared, after a crash: ONNX Runtime imports it."""
    numpy = facts.environment.packages.other("numpy")
    if numpy is None or not numpy.altered_files:
        return None
    return BrokenPackageError(
        "the installed numpy, which ONNX Runtime imports, is damaged",
        evidence=[f"not the file that was installed: {name}" for name in numpy.altered_files[:8]],
        fixes=[remedies.install(facts.environment, [f"numpy=={numpy.version}"], again=True, instead_of=numpy.location)],
        package="numpy",
        files=numpy.altered_files,
    )
