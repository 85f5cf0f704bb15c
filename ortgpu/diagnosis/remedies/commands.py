"""The text of fixes to what is installed, for the environment at hand: its interpreter, its installer, its versions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import replace

from ...environment.inspection import Environment
from ...environment.libraries.catalogue import BY_STEM, CUDNN_CODE, LIBRARIES, TOOLKIT_MAJORS, spec_for, wheel_name
from ...environment.packages.installed import Packages
from ...environment.variables import entries_of
from ...errors import Fix, manual, shell
from . import system as system_remedies
from .releases import Release, cuda_major_of, newest_for


def install(
    environment: Environment,
    requirements: Iterable[str],
    *,
    again: bool = False,
    upgrade: bool = False,
    instead_of: str | None = None,
) -> Fix:
    """One command; ``again`` replaces what the installer believes to be there, in the folder ``instead_of``."""
    wanted = list(requirements)
    if _is_made_anew(environment):
        return _bundle(environment, wanted)
    if instead_of is not None and _comes_first(environment, instead_of):
        return shell(_install_into(environment, instead_of, wanted))
    return _past_the_obstacle(environment, _install(environment, wanted, again=again, upgrade=upgrade))


def _install(environment: Environment, wanted: list[str], *, again: bool = False, upgrade: bool = False) -> str:
    installer = environment.installer
    if installer.manager is not None and not again and not upgrade:
        return f"{installer.manager.add} {' '.join(map(shlex.quote, wanted))}"
    options = " --upgrade" if upgrade else ""
    if again:
        options += " --reinstall --no-deps" if installer.name == "uv" else " --force-reinstall --no-deps"
    return f"{installer.install}{options} {' '.join(map(shlex.quote, wanted))}"


def _install_into(environment: Environment, folder: str, wanted: list[str]) -> str:
    """For a folder that neither pip nor uv takes for its own: they replace there what they are told to put there."""
    again = "--reinstall" if environment.installer.name == "uv" else "--upgrade"
    words = " ".join(map(shlex.quote, wanted))
    return f"{environment.installer.install} --target {shlex.quote(folder)} {again} --no-deps {words}"


def _comes_first(environment: Environment, folder: str) -> bool:
    """Whether what is imported from a folder is neither the installer's to change nor hidden by what it installs."""
    installer = environment.installer
    return not installer.owns(folder) and not installer.hides(folder)


def _past_the_obstacle(environment: Environment, command: str) -> Fix:
    obstacle = environment.installer.obstacle
    return shell(command) if obstacle is None else manual(f"{obstacle}, run {command}", needs="root")


def reinstall_onnxruntime(
    environment: Environment, *, leftover: str | None = None, requirement: str | None = None
) -> Fix:
    """Remove every distribution that owns the import, and what they leave behind, then install one: the GPU build with
    the libraries that it needs, or what ``requirement`` names."""
    wanted = [requirement] if requirement is not None else gpu_requirements(environment)
    if _is_made_anew(environment):
        stays = re.split("[<>=~!]", wanted[0])[0]
        names = dict.fromkeys(owner.name for owner in environment.packages.onnxruntime.owners)
        return _bundle(environment, wanted, without=[name for name in names if name != stays])
    if requirement is None and environment.driver.is_tegra:
        removal, then = " && ".join(_removal(environment)), system_remedies.for_a_jetson()
        return manual(f"run {removal}, then {then}", needs="host") if removal else then
    if requirement is None and not _gpu_versions(environment) and (instead := why_none_fits(environment)) is not None:
        return instead
    installed, installer = environment.packages.onnxruntime, environment.installer
    home = installed.home
    # Without a RECORD behind the installer's own folder: a package of the system (Debian's python3-onnxruntime), whose
    # files are its to remove.
    of_system = home and any(not one.record_readable for one in installed.owners) and installer.hides(home)
    if home and (of_system or not installer.owns(home)):
        if installer.hides(home):
            return install(environment, wanted, again=True)
        return _replace_in(home, environment, wanted)
    steps = _removal(environment)
    if leftover is not None:
        steps.append(f"rm -rf {shlex.quote(leftover)}")
    steps.append(f"{installer.install} {' '.join(map(shlex.quote, wanted))}")
    return _past_the_obstacle(environment, " && ".join(steps))


