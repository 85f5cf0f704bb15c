"""Check that a GPU build of ONNX Runtime is installed and intact, and that this process can use it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath

from ... import errors
from ...environment.libraries import loader_words
from ...environment.libraries.library_file import wrong_machine
from ...environment.packages.installed import START_FILES, OnnxRuntime, RefusedPath
from ...environment.packages.plugins import provider_file_name
from ...errors import Fix, GPUError, Severity, counted, manual, python, shell
from ...provider.requests import CUDA
from ..facts import Facts
from ..remedies import fixes as remedies
from .classifier import explain_opening

CUDA_PLATFORMS = {("Linux", "x86_64"), ("Windows", "AMD64"), ("Linux", "aarch64")}


def platform_unsupported(facts: Facts) -> GPUError | None:
    host = facts.environment.host
    system, machine = host.system, host.machine
    if (system, machine) in CUDA_PLATFORMS:
        return None
    fix = manual("run on Linux or Windows with an NVIDIA GPU", needs="hardware")
    if re.fullmatch(r"i\d86|x86|arm(v\dl)?", machine):
        fix = manual(f"use a Python for 64 bits: {host.executable or 'this one'} is for 32")
    fixes = [fix, manual("or pass allow_cpu=True to accept the CPU")]
    summary = f"there is no CUDA on {system} {machine}"
    wheels = ["the package index has CUDA builds for Linux on x86_64 and aarch64, and for Windows on x86_64"]
    return errors.UnsupportedPlatformError(summary, evidence=wheels, fixes=fixes, system=system, machine=machine)


def not_installed(facts: Facts) -> GPUError | None:
    installed = facts.environment.packages.onnxruntime
    if (installed.folder is not None and not is_of_somebody_else(installed)) or installed.owners:
        return None
    # A record without its folder makes an installer do nothing.
    ghosts = [owner for owner in installed.elsewhere if any("__init__.py" in name for name in owner.missing_files)]
    evidence = [f"no folder onnxruntime on the search path of {facts.environment.host.executable}"]
    if installed.folder is not None:
        evidence = [f"{installed.folder} is no package: it has no file __init__.py, and is nobody's on record"]
    evidence += [f"on record without its files: {owner.name} {owner.version} in {owner.location}" for owner in ghosts]
    evidence += [
        f"onnxruntime {distribution.version} in {distribution.location} is only held (ortgpu hold), and has no files"
        for distribution in facts.environment.packages.held
    ]
    fixes = _first_install(facts)
    if ghosts and fixes[0].executable:
        names = " ".join(dict.fromkeys(owner.name for owner in ghosts))
        fixes = [remedies.chain_steps(facts.environment, f"{facts.environment.installer.uninstall} {names}", *fixes)]
    return errors.OnnxRuntimeNotInstalledError(
        "ONNX Runtime is not installed in this environment", evidence=evidence, fixes=fixes
    )


def shadowed(facts: Facts) -> GPUError | None:
    """Check that no stray file, clone, zip archive or folder of another Python is imported instead of the package."""
    environment, installed = facts.environment, facts.environment.packages.onnxruntime
    taken, extension = installed.shadowed_by or installed.folder or "", installed.extension or ""
    files, off = (taken,), None
    if installed.shadowed_by is not None:
        why, advice = " instead of the installed package", f"rename {taken}"
        evidence = [f"it comes before the package on the search path: {taken}"]
        if os.path.basename(taken).startswith("__init__."):
            why, archive = (
                ", and nothing that is compiled can be imported from a zip archive",
                PurePath(taken).parents[1],
            )
            off = remedies.drop_from_variable(environment, "PYTHONPATH", str(archive))
            advice = f"leave onnxruntime and NumPy out of {archive}, or make it unpack itself (shiv, pex)"
        fixes = [off or manual(advice)]
    elif _is_of_another_python(facts):
        why, version = ", which is built for another Python", ".".join(map(str, environment.host.python))
        fact = f"this is Python {version}, and the package has {os.path.basename(extension)}"
        evidence = [fact, *_shadowed_by(installed)]
        files, fixes = (extension,), [_leave_out(facts)]
    elif _is_checkout(installed):
        why = ", which is no installed package"
        fact = "it has no onnxruntime_pybind11_state, as the sources of ONNX Runtime have none"
        evidence = [fact, *_shadowed_by(installed)]
        off = remedies.drop_from_variable(environment, "PYTHONPATH", installed.home)
        fixes = [off or manual(f"start the program in another folder, or rename {taken}")]
        fixes += [] if installed.elsewhere else _first_install(facts)
    else:
        return None
    return errors.BrokenPackageError(
        f"import onnxruntime takes {taken}{why}", evidence=evidence, fixes=fixes, files=files
    )


def _is_of_another_python(facts: Facts) -> bool:
    """Return True for a package outside this interpreter's folders, with a library for another Python."""
    installed, environment = facts.environment.packages.onnxruntime, facts.environment
    is_of_this = python_of(installed) in (None, environment.host.python[:2])
    return not is_of_this and not environment.installer.owns(installed.home)


