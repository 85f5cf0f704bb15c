"""Write fixes for this environment: for its packages, and for the driver, limits and permissions of the system."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

from ...environment.inspection import Environment
from ...environment.libraries import catalogue, loader_words, places
from ...environment.libraries.catalogue import spec_for, wheel_name
from ...environment.packages.installed import Distribution, Packages
from ...environment.packages.installer import quote_program, quoted
from ...environment.packages.metadata import numbers_of
from ...environment.variables import entries_of
from ...errors import Fix, manual, shell
from ..messages.cuda_codes import RESTART_WINDOWS
from .releases import Release, cuda_major_of, newest_for


def chain_steps(environment: Environment, *steps: str) -> Fix:
    """Return one fix: a command if all steps are commands, else a sentence. Windows PowerShell has no &&, but lines."""
    fixes = [step if isinstance(step, Fix) else shell(step) for step in steps]
    if len(fixes) == 1:
        return fixes[0]
    if all(fix.kind == "shell" for fix in fixes):
        return shell(("\n" if environment.host.is_windows else " && ").join(fixes), needs=fixes[0].needs)
    words = (f"run {fix}".replace("\n", ", then ") if fix.kind == "shell" else fix for fix in fixes)
    return manual(", then ".join(words), needs=next((fix.needs for fix in fixes if fix.needs), None))


def words_of(environment: Environment, words: Iterable[str]) -> str:
    return " ".join(map(partial(quoted, windows=environment.host.is_windows), words))


def install(
    environment: Environment,
    requirements: Iterable[str],
    *,
    again: bool = False,
    upgrade: bool = False,
    instead_of: Distribution | None = None,
) -> Fix:
    """Return the fix that installs requirements. ``again`` replaces packages that the installer takes for installed.

    ``instead_of`` is replaced in its own folder if Python would find it before the new installation.
    """
    specs = list(requirements)
    if _is_rebuilt(environment):
        return _bundle(environment, specs)
    if instead_of is not None and comes_first(environment, instead_of.location):
        if instead_of.name.startswith("nvidia-"):  # pip --target would remove the wheels' common folder.
            return drop_from_search_path(environment, instead_of.location, install(environment, specs, again=again))
        return shell(_install_into(environment, instead_of.location, specs))
    return _skip_obstacle(environment, _install(environment, specs, again=again, upgrade=upgrade))


def install_again(environment: Environment, *installed: Distribution) -> Fix:
    first = next((distribution for distribution in installed if comes_first(environment, distribution.location)), None)
    specs = [published(distribution.name, distribution.version) for distribution in installed]
    return install(environment, specs, again=True, instead_of=first)


def _install(environment: Environment, wanted: list[str], *, again: bool = False, upgrade: bool = False) -> str:
    installer = environment.installer
    if installer.manager is not None and not again and not upgrade:
        return f"{installer.manager.add} {words_of(environment, wanted)}"
    options = (" --upgrade" if upgrade else "") + (" --force-reinstall --no-deps" if again else "")
    return f"{installer.install}{options} {words_of(environment, wanted)}"


def _install_into(environment: Environment, folder: str, wanted: list[str]) -> str:
    """Return the command for a folder outside the installer: pip and uv replace only their own files there."""
    options = f"--target {words_of(environment, [folder])} --upgrade --force-reinstall --no-deps"
    return f"{environment.installer.install} {options} {words_of(environment, wanted)}"


def comes_first(environment: Environment, folder: str) -> bool:
    """Return True if the installer does not own a folder, and its new packages do not hide the folder."""
    installer = environment.installer
    return not installer.owns(folder) and not installer.hides(folder)


def _skip_obstacle(environment: Environment, *commands: str) -> Fix:
    obstacle, fix = environment.installer.obstacle, chain_steps(environment, *commands)
    return fix if obstacle is None else manual(f"{obstacle}, run {fix}".replace("\n", ", then "), needs="root")


def reinstall_onnxruntime(
    environment: Environment, *, leftover: str | None = None, requirement: str | None = None
) -> Fix:
    """Remove every owner of the import, then install the GPU build with its libraries, or ``requirement``."""
    installed, installer = environment.packages.onnxruntime, environment.installer
    home, owners = installed.home, installed.owners
    specs = [requirement] if requirement is not None else gpu_requirements(environment)
    if _is_rebuilt(environment):
        stays = re.split("[<>=~!]", specs[0])[0]
        return _bundle(environment, specs, dict.fromkeys(owner.name for owner in owners if owner.name != stays))
    if requirement is None and environment.driver.is_tegra:
        return chain_steps(environment, *_removal(environment), JETSON_BUILD)
    if requirement is None and not _gpu_versions(environment) and (instead := why_none_fits(environment)) is not None:
        return instead
    # A system package, such as Debian's python3-onnxruntime, has no RECORD, and comes after the installer's folder.
    hidden = installer.hides(home) if home else False
    if home and (not installer.owns(home) or (hidden and any(not owner.record_readable for owner in owners))):
        if hidden:
            return install(environment, specs, again=True)
        if files := _recorded_in(home, environment):
            return chain_steps(environment, _delete(environment, files), _install_into(environment, home, specs))
        return drop_from_search_path(environment, home, install(environment, specs, again=True))
    steps = _removal(environment)
    if leftover is not None:
        steps.append(_delete(environment, [leftover]))
    steps.append(f"{installer.install} {words_of(environment, specs)}")
    return _skip_obstacle(environment, *steps)


def _removal(environment: Environment) -> list[str]:
    installed, uninstall = environment.packages.onnxruntime, environment.installer.uninstall
    owners = installed.owners
    readable = all(owner.record_readable for owner in owners)
    if not readable and (files := _recorded_in(installed.home, environment)):
        return [_delete(environment, files)]  # pip refuses to uninstall without a RECORD.
    # An installer removes one record of a name at a time; a killed upgrade leaves two.
    counts = Counter(owner.name for owner in owners)
    again = [name for name, count in counts.items() if count > 1]
    return [f"{uninstall} {' '.join(names)}" for names in (counts, again) if names]


def drop_from_search_path(environment: Environment, folder: str, *then: Fix) -> Fix:
    off = drop_from_variable(environment, "PYTHONPATH", folder)
    return chain_steps(environment, off or manual(f"take {folder} off the search path of this program"), *then)


def _delete(environment: Environment, paths: Iterable[str]) -> str:
    """Return a command that deletes paths; on Windows it uses Python, because cmd.exe and PowerShell differ."""
    if not environment.host.is_windows:
        return f"rm -rf {words_of(environment, paths)}"
    python, words = quote_program(environment.host.executable, windows=True), words_of(environment, paths)
    return f'{python} -c "import shutil, sys; [shutil.rmtree(path, True) for path in sys.argv[1:]]" {words}'


def _recorded_in(home: str, environment: Environment) -> list[str] | None:
    """Return ONNX Runtime's folder and its records; None for a folder that may hold somebody's sources or build."""
    owners = environment.packages.onnxruntime.owners
    records = [owner.folder for owner in owners if owner.location == home and owner.folder is not None]
    if not records or len(records) != len(owners) or not all(name.endswith(".dist-info") for name in records):
        return None
    return [os.path.join(home, name) for name in ("onnxruntime", *records)]


def published(name: str, version: str | None) -> str:
    """Return a requirement for this version if a package index has it: no nightly and no private builds."""
    public, _, local = (version or "").partition("+")
    is_published = re.fullmatch(r"[0-9.]+((a|b|rc|\.post)[0-9]+)?", public) and re.fullmatch(r"(cu[0-9]+)?", local)
    return f"{name}=={public}" if is_published else name


def gpu_requirements(environment: Environment) -> list[str]:
    """Return the GPU package, of the installed or else the newest version that fits, and its missing libraries."""
    installed, versions = environment.packages.onnxruntime, _gpu_versions(environment)
    if not versions:
        return newest_requirements(environment)
    version = installed.build_version if installed.build_version in versions else versions[0]
    requirement = published("onnxruntime-gpu", version)
    major = cuda_major_of(version) if "==" in requirement else newest_release(environment).cuda_major
    return [requirement, *_libraries_not_there(environment, major)]


def newest_requirements(environment: Environment) -> list[str]:
    release = newest_release(environment)
    return [release.requirement, *_libraries_not_there(environment, release.cuda_major)]


def _libraries_not_there(environment: Environment, cuda_major: int | None) -> list[str]:
    """Return the wheels with the missing libraries of a CUDA major; none for a major that was not searched for."""
    if environment.provider is not None and environment.cuda_major == cuda_major:
        there: Collection[str] = [resolution.spec.stem for resolution in environment.libraries if resolution.chosen]
    else:
        there = environment.libraries_by_cuda.get(cuda_major or 0, catalogue.BY_STEM)
    if "libcublas" not in there:  # Then cuDNN is for another CUDA: its name is the same for all.
        there = ()
    return fitting(environment, _wheels(environment, cuda_major, there))


def _wheels(environment: Environment, cuda_major: int | None, there: Collection[str] = ()) -> list[str]:
    """Return the wheels of a CUDA major for ONNX Runtime on this system. ``there``: stems of present libraries."""
    names, wheels = (places.WINDOWS if environment.host.is_windows else places.LINUX).names, dict[str, None]()
    for spec in catalogue.LIBRARIES:
        if spec.part_of is None and spec.stem not in there and cuda_major is not None and cuda_major in names(spec):
            wheels[spec.wheels[cuda_major]] = None
    return list(wheels)


def _gpu_versions(environment: Environment) -> list[str]:
    owners = environment.packages.onnxruntime.owners
    return [owner.version for owner in owners if owner.name == "onnxruntime-gpu" and owner.version]


def newest_release(environment: Environment) -> Release:
    gpus = [gpu.compute_capability for gpu in environment.driver.nvml.gpus if gpu.compute_capability]
    return newest_for(environment.host, environment.driver.supported_cuda, gpus)


def why_none_fits(environment: Environment) -> Fix | None:
    """Return the fix if the package index has no wheel of ONNX Runtime for this machine; None if it has one."""
    if environment.driver.is_tegra:
        return JETSON_BUILD
    release, supported = newest_release(environment), environment.driver.supported_cuda
    instead = release.why_not_for(environment.host)
    if instead is None and supported is not None and supported[0] < release.cuda_major:
        need = f"the wheels for {environment.host.machine} need that"
        instead = f"take the build of this machine's vendor, or a driver for CUDA {release.cuda_major}: {need}"
    return manual(instead, needs="host") if instead is not None else None


def other_release(environment: Environment, release: Release) -> Fix:
    wheels = fitting(environment, _wheels(environment, release.cuda_major))
    return install(environment, [release.requirement, *wheels])


# cuDNN 9.11 and newer have code from this compute capability on, 9.10 from 5.0 on. Both files were read: see wheel.py.
_OF_NEWER_CUDNN = (7, 5)


def fitting(environment: Environment, wheels: Iterable[str], capability: tuple[int, int] | None = None) -> list[str]:
    """Return requirements of wheels with code for the GPUs of this machine, or for one compute capability."""
    gpus = [gpu.compute_capability for gpu in environment.driver.nvml.gpus]
    if min(filter(None, (*gpus, capability)), default=_OF_NEWER_CUDNN) >= _OF_NEWER_CUDNN:
        return list(wheels)
    return [f"{wheel},<9.11" if wheel_name(wheel) == "nvidia-cudnn-cu12" else wheel for wheel in wheels]


def another_cudnn(environment: Environment, path: str, capability: tuple[int, int]) -> Fix:
    major = environment.cuda_major
    older = capability < _OF_NEWER_CUDNN
    which = "9.10 or older, the last with code for such GPUs" if older else "a newer release"
    wheel = wheel_of(f"{catalogue.CUDNN_CODE[0]}.so", major)
    homes = [package.location for package in environment.packages.nvidia if package.name.startswith("nvidia-cudnn-cu")]
    if wheel is None or not any(_is_below(path, os.path.join(home, "nvidia")) for home in homes):
        return manual(f"make {path} a file of cuDNN {which}", needs="host")
    return install(environment, fitting(environment, [wheel], capability), upgrade=not older)


def newer_cuda(environment: Environment, sonames: list[str]) -> list[Fix]:
    """Return fixes for libraries of a CUDA newer than ortgpu: it does not know the wheels of that CUDA."""
    major = environment.cuda_major
    if major is None or major <= catalogue.TOOLKIT_MAJORS[-1] or not all(map(spec_for, sonames)):
        return []
    fixes: list[Fix] = [manual(f"install CUDA {major}, as NVIDIA's wheels or its toolkit: {', '.join(sonames)}")]
    release, version = newest_release(environment), environment.packages.onnxruntime.version
    if version is not None and release.why_not_for(environment.host) is None:
        fixes.append(other_release(environment, replace(release, requirement=f"{release.requirement},<{version}")))
    return fixes


def install_libraries(environment: Environment, wheels: Iterable[str], with_dead_links: Iterable[str] = ()) -> Fix:
    """Install wheels; reinstall a wheel on record if its libraries are missing.

    Dead links in the folders ``with_dead_links`` are removed first: pip does not uninstall them, and fails to write
    through a dead link.
    """
    specs = fitting(environment, wheels)
    if _is_rebuilt(environment):
        return _bundle(environment, specs)
    majors = {wheel_name(wheel): numbers_of(wheel.partition("~=")[2])[:1] for wheel in specs}
    present = {
        wheel.name: wheel.version
        for wheel in environment.packages.nvidia
        if numbers_of(wheel.version or "")[:1] in ((), majors.get(wheel.name))
    }
    folders = words_of(environment, with_dead_links)
    # -xtype l would fail on a link to itself.
    steps = [f"find {folders} -type l ! -exec test -e {{}} ';' -delete"] if folders else []
    damaged = [published(name, present[name]) for name in majors if name in present]
    new = [wheel for wheel in specs if wheel_name(wheel) not in present]
    steps += [_install(environment, damaged, again=True)] if damaged else []
    steps += [_install(environment, new)] if new else []
    return _skip_obstacle(environment, *steps)


def _is_rebuilt(environment: Environment) -> bool:
    return environment.host.frozen or environment.installer.for_one_run


def _bundle(environment: Environment, requirements: list[str], without: Iterable[str] = ()) -> Fix:
    out = "".join(f", leave out {name}" for name in without)
    if not environment.host.frozen:
        options = " ".join(f"--with {words_of(environment, [requirement])}" for requirement in requirements)
        return manual(f"this environment is made for one run of a program: add {options} to uv run{out}")
    build = "and build it again (PyInstaller: --collect-all onnxruntime --collect-all nvidia; pex: its requirements)"
    return manual(f"this program is frozen: add {' '.join(requirements)} to what it is built from{out}, {build}")


def unset(environment: Environment, names: Iterable[str]) -> Fix:
    targets, variables = list(names), environment.variables
    start = variables.now if variables.at_start is None else variables.at_start
    if changed := [name for name in targets if start.get(name) != variables.now.get(name)]:
        return manual(f"this program, or a library in it, sets {' and '.join(changed)} itself: remove that")
    if not environment.host.is_windows:
        return shell(f"unset {' '.join(targets)}")
    ways = " and ".join(f"set {name}= in cmd.exe, Remove-Item Env:{name} in PowerShell" for name in targets)
    return manual(
        f"remove {' and '.join(targets)} from the variables of this program: {ways}, or in the settings of Windows; if "
        f"the program sets {'it' if len(targets) == 1 else 'them'} itself, remove that"
    )


def drop_from_variable(environment: Environment, variable: str, folder: str) -> Fix | None:
    """Remove a folder from a search path, or a file from LD_PRELOAD; None if it is not in the variable."""
    entries = entries_of(variable, environment.variables.now.get(variable, ""))
    remaining = [entry for entry in entries if entry and os.path.normpath(entry) != os.path.normpath(folder)]
    if len(remaining) == len(list(filter(None, entries))):
        return None
    if environment.host.is_windows:
        return manual(f"take {folder} out of {variable}")
    return shell(f"export {variable}={shlex.quote(os.pathsep.join(remaining))}" if remaining else f"unset {variable}")


def shadowing_file(packages: Packages, name: str) -> str | None:
    """Return the file that Python imports as numpy, if it is not the installed file."""
    file = packages.numpy_file if name == "numpy" else None
    installed = packages.other(name)
    return None if file is None or installed is None or _is_below(file, installed.location) else file


def _is_below(path: str, folder: str) -> bool:
    """Compare by name and by real path: an installer may link packages to a store of its own."""
    return any(way(path).startswith(way(folder) + os.sep) for way in (os.path.abspath, os.path.realpath))


def fix_shadowing(environment: Environment, file: str) -> Fix:
    package = os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else None
    if package is not None and belongs_to_other_python(environment, home := os.path.dirname(package)):
        return drop_from_search_path(environment, home)
    return manual(f"rename {package or file}, or take its folder off the search path of this program")


def belongs_to_other_python(environment: Environment, folder: str) -> bool:
    """Return True if a folder of PYTHONPATH, as of ROS, has packages that are compiled for another interpreter."""
    if not comes_first(environment, folder):
        return False
    # Debian's own interpreter uses python3/dist-packages.
    of = re.search(r"python(\d+)(?:\.(\d+)t?)?/(?:site|dist)-packages/?$", folder)
    return of is not None and (of[2] is None or (int(of[1]), int(of[2])) != environment.host.python[:2])


def wheel_of(soname: str, cuda_major: int | None) -> str | None:
    spec = spec_for(soname)
    return spec.wheels.get(cuda_major) if spec is not None and cuda_major is not None else None


def why_not_held(environment: Environment) -> str | None:
    """Return why `ortgpu hold` cannot hold the GPU build of this environment, or need not; None if it can."""
    installed = environment.packages.onnxruntime
    homes = {owner.name: owner.location for owner in installed.owners}
    gpu = homes.get("onnxruntime-gpu")
    by_name = not gpu and "onnxruntime" in homes and installed.provider_library is not None
    reasons = {
        "this program is frozen: nothing is installed into it": environment.host.frozen,
        "this environment is gone when its program has ended": environment.installer.for_one_run,
        "CUDA comes as a plugin of the package onnxruntime, which is what libraries ask for": installed.cuda_is_plugin,
        "the installed build with CUDA is itself named onnxruntime, which is what libraries ask for": by_name,
        "onnxruntime-gpu is not installed in this environment": not gpu,
    }
    return next((why for why, holds in reasons.items() if holds), None) or why_not_held_in(environment, gpu or "")


def why_not_held_in(environment: Environment, location: str) -> str | None:
    installer = environment.installer
    if (manager := installer.manager) is not None:
        return f"{manager.name} keeps this environment as {manager.lock} says, and would remove what is not in it"
    elsewhere = f"onnxruntime-gpu is in {location}, where {installer.name} of this environment does not look"
    return None if installer.owns(location) else elsewhere


# The fixes below are for the system outside the Python environment.

# The lowest driver of a CUDA major: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility"; for
# Windows, the release notes of CUDA 11.8 and 12.9. Those of CUDA 13 name none: R580 is its first branch there.
LOWEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
LOWEST_DRIVER_OF_WINDOWS = {11: "452.39", 12: "528.33", 13: "580"}

WSL_DRIVER = "/usr/lib/wsl/lib"


def prepend_library_path(folder: str) -> Fix:
    """Put a folder first on LD_LIBRARY_PATH, without an empty entry: that means the working directory (ld.so(8))."""
    rest = '"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'
    return shell(f"export LD_LIBRARY_PATH={shlex.quote(folder)}{rest}", needs="host")


def restart_driver(environment: Environment, fixes: Iterable[Fix]) -> list[Fix]:
    """Return ``fixes`` for a driver that has to restart; WSL has no kernel module of NVIDIA, and nothing to reboot."""
    if environment.host.is_windows:
        return [RESTART_WINDOWS]
    if not environment.host.wsl:
        return move_to_host(environment, fixes)
    restart = "restart WSL (wsl --shutdown, in Windows); if that does not help, update the NVIDIA driver of Windows"
    return [*(fix for fix in fixes if fix.needs is None), manual(restart, needs="host")]


def move_to_host(environment: Environment, fixes: Iterable[Fix]) -> list[Fix]:
    """Return ``fixes`` for the driver; a container has neither its kernel modules nor the right to change them."""
    if environment.host.container is None:
        return list(fixes)
    ways = ("root", "reboot", "driver")
    return [manual(f"on the container's host: {fix}", needs="host") if fix.needs in ways else fix for fix in fixes]


def lowest_driver(environment: Environment, cuda_major: int) -> str | None:
    return (LOWEST_DRIVER_OF_WINDOWS if environment.host.is_windows else LOWEST_DRIVER).get(cuda_major)


def is_enough(environment: Environment, cuda_major: int) -> bool:
    version, lowest = environment.driver.version, lowest_driver(environment, cuda_major)
    return version is not None and lowest is not None and numbers_of(version) >= numbers_of(lowest)


def update_driver(environment: Environment) -> Fix:
    host, cuda_major = environment.host, environment.cuda_major or 13
    version = lowest_driver(environment, cuda_major)
    what = f"install an NVIDIA driver for CUDA {cuda_major}"
    if host.wsl:
        what += " in Windows, and none inside WSL"
    elif environment.driver.is_tegra:
        what = f"install a JetPack with CUDA {cuda_major}, or NVIDIA's ONNX Runtime for the installed JetPack"
    elif version:
        first = "make sure the host has" if host.container else "install"
        what = f"{first} NVIDIA driver {version} or newer (needed for CUDA {cuda_major})"
    return manual(what, needs="driver")


def administrator_command(environment: Environment, command: str) -> Fix:
    if environment.host.is_windows:
        return manual(f"in a terminal of an administrator: {command}", needs="root")
    return move_to_host(environment, [shell(f"sudo {command}", needs="root")])[0]


# The driver left the GPU out: NVIDIA/open-gpu-kernel-modules issues 862 and 872.
SERVE_THE_GPU = (
    shell("sudo dmesg | grep -i nvrm", needs="root"),
    manual(
        "install the right driver: open modules from the RTX 50 series on; 580 or older before the RTX 20",
        needs="driver",
    ),
)

# The GPUs of Jetsons have compute capability 7.2, 8.7 and 11.0.
JETSON_BUILD = manual(
    "install NVIDIA's build of ONNX Runtime for this Jetson's JetPack: the index has none for its GPU", needs="host"
)


def raise_thread_limit(environment: Environment) -> Fix:
    fewer = "have fewer threads: OPENBLAS_NUM_THREADS=1, and intra_op_num_threads of SessionOptions"
    if environment.host.is_windows:
        return manual(fewer)
    limit = "raise the limit on threads and processes (ulimit -u, docker run --pids-limit, that of its pod)"
    return manual(f"{limit}, lower that on stacks (ulimit -s 8192), or {fewer}", needs="host")


def fix_load_refusal(environment: Environment, words: str, path: str) -> Fix | None:
    """Return the fix for an intact file that the loader refuses with these words; None if it may be another fault."""
    if loader_words.cannot_be_mapped(words):
        return fix_mapping_refusal(environment, os.path.dirname(path))
    if loader_words.is_blocked(words):
        return unblock(environment, path)
    if loader_words.has_long_path(words):
        shorter = "move Python and its packages to a folder with a shorter path"
        return manual(f"{shorter}: Windows loads no path of 260 characters")
    if (late := loader_words.lacks_thread_storage(words)) is not None:
        already = environment.variables.now.get("LD_PRELOAD", "")
        return shell(f"export LD_PRELOAD={shlex.quote(os.pathsep.join(filter(None, [late, already])))}")
    return None


# Packages of Debian and Ubuntu that slim images leave out.
_SYSTEM_PACKAGES = {"libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1", "libgomp.so.1": "libgomp1"}
_OF_VISUAL_C = re.compile(r"(msvcp|vcruntime|concrt|vcomp|vccorlib)\d", re.IGNORECASE)

# Microsoft's link leads to the newest release.
UPDATE_VISUAL_C = manual(
    "install the newest Visual C++ Redistributable (https://aka.ms/vs/17/release/vc_redist.x64.exe)", needs="root"
)


def system_package(sonames: Iterable[str]) -> Fix:
    libraries = list(dict.fromkeys(sonames))
    if all(map(_OF_VISUAL_C.match, libraries)):
        return UPDATE_VISUAL_C
    packages = [_SYSTEM_PACKAGES[soname] for soname in libraries if soname in _SYSTEM_PACKAGES]
    hint = f" (Debian and Ubuntu: {' '.join(packages)})" if packages else ""
    return manual(f"install the system package that has {' and '.join(libraries)}{hint}", needs="root")


def limit_on_memory(environment: Environment) -> str | None:
    space, data = environment.host.address_space, environment.host.data
    if space is not None and (data is None or space <= data):
        what, size, why = "address space of this process (ulimit -v, RLIMIT_AS)", space, "CUDA maps many times that"
    elif data is not None:
        what, size = "private memory of this process (ulimit -d, RLIMIT_DATA)", data
        why = "the CUDA libraries take more"
    else:
        return None
    return f"the limit on the {what}: it is {size >> 20} MiB, and {why}"


def fix_mapping_refusal(environment: Environment, folder: str) -> Fix:
    limit = limit_on_memory(environment)
    fix = f"give this process more memory, mount the file system of {folder} without noexec, or let SELinux allow it"
    if environment.host.is_windows:
        fix = "let Windows manage the size of its paging file, or make it larger, or end programs"
    elif limit is not None:
        fix = f"raise {limit}"
    return manual(fix, needs="host")


def unblock(environment: Environment, path: str) -> Fix:
    guards, how = "Smart App Control, AppLocker or a virus scanner", ""
    if not environment.host.is_windows:
        folder = words_of(environment, [os.path.dirname(path) + os.sep])
        guards = "fapolicyd or a virus scanner"
        how = f". For fapolicyd: sudo fapolicyd-cli --file add {folder} && sudo fapolicyd-cli --update"
    allow = f"allow it in this system's protection, such as {guards}"
    return manual(f"{allow}: installing it again changes nothing{how}", needs="root")


def fix_read_permission(environment: Environment, paths: Iterable[str]) -> Fix:
    unique_paths = list(dict.fromkeys(paths))
    if environment.host.is_windows:
        return manual(f"let this user read {' and '.join(unique_paths)} (Properties, Security)", needs="root")
    words = words_of(environment, unique_paths)
    if {file.path for file in environment.packages.refused if file.own}.issuperset(unique_paths):
        return shell(f"chmod -R u+rX {words}")
    return shell(f"sudo chmod -R a+rX {words}", needs="root")