def _removal(environment: Environment) -> list[str]:
    """Commands that remove everything that owns the import."""
    installed, uninstall = environment.packages.onnxruntime, environment.installer.uninstall
    without_record = [one for one in installed.owners if not one.record_readable]
    if without_record and (files := _recorded_in(installed.home, environment)):
        return [f"rm -rf {files}"]  # "Cannot uninstall ..., no RECORD file was found", and what comes next is not run
    # An installer removes one record of a name at a time, and a killed upgrade leaves two.
    names = [owner.name for owner in installed.owners]
    again = dict.fromkeys(name for name in names if names.count(name) > 1)
    return [f"{uninstall} {' '.join(some)}" for some in (dict.fromkeys(names), again) if some]


def _replace_in(home: str, environment: Environment, wanted: list[str]) -> Fix:
    """In a folder of the search path that is no installer's."""
    if files := _recorded_in(home, environment):
        return shell(f"rm -rf {files} && {_install_into(environment, home, wanted)}")
    off, then = off_the_path(environment, "PYTHONPATH", home), install(environment, wanted, again=True)
    if off is not None and then.executable:
        return shell(f"{off} && {then}")
    return manual(f"{off or f'take {home} off the search path of this program'}, then: {then}", needs=then.needs)


def _recorded_in(home: str, environment: Environment) -> str | None:
    """Shell words for ONNX Runtime's folder and the records of it, where all of it was installed in this folder; else
    None: it may be somebody's sources or build, beside which an egg-info lies, and which nobody deletes."""
    owners = environment.packages.onnxruntime.owners
    records = [one.folder for one in owners if one.location == home and one.folder is not None]
    if not records or len(records) != len(owners) or not all(name.endswith(".dist-info") for name in records):
        return None
    return " ".join(shlex.quote(os.path.join(home, name)) for name in ("onnxruntime", *records))


def published(name: str, version: str | None) -> str:
    """A requirement for this version, as far as a package index has it: no nightly builds, nor anybody's own. What is
    "+cu130" elsewhere is there without that."""
    public, _, local = (version or "").partition("+")
    known = re.fullmatch(r"[0-9.]+((a|b|rc|\.post)[0-9]+)?", public) and re.fullmatch(r"(cu[0-9]+)?", local)
    return f"{name}=={public}" if known else name


def gpu_requirements(environment: Environment) -> list[str]:
    """Return the GPU package to install, and what is not there of the libraries that it needs.

    Its version is the one that is here already, else the newest that the driver can run.
    """
    installed, versions = environment.packages.onnxruntime, _gpu_versions(environment)
    if not versions:
        return newest_requirements(environment)
    version = installed.build_version if installed.build_version in versions else versions[0]
    requirement = published("onnxruntime-gpu", version)
    major = cuda_major_of(version) if "==" in requirement else newest_release(environment).cuda_major
    return [requirement, *_libraries_not_there(environment, major)]


def newest_requirements(environment: Environment) -> list[str]:
    """Return the newest GPU package that the driver can run, and the libraries that are not there."""
    release = newest_release(environment)
    return [release.requirement, *_libraries_not_there(environment, release.cuda_major)]


def _libraries_not_there(environment: Environment, cuda_major: int | None) -> list[str]:
    """Return the wheels with what ONNX Runtime needs for a CUDA major and was not found.

    None are returned for another CUDA than that of the provider file, because nobody has looked for its libraries.
    """
    if environment.provider is not None and environment.cuda_major == cuda_major:
        there: Collection[str] = [each.spec.stem for each in environment.libraries if each.chosen]
    else:
        there = environment.libraries_by_cuda.get(cuda_major or 0, BY_STEM)
    if "libcublas" not in there:  # nor is the cuDNN that is there for this CUDA: its name is the same for another
        there = ()
    wheels = {
        spec.wheels[cuda_major]: None
        for spec in LIBRARIES
        if cuda_major in spec.wheels and spec.part_of is None and spec.stem not in there
    }
    return fitting(environment, wheels)


def _gpu_versions(environment: Environment) -> list[str]:
    owners = environment.packages.onnxruntime.owners
    return [owner.version for owner in owners if owner.name == "onnxruntime-gpu" and owner.version]


def newest_release(environment: Environment) -> Release:
    gpus = [gpu.compute_capability for gpu in environment.driver.nvml.gpus if gpu.compute_capability]
    return newest_for(environment.host, environment.driver.supported_cuda, gpus)