def python_of(installed: OnnxRuntime) -> tuple[int, int] | None:
    """Return the Python version of the build, from the name of its library; None on Windows: names have no version."""
    built = re.search(r"\.cpython-3(\d+)t?-", os.path.basename(installed.extension or ""))
    return (3, int(built[1])) if built is not None else None


def _is_checkout(installed: OnnxRuntime) -> bool:
    """Return True for a package without an owning distribution and without the library of every build."""
    return installed.importable and not installed.owners and installed.extension is None


def conflicting(facts: Facts) -> GPUError | None:
    """Check for several distributions in one folder. It is fatal if the result is not an intact GPU build."""
    installed = facts.environment.packages.onnxruntime
    owners = installed.owners
    if len(owners) < 2 or not installed.importable or _is_of_another_python(facts):
        return None
    build = next((owner for owner in owners if owner.name == installed.build_name), None)
    works = (
        installed.provider_library is not None
        and _is_for_cuda(installed.build_name or "gpu")
        and build is not None
        and all(did_its_work(facts, name) for name in (*build.missing_files, *build.altered_files) if is_vital(name))
    )
    evidence = [
        f"{owner.name} {owner.version}: {len(damaged) or 'none'} of its files missing or overwritten"
        for owner in owners
        for damaged in [(*owner.missing_files, *owner.altered_files)]
    ]
    evidence += [
        f"the files there now: {installed.build_name or 'a mixture'} {installed.build_version or ''}".rstrip(),
        "they share the folder onnxruntime: the last one installed wins, and uninstalling only one deletes files that "
        "the rest needs",
    ]
    names = list(dict.fromkeys(owner.name for owner in owners))
    summary = f"{' and '.join(names)} share one folder" + ("" if works else ", and the GPU build was overwritten")
    if len(names) == 1:
        summary = f"{names[0]} is on record {len(owners)} times, as an upgrade that was interrupted leaves it"
    return errors.ConflictingPackagesError(
        summary,
        evidence=evidence,
        fixes=_keep_away(facts, [remedies.reinstall_onnxruntime(facts.environment)]),
        severity="warning" if works else "fatal",
        packages=tuple(owner.name for owner in owners),
    )


def held_at_another_version(facts: Facts) -> GPUError | None:
    """Check that the record of `ortgpu hold` has the version of the GPU build: an upgrade of the build changes it."""
    packages = facts.environment.packages
    if not packages.held:
        return None
    gpu = next((owner.version for owner in packages.onnxruntime.owners if owner.name == "onnxruntime-gpu"), None)
    others = [entry.version for entry in packages.held if entry.version != gpu]
    if gpu is None or not others or remedies.why_not_held(facts.environment) is not None:
        return None
    summary, names = f"onnxruntime-gpu {gpu} is held as onnxruntime {others[0]}", ("onnxruntime", "onnxruntime-gpu")
    why = ["a library that requires another onnxruntime than the held one brings the build without CUDA"]
    hold = [shell(facts.environment.installer.hold)]
    return errors.ConflictingPackagesError(summary, evidence=why, fixes=hold, severity="warning", packages=names)


