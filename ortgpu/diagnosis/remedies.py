"""The text of fixes, written for the environment at hand: its interpreter, its installer, its versions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from ..environment.catalogue import LIBRARIES, spec_for, wheel_name
from ..environment.inspection import Environment
from ..errors import Fix, manual, shell

# Lowest driver per CUDA major: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
LOWEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}

# The newest release on the package index per CUDA major; 1.27.0 was the first for CUDA 13.
GPU_PACKAGE = {12: "onnxruntime-gpu>=1.20,<1.27", 13: "onnxruntime-gpu>=1.28"}


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
    if environment.host.python < (3, 11):
        return GPU_PACKAGE[12]  # CUDA 13 builds need Python 3.11: Requires-Python of 1.27.0 and newer
    cuda = environment.driver.cuda_version or environment.driver.nvml.cuda_version
    return GPU_PACKAGE[12] if cuda is not None and cuda < (13, 0) else GPU_PACKAGE[13]


def other_cuda(environment: Environment, cuda_major: int) -> Fix:
    """Install the ONNX Runtime and the libraries of another CUDA major."""
    return other_release(environment, GPU_PACKAGE[cuda_major], cuda_major)


def other_release(environment: Environment, requirement: str, cuda_major: int) -> Fix:
    """Install one release of ONNX Runtime with the libraries of its CUDA major."""
    wheels = dict.fromkeys(spec.wheels[cuda_major] for spec in LIBRARIES if cuda_major in spec.wheels)
    return install(environment, [requirement, *wheels])


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
    refusals = r"failed to map segment|annot (apply additional|restore segment)|annot allocate memory(?! in static TLS)"
    return re.search(refusals, words) is not None


def lacks_thread_storage(words: str) -> str | None:
    """The file for which glibc's loader has no room left: it keeps little for the thread-local storage of libraries
    that are opened after the start."""
    match = re.search(r"(\S+): cannot allocate memory in static TLS block", words)
    return match[1] if match else None


def lacks_threads(words: str) -> bool:
    """Whether the system gave a thread pool, ONNX Runtime's or OpenBLAS's, no further thread."""
    return re.search(r"pthread_create failed|annot start new thread|can't start new thread", words) is not None


def let_it_have_threads() -> Fix:
    return manual(
        "raise the limit on threads and processes (ulimit -u, docker run --pids-limit, that of its pod), or have "
        "fewer threads: OPENBLAS_NUM_THREADS=1, and intra_op_num_threads of SessionOptions",
        needs="host",
    )


def load_at_start(environment: Environment, paths: Iterable[str]) -> Fix:
    already = environment.variables.now.get("LD_PRELOAD", "")
    return shell(f"export LD_PRELOAD={shlex.quote(os.pathsep.join(filter(None, [*paths, already])))}")


# Of Debian and Ubuntu, for what slim images leave out.
_SYSTEM_PACKAGES = {
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libgomp.so.1": "libgomp1",
    "libz.so.1": "zlib1g",
}


def system_package(sonames: Iterable[str]) -> Fix:
    wanted = list(dict.fromkeys(sonames))
    known = [_SYSTEM_PACKAGES[soname] for soname in wanted if soname in _SYSTEM_PACKAGES]
    named = f" (Debian and Ubuntu: {' '.join(known)})" if known else ""
    return manual(f"install the system package that has {' and '.join(wanted)}{named}", needs="root")


def let_it_be_mapped(environment: Environment, folder: str) -> Fix:
    """For files that are whole and that this process may not map: installing them again mends nothing."""
    limit = environment.host.address_space
    if limit is not None:
        return manual(
            f"raise the limit on the address space of this process (ulimit -v, RLIMIT_AS): it is {limit >> 20} MiB, "
            "and CUDA maps many times that",
            needs="host",
        )
    return manual(
        f"give this process more memory, mount the file system of {folder} without noexec, or let SELinux allow it",
        needs="host",
    )


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


WSL_DRIVER = "/usr/lib/wsl/lib"


def look_first_in(folder: str) -> Fix:
    """For a library of the system: whether it is there, the machine at hand decides."""
    return shell(f'export LD_LIBRARY_PATH="{folder}:$LD_LIBRARY_PATH"', needs="host")


def update_driver(cuda_major: int) -> Fix:
    version = LOWEST_DRIVER.get(cuda_major)
    return manual(
        f"install an NVIDIA driver for CUDA {cuda_major}" + (f": {version} or newer" if version else ""), needs="driver"
    )


def wheel_of(soname: str, cuda_major: int | None) -> str | None:
    spec = spec_for(soname)
    return spec.wheels.get(cuda_major) if spec is not None and cuda_major is not None else None