def why_none_fits(environment: Environment) -> Fix | None:
    """What to do where the package index has no wheel of ONNX Runtime for this machine; None: it has."""
    if environment.driver.is_tegra:
        return system_remedies.for_a_jetson()
    release = newest_release(environment)
    supported = environment.driver.supported_cuda
    instead = release.why_not_for(environment.host)
    if instead is None and supported is not None and supported[0] < release.cuda_major:
        instead = (
            f"take the build of this machine's vendor, or a driver for CUDA {release.cuda_major}: "
            f"the wheels for {environment.host.machine} need that"
        )
    return manual(instead, needs="host") if instead is not None else None


def other_release(environment: Environment, release: Release) -> Fix:
    """Install another release of ONNX Runtime with the libraries of its CUDA major."""
    wheels = dict.fromkeys(spec.wheels[release.cuda_major] for spec in LIBRARIES if release.cuda_major in spec.wheels)
    return install(environment, [release.requirement, *fitting(environment, wheels)])


def replace_onnxruntime(fixes: Iterable[Fix]) -> bool:
    """Whether one of them installs another release, and with it the libraries that it needs."""
    return any("onnxruntime-gpu" in str(fix) and "nvidia-" in str(fix) for fix in fixes)


# The first GPUs that cuDNN 9.11 and newer hold code for; 9.10 has it from 5.0 on. Read from both: see wheel.py
_OF_NEWER_CUDNN = (7, 5)


def fitting(environment: Environment, wheels: Iterable[str], capability: tuple[int, int] | None = None) -> list[str]:
    """Requirements of wheels that hold code for the GPUs of this machine, or for one of this compute capability."""
    gpus = [gpu.compute_capability for gpu in environment.driver.nvml.gpus]
    known = [one for one in (*gpus, capability) if one is not None]
    if not known or min(known) >= _OF_NEWER_CUDNN:
        return list(wheels)
    return [f"{wheel},<9.11" if wheel_name(wheel) == "nvidia-cudnn-cu12" else wheel for wheel in wheels]


def another_cudnn(environment: Environment, path: str, capability: tuple[int, int]) -> Fix:
    """A cuDNN with code for GPUs of this compute capability, instead of the one at ``path``."""
    major = environment.cuda_major
    older = capability < _OF_NEWER_CUDNN
    which = "9.10 or older, the last with code for such GPUs" if older else "a newer release"
    wheel = wheel_of(f"{CUDNN_CODE[0]}.so", major)
    places = [one.location for one in environment.packages.nvidia if one.name.startswith("nvidia-cudnn-cu")]
    if wheel is None or not any(_is_below(path, os.path.join(place, "nvidia")) for place in places):
        return manual(f"let {path} be of cuDNN {which}", needs="host")
    return install(environment, fitting(environment, [wheel], capability), upgrade=not older)


def newer_cuda(environment: Environment, sonames: list[str]) -> list[Fix]:
    """For libraries of a CUDA that came after this version of ortgpu: the names of its wheels are not known here."""
    major = environment.cuda_major
    if major is None or major <= TOOLKIT_MAJORS[-1] or not all(map(spec_for, sonames)):
        return []
    fixes: list[Fix] = [manual(f"install CUDA {major}, as NVIDIA's wheels or its toolkit: {', '.join(sonames)}")]
    known, version = newest_release(environment), environment.packages.onnxruntime.version
    if version is not None and known.why_not_for(environment.host) is None:
        fixes.append(other_release(environment, replace(known, requirement=f"{known.requirement},<{version}")))
    return fixes


def install_libraries(environment: Environment, wheels: Iterable[str], with_dead_links: Iterable[str] = ()) -> Fix:
    """Install wheels, again where the installer has them on record and their libraries are still not there.

    Links to nothing are removed first, in the folders ``with_dead_links``: pip leaves them there when it uninstalls,
    and gives up when it writes through one.
    """
    wanted = fitting(environment, wheels)
    if _is_made_anew(environment):
        return _bundle(environment, wanted)
    present = {wheel.name: wheel.version for wheel in environment.packages.nvidia}
    damaged = [name for name in map(wheel_name, wanted) if name in present]
    folders = " ".join(map(shlex.quote, with_dead_links))
    # Not -xtype l, which fails on a link to itself.
    first = [f"find {folders} -type l ! -exec test -e {{}} ';' -delete"] if folders else []
    if not damaged:
        return _past_the_obstacle(environment, " && ".join([*first, _install(environment, wanted)]))
    pinned = [f"{name}=={present[name]}" if present[name] else name for name in damaged]
    new = [wheel for wheel in wanted if wheel_name(wheel) not in present]
    steps = [*first, _install(environment, pinned, again=True)] + ([_install(environment, new)] if new else [])
    return _past_the_obstacle(environment, " && ".join(steps))