def cpu_only(facts: Facts) -> GPUError | None:
    installed, available = facts.environment.packages.onnxruntime, facts.observed.available_providers
    has_provider = installed.provider_library is not None
    if (
        not installed.importable
        or _is_checkout(installed)
        or _is_of_another_python(facts)
        or facts.observed.has_other_cuda_plugin
        or (has_provider and (available is None or CUDA in available))
    ):
        return None
    owner = installed.owners[0] if len(installed.owners) == 1 else None
    name = installed.build_name or (owner.name if owner else "onnxruntime")
    if _is_for_cuda(name) and (available is None or CUDA in available or installed.imported_as is not None):
        return None  # Other checks report a GPU build without its provider file, or installed after the import.
    version = installed.build_version or (owner.version if owner else None)
    evidence = [f"import onnxruntime finds {name} {version or ''} in {installed.folder}".replace("  ", " ")]
    evidence += [f"providers in this build: {', '.join(available)}"] if available is not None else []
    evidence += _shadowed_by(installed)
    evidence += [
        f"{plugin} brings another provider than CUDA" for plugin in installed.plugins if not plugin.is_for_cuda
    ]
    fixes = _keep_away(facts, replace_build(facts))
    if not _hides_a_gpu_build(installed):
        plugin = f"CUDA as a plugin for ONNX Runtime {installed.version or 'of this release'}"
        fixes.append(manual(f"or, if you have {plugin}, install its package or register its library first"))
    summary = f"the installed ONNX Runtime ({name}) was built without CUDA"
    return errors.CPUOnlyPackageError(summary, evidence=evidence, fixes=fixes, package=name, version=version)


def provider_missing(facts: Facts) -> GPUError | None:
    """Check that a GPU build has its provider file: without it, CUDA is still listed as available (faults B23)."""
    installed = facts.environment.packages.onnxruntime
    if not installed.importable or installed.provider_library is not None:
        return None
    if not _is_for_cuda(installed.build_name or " ".join(owner.name for owner in installed.owners)):
        return None
    owner = installed.owners[0] if installed.owners else None
    if owner is not None and any("providers_cuda" in name for name in owner.missing_files):
        return None  # The check broken_files reports it, with the other missing files.
    return errors.BrokenPackageError(
        "the CUDA provider library of ONNX Runtime is missing",
        evidence=[f"expected beside the package in {os.path.join(installed.folder or '', 'capi')}"],
        fixes=replace_build(facts) if owner is None else [remedies.reinstall_onnxruntime(facts.environment)],
        package=owner.name if owner else installed.build_name,
        files=(f"onnxruntime/capi/{provider_file_name('cuda', facts.environment.host.system)}",),
    )


def _keep_away(facts: Facts, fixes: Sequence[Fix]) -> list[Fix]:
    """Return ``fixes`` that also keep the removed packages away.

    A lock file brings a package back. The next library that requires ``onnxruntime`` does so, too, unless the GPU build
    is held.
    """
    environment = facts.environment
    installer, requirers = environment.installer, environment.packages.requirers
    owners = dict.fromkeys(owner.name for owner in environment.packages.onnxruntime.owners)
    others = [name for name in owners if name != "onnxruntime-gpu"]
    if (manager := installer.manager) is not None and others:
        advice = f"and remove {' and '.join(others)} from the project, or else {manager.lock} brings it back"
        return [*fixes, manual(advice)]
    records = [owner.folder for owner in environment.packages.onnxruntime.owners if owner.name == "onnxruntime"]
    is_removed = any(words in fix for fix in fixes for words in (installer.uninstall, *filter(None, records)))
    comes_back = bool(records) and is_removed and (requirers or len(owners) > 1)
    if not comes_back or remedies.why_not_held_in(environment, environment.packages.onnxruntime.home) is not None:
        return [*fixes]
    return [remedies.chain_steps(environment, fixes[0], installer.hold), *fixes[1:]]


