"""The text of fixes, written for the environment at hand: its interpreter, its installer, its versions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from ..environment.catalogue import LIBRARIES, spec_for, wheel_name
from ..environment.inspection import Environment
from ..errors import Fix, manual, shell
from .releases import FOR_CUDA_12, FOR_CUDA_13, Release, newest_for

# Lowest driver per CUDA major: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
LOWEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}

GPU_PACKAGE = {release.cuda_major: release.requirement for release in (FOR_CUDA_12, FOR_CUDA_13)}


def install(
    environment: Environment, requirements: Iterable[str], *, again: bool = False, upgrade: bool = False
) -> Fix:
    """One command; ``again`` replaces what the installer believes to be there."""
    wanted = list(requirements)
    if environment.host.frozen:
        return _bundle(wanted)
    words = " ".join(map(shlex.quote, wanted))
    options = " --upgrade" if upgrade else ""
    if again:
        options += " --reinstall --no-deps" if environment.installer.name == "uv" else " --force-reinstall --no-deps"
    return shell(f"{environment.installer.install}{options} {words}")


def reinstall_onnxruntime(
    environment: Environment, *, leftover: str | None = None, requirement: str | None = None
) -> Fix:
    """Remove every distribution that owns the import, and what they leave behind, then install one: the GPU build, or
    what ``requirement`` names."""
    wanted = requirement or gpu_requirement(environment)
    if environment.host.frozen:
        return _bundle([wanted])
    # An installer removes one record of a name at a time, and a killed upgrade leaves two.
    names = [owner.name for owner in environment.packages.onnxruntime.owners]
    again = dict.fromkeys(name for name in names if names.count(name) > 1)
    steps = [f"{environment.installer.uninstall} {' '.join(some)}" for some in (dict.fromkeys(names), again) if some]
    if leftover is not None:
        steps.append(f"rm -rf {shlex.quote(leftover)}")
    steps.append(f"{environment.installer.install} {shlex.quote(wanted)}")
    return shell(" && ".join(steps))


def published(name: str, version: str | None) -> str:
    """A requirement for this version, as far as a package index has it: no local versions, and no nightly builds."""
    public = (version or "").partition("+")[0]
    return f"{name}=={public}" if re.fullmatch(r"[0-9.]+((a|b|rc|\.post)[0-9]+)?", public) else name


def gpu_requirement(environment: Environment) -> str:
    """The GPU package to install: the version that is here already, else the newest that the driver can run."""
    installed = environment.packages.onnxruntime
    versions = [owner.version for owner in installed.owners if owner.name == "onnxruntime-gpu" and owner.version]
    if versions:
        version = installed.build_version if installed.build_version in versions else versions[0]
        return published("onnxruntime-gpu", version)
    return newest_release(environment).requirement


def newest_release(environment: Environment) -> Release:
    return newest_for(environment.host, environment.driver.cuda_version or environment.driver.nvml.cuda_version)


def why_none_fits(environment: Environment) -> Fix | None:
    """What to do where the package index has no wheel of ONNX Runtime for this machine; None: it has."""
    release = newest_release(environment)
    driver = environment.driver.cuda_version or environment.driver.nvml.cuda_version
    instead = release.why_not_for(environment.host)
    if instead is None and driver is not None and driver[0] < release.cuda_major:
        instead = (
            f"take the build of this machine's vendor, or a driver for CUDA {release.cuda_major}: "
            f"the wheels for {environment.host.machine} need that"
        )
    return manual(instead, needs="host") if instead is not None else None


def other_release(environment: Environment, release: Release) -> Fix:
    """Install another release of ONNX Runtime with the libraries of its CUDA major."""
    wheels = dict.fromkeys(spec.wheels[release.cuda_major] for spec in LIBRARIES if release.cuda_major in spec.wheels)
    return install(environment, [release.requirement, *wheels])


def install_libraries(environment: Environment, wheels: Iterable[str], dead_links: Iterable[str] = ()) -> Fix:
    """Install wheels, again where the installer has them on record and their libraries are still not there.

    ``dead_links`` are removed first: pip gives up on an installation that has one.
    """
    wanted = list(wheels)
    if environment.host.frozen:
        return _bundle(wanted)
    present = {wheel.name: wheel.version for wheel in environment.packages.nvidia}
    damaged = [name for name in map(wheel_name, wanted) if name in present]
    first = [f"rm -f {' '.join(map(shlex.quote, links))}"] if (links := list(dead_links)) else []
    if not damaged:
        return shell(" && ".join([*first, install(environment, wanted)]))
    pinned = [f"{name}=={present[name]}" if present[name] else name for name in damaged]
    new = [wheel for wheel in wanted if wheel_name(wheel) not in present]
    commands = [*first, install(environment, pinned, again=True)] + ([install(environment, new)] if new else [])
    return shell(" && ".join(commands))


def cannot_be_mapped(words: str) -> bool:
    """Whether glibc's loader, whose words they are, refuses a file that may be whole."""
    return re.search(r"failed to map segment|annot allocate memory", words) is not None


def let_it_be_mapped(environment: Environment, folder: str) -> Fix:
    """For files that are whole and that this process may not map: installing them again mends nothing."""
    limit = environment.host.address_space
    if limit is not None:
        return manual(
            f"raise the limit on the address space of this process (ulimit -v, RLIMIT_AS): it is {limit >> 20} MiB, "
            "and CUDA maps many times that",
            needs="host",
        )
    return manual(f"give this process more memory, or mount the file system of {folder} without noexec", needs="host")


def let_it_be_read(environment: Environment, paths: Iterable[str]) -> Fix:
    """For what is whole, and refused to this user."""
    wanted = list(dict.fromkeys(paths))
    own = {each.path for each in environment.packages.refused if each.own}
    words = " ".join(map(shlex.quote, wanted))
    return (
        shell(f"chmod -R u+rX {words}")
        if own.issuperset(wanted)
        else shell(f"sudo chmod -R a+rX {words}", needs="root")
    )


def _bundle(requirements: list[str]) -> Fix:
    """A frozen program has no installer, and its interpreter is the program itself."""
    return manual(
        f"this program is frozen: add {' '.join(requirements)} to what it is built from and build it again "
        "(PyInstaller: --collect-all onnxruntime --collect-all nvidia)"
    )


def off_the_path(environment: Environment, variable: str, folder: str) -> Fix | None:
    """Take a folder out of a variable that holds a search path; None where it is not in there."""
    entries = environment.variables.now.get(variable, "").split(os.pathsep)
    kept = [entry for entry in entries if entry and os.path.normpath(entry) != os.path.normpath(folder)]
    if len(kept) == len(list(filter(None, entries))):
        return None
    return shell(f"export {variable}={shlex.quote(os.pathsep.join(kept))}" if kept else f"unset {variable}")


def update_driver(cuda_major: int) -> Fix:
    version = LOWEST_DRIVER.get(cuda_major)
    return manual(
        f"install an NVIDIA driver for CUDA {cuda_major}" + (f": {version} or newer" if version else ""), needs="driver"
    )


def wheel_of(soname: str, cuda_major: int | None) -> str | None:
    spec = spec_for(soname)
    return spec.wheels.get(cuda_major) if spec is not None and cuda_major is not None else None