def _is_made_anew(environment: Environment) -> bool:
    return environment.host.frozen or environment.installer.for_one_run


def _bundle(environment: Environment, requirements: list[str], without: Iterable[str] = ()) -> Fix:
    """A frozen program has no installer: its interpreter is the program itself, or a pex that holds its packages."""
    out = "".join(f", leave out {name}," for name in without)
    if not environment.host.frozen:
        options = " ".join(f"--with {shlex.quote(requirement)}" for requirement in requirements)
        return manual(f"this environment is made for one run of a program: add {options} to uv run{out.rstrip(',')}")
    return manual(
        f"this program is frozen: add {' '.join(requirements)} to what it is built from{out} and build it again "
        "(PyInstaller: --collect-all onnxruntime --collect-all nvidia; pex: among its requirements)"
    )


def unset(environment: Environment, names: Iterable[str]) -> Fix:
    """Take variables away: in the shell, or from the program where it set them after its start."""
    wanted, variables = list(names), environment.variables
    if variables.at_start is not None:
        own = [name for name in wanted if variables.at_start.get(name) != variables.now.get(name)]
        if own:
            return manual(f"this program, or a library in it, sets {' and '.join(own)} itself: take that out of it")
    return shell(f"unset {' '.join(wanted)}")


def off_the_path(environment: Environment, variable: str, folder: str) -> Fix | None:
    """Take a folder out of a variable that holds a search path, or a file out of LD_PRELOAD; None where it is not in
    there."""
    entries = entries_of(variable, environment.variables.now.get(variable, ""))
    kept = [entry for entry in entries if entry and os.path.normpath(entry) != os.path.normpath(folder)]
    if len(kept) == len(list(filter(None, entries))):
        return None
    return shell(f"export {variable}={shlex.quote(os.pathsep.join(kept))}" if kept else f"unset {variable}")


def in_the_way(packages: Packages, name: str) -> str | None:
    """The file that is imported as numpy or onnx, where that is another than the installed one."""
    file = {"numpy": packages.numpy_file, "onnx": packages.onnx_file}.get(name)
    installed = packages.other(name)
    return None if file is None or installed is None or _is_below(file, installed.location) else file


def _is_below(path: str, folder: str) -> bool:
    """By name or in truth: an installer may have made the package of links to a store of its own."""
    return any(way(path).startswith(way(folder) + os.sep) for way in (os.path.abspath, os.path.realpath))


def out_of_the_way(environment: Environment, file: str) -> Fix:
    package = os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else None
    if package is not None and of_another_python(environment, home := os.path.dirname(package)):
        return leave_to_its_python(environment, home)
    return manual(f"rename {package or file}, or take its folder off the search path of this program")


def of_another_python(environment: Environment, folder: str) -> bool:
    """Whether a folder of the search path holds the packages of another interpreter, as PYTHONPATH brings it where a
    module system or ROS sets it. What is compiled there is not for this one, and is not this program's to replace."""
    if not _comes_first(environment, folder):
        return False
    # python3/dist-packages is that of Debian's own
    of = re.search(r"python(\d+)(?:\.(\d+)t?)?/(?:site|dist)-packages/?$", folder)
    return of is not None and (of[2] is None or (int(of[1]), int(of[2])) != environment.host.python[:2])


def leave_to_its_python(environment: Environment, folder: str, instead: Iterable[str] = ()) -> Fix:
    """Take another interpreter's folder off the search path, and install ``instead`` of what was found there."""
    wanted = list(instead)
    off = off_the_path(environment, "PYTHONPATH", folder)
    then = install(environment, wanted) if wanted else None
    if off is not None and (then is None or then.executable):
        return shell(f"{off} && {then}" if then is not None else str(off))
    first = off or f"take {folder} off the search path of this program"
    return manual(f"{first}, then: {then}" if then is not None else str(first))


def wheel_of(soname: str, cuda_major: int | None) -> str | None:
    spec = spec_for(soname)
    return spec.wheels.get(cuda_major) if spec is not None and cuda_major is not None else None