def _first_install(facts: Facts) -> list[Fix]:
    instead = remedies.why_none_fits(facts.environment)
    return [instead or remedies.install(facts.environment, remedies.newest_requirements(facts.environment))]


def _leave_out(facts: Facts) -> Fix:
    installed = facts.environment.packages.onnxruntime
    then = [] if _hides_a_gpu_build(installed) else _first_install(facts)
    return remedies.drop_from_search_path(facts.environment, installed.home, *then)


def _hides_a_gpu_build(installed: OnnxRuntime) -> bool:
    return any(_is_for_cuda(other.name) for other in installed.elsewhere)


def replace_build(facts: Facts) -> list[Fix]:
    installed, installer = facts.environment.packages.onnxruntime, facts.environment.installer
    home = installed.home
    packages = facts.environment.packages
    shared = any(distribution.location == home for distribution in (*packages.others, *packages.nvidia))
    off = remedies.drop_from_variable(facts.environment, "PYTHONPATH", home)
    bundled = facts.environment.host.frozen and off is None  # A pex has a folder for each of its packages.
    mended = not _hides_a_gpu_build(installed) or installer.owns(home) or installer.hides(home)
    if shared or bundled or (is_for_packages(home) and mended):  # Without this folder other packages would go, too.
        return [remedies.reinstall_onnxruntime(facts.environment)]
    return [_leave_out(facts)]  # A folder on the search path hides the installed package behind it.


def _is_for_cuda(names: str) -> bool:
    """Return True if a name has the part gpu, as in onnxruntime-gpu; onnxruntime-webgpu has no CUDA."""
    return "gpu" in re.split(r"[-_\s]", names)


def _shadowed_by(installed: OnnxRuntime) -> list[str]:
    return [f"shadowed by it: {other.name} {other.version} in {other.location}" for other in installed.elsewhere]


def broken_files(facts: Facts) -> GPUError | None:
    """Check the files of the only owner. Several owners are a conflict, and explain missing files.

    It is a warning if the files were tried and work: somebody patched them on purpose, with `patchelf` for example.
    """
    installed = facts.environment.packages.onnxruntime
    owners, name = installed.owners, installed.owners[0].name if installed.owners else None
    severity: Severity = "fatal"
    damaged: tuple[str, ...] = ("onnxruntime/__init__.py",)
    if not installed.importable and (installed.folder is not None or owners) and not is_of_somebody_else(installed):
        names = ", ".join(f"{owner.name} {owner.version}" for owner in owners)
        evidence = [f"folder: {installed.folder}", f"installed on record: {names or 'nothing'}"]
        why = "an uninstall left it behind, or its links are broken"
        summary = f"the folder onnxruntime has no file __init__.py, so it cannot be imported: {why}"
        fix = remedies.reinstall_onnxruntime(facts.environment, leftover=installed.folder)
    elif installed.importable and len(owners) == 1:
        owner = owners[0]
        # Some images leave out tools and licences on purpose: only the files for a session count.
        missing, altered = list(filter(is_vital, owner.missing_files)), list(filter(is_vital, owner.altered_files))
        if not (damaged := (*missing, *altered)):
            return None
        evidence = [f"{name} {owner.version} in {owner.location}", *(f"missing: {file}" for file in missing[:8])]
        evidence += [f"changed since its installation: {file}" for file in altered[:8]]
        counts = f"{counted(len(damaged), 'file')} {'is' if len(damaged) == 1 else 'are'} missing or altered"
        summary = f"the installed {name} is damaged: {counts}"
        if all(did_its_work(facts, file) for file in damaged):
            summary, severity = f"the installed {name} works, though {counts}", "warning"
        has_cuda = installed.provider_library is not None or any("providers_cuda" in file for file in damaged)
        is_public = "==" in remedies.published(owner.name, owner.version)  # No index has private and nightly builds.
        fix = remedies.install_again(facts.environment, owner)
        if not is_public or (has_cuda and name == "onnxruntime"):  # An index has a CPU build of this name.
            fix = remedies.reinstall_onnxruntime(facts.environment)
    else:
        return None
    return errors.BrokenPackageError(
        summary, evidence=evidence, fixes=[fix], severity=severity, package=name, files=damaged
    )


def is_of_somebody_else(installed: OnnxRuntime) -> bool:
    """Return True for an unrelated folder of this name, such as a clone. An installed package would hide it."""
    return not (installed.importable or installed.owners or installed.imported_as or is_for_packages(installed.home))


def is_for_packages(folder: str) -> bool:
    return os.path.basename(folder) in ("site-packages", "dist-packages")


_VITAL = re.compile(
    r"onnxruntime/(__init__\.py|capi/[^/]+\.py|capi/onnxruntime_pybind11_state[^/]*"
    r"|capi/(lib)?onnxruntime_providers_(cuda|shared)\.(so|dll))$"
)


def is_vital(name: str) -> bool:
    return _VITAL.search(name.replace("\\", "/")) is not None


def did_its_work(facts: Facts, name: str) -> bool:
    """Return True if this file was used with success. False: it failed, or nobody tried."""
    observed = facts.observed
    session, preload = observed.step("session"), observed.preload
    if session is not None and not session.ok:  # If its words name a cause, the package is not the cause.
        error = explain_opening(session.detail, facts)
        return error is not None and not isinstance(error, errors.ProviderFallbackError)
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
    """Check that the libraries of the package can be opened: a damaged one kills the process (SIGBUS)."""
    environment, installed = facts.environment, facts.environment.packages.onnxruntime
    machine = environment.host.machine if environment.host.system == "Linux" else ""
    damaged: dict[str, str] = {}
    for file in filter(None, (environment.extension, environment.bridge)):
        if (problem := file.problem or wrong_machine(file.machine, machine)) is not None:
            damaged[file.path] = problem
    if environment.provider is not None and environment.provider.problem is not None:
        damaged[environment.provider.path] = environment.provider.problem
    if not damaged:
        return None
    recorded = {name for owner in installed.owners for name in (*owner.altered_files, *owner.missing_files)}
    arrival = installed.arrival
    plugin = arrival.package if arrival is not None and [*damaged] == [arrival.library] else None
    reported = plugin is None and any(name.endswith(os.path.basename(path)) for name in recorded for path in damaged)
    if reported:  # The check broken_files or conflicting reports it.
        return None
    if all(map(loader_words.is_blocked, damaged.values())):
        state, fix = "refused to every program by this system", remedies.unblock(environment, next(iter(damaged)))
    else:
        again = manual(f"install {plugin.name} again, from where it came") if plugin is not None else None
        state, fix = "damaged", again or remedies.reinstall_onnxruntime(environment)
    libraries, are = ("1 library", "is") if len(damaged) == 1 else (f"{len(damaged)} libraries", "are")
    return errors.BrokenPackageError(
        f"{libraries} of {plugin or 'the installed ONNX Runtime'} {are} {state}",
        evidence=[f"{path}: {problem}" for path, problem in damaged.items()],
        fixes=[fix],
        package=plugin.name if plugin is not None else installed.build_name,
        files=tuple(damaged),
    )


def numpy_damaged(facts: Facts) -> GPUError | None:
    """Check the files of NumPy: ONNX Runtime imports it. The files are compared only after a crash."""
    numpy = facts.environment.packages.other("numpy")
    if numpy is None or not numpy.altered_files:
        return None
    summary, files = "the installed numpy, which ONNX Runtime imports, is damaged", numpy.altered_files
    evidence = [f"changed since its installation: {name}" for name in files[:8]]
    fix = remedies.install_again(facts.environment, numpy)
    return errors.BrokenPackageError(summary, evidence=evidence, fixes=[fix], package="numpy", files=files)


def package_unreadable(facts: Facts) -> GPUError | None:
    """Check that this user may read ONNX Runtime's package, or the folders of packages if it is not visible."""
    packages = facts.environment.packages
    folder = packages.onnxruntime.folder
    if not packages.refused:
        return None
    if folder is None:
        refused = [file for file in packages.refused if file.path.endswith(("site-packages", "dist-packages"))]
        return _unreadable(facts, refused, "this user may not read a folder in which packages are installed")
    folders = (folder, os.path.join(folder, "capi"))
    mine = [file for file in packages.refused if file.path.startswith(folder)]
    needed = (file for file in mine if is_vital(file.path) and not did_its_work(facts, file.path))
    refused = [*(file for file in mine if file.path in folders), *needed]
    return _unreadable(facts, refused, "this user may not read the installed ONNX Runtime")


def guard_unreadable(facts: Facts) -> GPUError | None:
    """Warn that ORTGPU_ENFORCE does not reach this user's programs: Python ignores the unreadable file in silence."""
    if "ORTGPU_ENFORCE" not in facts.environment.variables.now:
        return None
    refused = [file for file in facts.environment.packages.refused if os.path.basename(file.path) in START_FILES]
    what = "this user may not read the guard's files: programs that do not import ortgpu run without the guard"
    return _unreadable(facts, refused, f"ORTGPU_ENFORCE is set, but {what}", "ortgpu", "warning")


def _unreadable(
    facts: Facts, refused: list[RefusedPath], summary: str, package: str | None = None, severity: Severity = "fatal"
) -> GPUError | None:
    if not refused:
        return None
    files, name = tuple(file.path for file in refused), package or facts.environment.packages.onnxruntime.build_name
    evidence = [f"permission denied: {file.mode} {file.path}" for file in refused[:8]]
    fixes = [remedies.fix_read_permission(facts.environment, files)]
    return errors.BrokenPackageError(
        summary, evidence=evidence, fixes=fixes, severity=severity, package=name, files=files
    )


def replaced_after_import(facts: Facts) -> GPUError | None:
    """Check that the package was not replaced after this process imported it, for example in a notebook.

    The new provider does not fit the loaded module: the module has none, or the process crashes. A CPU build of the
    same release leaves the provider file: it breaks the next process.
    """
    installed = facts.environment.packages.onnxruntime
    imported, name = installed.imported_as, installed.build_name
    if imported is None or (imported[0].endswith("-gpu") and not installed.is_of_another_release):
        return None
    evidence = [f"imported: {' '.join(imported)}", f"there now: {name} {installed.build_version} in {installed.folder}"]
    summary = "ONNX Runtime was replaced after this process had imported it, and the process keeps the old one"
    restart = manual("restart this process: in a notebook, restart its kernel")
    return errors.BrokenPackageError(summary, evidence=evidence, fixes=[restart], package=name)


# The checks below are about CUDA as a plugin: its package, and its registration.


def plugin_incomplete(facts: Facts) -> GPUError | None:
    """Check that a plugin's package has the provider's library; a meta-package has neither library nor module."""
    installed = facts.environment.packages.onnxruntime
    if not installed.plugins:
        return None
    whole = any(plugin.library for plugin in installed.plugins)
    lacking = (plugin for plugin in installed.plugins if plugin.is_for_cuda and plugin.library is None)
    empty = next((plugin for plugin in lacking if plugin.folder is not None or not whole), None)
    if empty is None:
        return None
    where = f"expected in {empty.folder}" if empty.folder is not None else f"its module is not in {empty.location}"
    again = manual(f"install {empty.name} again, from where it came")
    severity: Severity = "warning" if installed.arrival is not None else "fatal"
    summary = f"the plugin package {empty} has no CUDA provider library"
    return errors.BrokenPackageError(summary, evidence=[where], fixes=[again], severity=severity, package=empty.name)


def plugin_of_another_release(facts: Facts) -> GPUError | None:
    """Check that a plugin with calls to internals of ONNX Runtime belongs to the installed release."""
    environment = facts.environment
    installed, release = environment.packages.onnxruntime, environment.release_wanted
    arrival, name = installed.arrival, installed.build_name or "onnxruntime"
    if arrival is None or release is None or facts.observed.plugin_problem == "no device":
        return None
    fix = remedies.install(environment, [f"{name}=={release}"])
    if arrival.way == "bundled plugin":
        fix = remedies.reinstall_onnxruntime(environment, requirement=f"{name}=={installed.version}")
    but = f"but {name} {installed.version} is installed: it would crash this process"
    summary = f"the CUDA plugin belongs to ONNX Runtime {release}, {but}"
    evidence = [f"plugin: {arrival.library}", "it calls Provider_GetHost, which differs between releases"]
    return errors.LibraryVersionError(summary, evidence=evidence, fixes=[fix], needed=(f"{name} {release}",))


def plugin_without_device(facts: Facts) -> GPUError | None:
    """Check that a registered plugin lists a GPU: ONNX Runtime finds devices by files of the system, not by CUDA."""
    if facts.observed.plugin_problem != "no device":
        return None
    where, fixes = "among the devices of Windows", replace_build(facts)
    if not facts.environment.host.is_windows:
        where = "in /sys/class/drm and /sys/bus/pci/devices"
        fixes.append(manual("or start this container with /sys of its host"))
    evidence = [f"ONNX Runtime looks for GPUs {where}, and sees none"]
    return errors.NoDeviceError("the CUDA plugin is registered, but lists no GPU", evidence=evidence, fixes=fixes)


def plugin_unregistered(facts: Facts) -> GPUError | None:
    """Check that the plugin is registered in a session that another library opened: the guard registers nothing."""
    installed = facts.environment.packages.onnxruntime
    if facts.observed.plugin_problem != "not registered" or installed.arrival is None:
        return None
    arrival, name, version = installed.arrival, installed.build_name, installed.version
    if arrival.way == "bundled plugin":
        summary = f"the CUDA plugin of {name} {version} was not registered when it was imported"
        fact, code = "ONNX Runtime registers the plugin only after its libraries are loaded", "import onnxruntime"
    else:
        summary = f"{arrival.package or 'a CUDA plugin'} is installed, but this program has not registered it"
        fact, modules, arguments = f"{name} {version} has no CUDA", "onnxruntime", f"{CUDA!r}, {arrival.library!r}"
        if arrival.package is not None:
            modules = f"onnxruntime, {os.path.basename(arrival.package.folder or '')} as plugin"
            arguments = "plugin.get_ep_name(), plugin.get_library_path()"
        code = f"import {modules}; onnxruntime.register_execution_provider_library({arguments})"
    evidence, fix = [f"plugin: {arrival.library}", fact], python(f"import ortgpu; ortgpu.preload(); {code}")
    return errors.CPUOnlyPackageError(summary, evidence=evidence, fixes=[fix], package=name, version=version)


def plugins_unknown(facts: Facts) -> GPUError | None:
    installed = facts.environment.packages.onnxruntime
    if facts.observed.plugin_problem != "no plugins":
        return None
    name, version = installed.build_name, installed.version
    summary = f"{name or 'onnxruntime'} {version} has no CUDA, and supports no plugins"
    evidence = ["register_execution_provider_library came with release 1.23"]
    fixes = replace_build(facts)
    return errors.CPUOnlyPackageError(summary, evidence=evidence, fixes=fixes, package=name, version=version)
