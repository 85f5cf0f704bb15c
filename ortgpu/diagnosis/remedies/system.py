"""Write fixes outside the Python environment: the driver, the system's libraries, limits and permissions."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

from ...environment.inspection import Environment
from ...environment.libraries.catalogue import is_dll
from ...environment.packages.metadata import numbers_of
from ...errors import Fix, manual, on_linux, shell

# Lowest driver per CUDA major: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
LOWEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}

WSL_DRIVER = "/usr/lib/wsl/lib"


def look_first_in(folder: str) -> Fix:
    """Put a folder first on LD_LIBRARY_PATH; whether the system's library is there depends on the host.

    No colon if the variable is not set: an empty entry is the working directory (ld.so(8)).
    """
    rest = '"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'
    return shell(f"export LD_LIBRARY_PATH={shlex.quote(folder)}{rest}", needs="host")


def restart_driver(environment: Environment, fixes: Iterable[Fix]) -> list[Fix]:
    """Return ``fixes`` of a driver that has to restart; WSL has no kernel module of NVIDIA, and nothing to reboot."""
    if not environment.host.wsl:
        return list(fixes)
    restart = "restart WSL (wsl --shutdown, in Windows); if that does not help, update the NVIDIA driver of Windows"
    return [*(fix for fix in fixes if fix.needs is None), on_linux(restart, needs="host")]


def is_enough(version: str | None, cuda_major: int) -> bool:
    """Return True if the version of a driver is known, and new enough for a CUDA major."""
    lowest = LOWEST_DRIVER.get(cuda_major)
    return version is not None and lowest is not None and numbers_of(version) >= numbers_of(lowest)


def update_driver(environment: Environment) -> Fix:
    """Return the update for the CUDA of the installed ONNX Runtime.

    In WSL it belongs into Windows: a driver for Linux would hide the one that works.
    """
    host, cuda_major = environment.host, environment.cuda_major or 13
    wanted, version = f"install an NVIDIA driver for CUDA {cuda_major}", LOWEST_DRIVER.get(cuda_major)
    if host.wsl:
        return on_linux(f"{wanted} in Windows, and none inside WSL", needs="driver")
    if environment.driver.is_tegra:
        return manual(
            f"install a JetPack with CUDA {cuda_major}, or NVIDIA's build of ONNX Runtime for the one that is there",
            needs="driver",
        )
    wanted += " on the host of this container" if host.container else ""
    known = version and host.system != "Windows"  # whose drivers have other numbers
    return manual(wanted + (f": {version} or newer" if known else ""), needs="driver")


def serve_the_gpu() -> list[Fix]:
    """Return fixes for a loaded driver that left the GPU out. Only the kernel's log says why.

    NVIDIA/open-gpu-kernel-modules issues 862 and 872 (an RTX 5090), NixOS/nixos-hardware issue 1880 (a GTX 1050).
    """
    return [
        shell("sudo dmesg | grep -i nvrm", needs="root"),
        manual(
            "install the driver that serves this GPU: with its open kernel modules (nvidia-open, nvidia-driver-*-open) "
            "from the RTX 50 series on; with its proprietary ones, and none newer than 580, before the RTX 20 series",
            needs="driver",
        ),
        manual(
            "or, where the log says that it failed (RmInitAdapter), switch on Above 4G Decoding and Resizable BAR in "
            "the firmware of this machine",
            needs="hardware",
        ),
    ]


def for_a_jetson() -> Fix:
    """Return the fix for a Jetson: its GPUs have compute capability 7.2, 8.7 and 11.0.

    The aarch64 wheels of the package index have code for 8.9, 9.0, 12.0 and 12.1.
    """
    return manual(
        "install NVIDIA's build of ONNX Runtime for this Jetson's JetPack: that of the package index holds no code for "
        "its GPU",
        needs="host",
    )


def stack_that_is_too_large(environment: Environment) -> str | None:
    """Say that stacks leave no memory for a further thread, if they do: OpenBLAS issue 4762."""
    stack = environment.host.stack
    # The default is 8 MiB; Fortran programs get many times that.
    return f"each thread gets a stack of {stack >> 20} MiB (ulimit -s)" if stack and stack > 256 << 20 else None


def let_it_have_threads(environment: Environment) -> list[Fix]:
    return [
        *([shell("ulimit -s 8192")] if stack_that_is_too_large(environment) is not None else []),
        on_linux(
            "raise the limit on threads and processes (ulimit -u, docker run --pids-limit, that of its pod), or have "
            "fewer threads: OPENBLAS_NUM_THREADS=1, and intra_op_num_threads of SessionOptions",
            needs="host",
        ),
    ]


def load_at_start(environment: Environment, paths: Iterable[str]) -> Fix:
    already = environment.variables.now.get("LD_PRELOAD", "")
    return shell(f"export LD_PRELOAD={shlex.quote(os.pathsep.join(filter(None, [*paths, already])))}")


# Packages of Debian and Ubuntu that slim images leave out.
_SYSTEM_PACKAGES = {
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libgomp.so.1": "libgomp1",
    "libz.so.1": "zlib1g",
}


# Microsoft's link to the newest.
_REDISTRIBUTABLE = "https://aka.ms/vs/17/release/vc_redist.x64.exe"
_OF_VISUAL_C = re.compile(r"(msvcp|vcruntime|concrt|vcomp|vccorlib)\d", re.IGNORECASE)


def update_visual_c() -> Fix:
    return manual(
        f"install the newest Visual C++ Redistributable for x64 ({_REDISTRIBUTABLE}) and start the program again",
        needs="root",
    )


def system_package(sonames: Iterable[str]) -> Fix:
    wanted = list(dict.fromkeys(sonames))
    if all(map(_OF_VISUAL_C.match, wanted)):
        return update_visual_c()
    if all(map(is_dll, wanted)):
        return manual(f"install what brings {' and '.join(wanted)}", needs="root")
    known = [_SYSTEM_PACKAGES[soname] for soname in wanted if soname in _SYSTEM_PACKAGES]
    named = f" (Debian and Ubuntu: {' '.join(known)})" if known else ""
    return manual(f"install the system package that has {' and '.join(wanted)}{named}", needs="root")


def limit_on_memory(environment: Environment) -> str | None:
    """Say which limit keeps this process from mapping libraries, the lower of two. None: there is none."""
    space, data = environment.host.address_space, environment.host.data
    if space is not None and (data is None or space <= data):
        known = f"it is {space >> 20} MiB, and CUDA maps many times that"
        return f"the limit on the address space of this process (ulimit -v, RLIMIT_AS): {known}"
    if data is not None:
        known = f"it is {data >> 20} MiB, and the CUDA libraries take more"
        return f"the limit on the private memory of this process (ulimit -d, RLIMIT_DATA): {known}"
    return None


def let_it_be_mapped(environment: Environment, folder: str) -> Fix:
    """Return the fix for whole files that this process may not map: a new installation would not help."""
    limit = limit_on_memory(environment)
    if environment.host.system == "Windows":
        return manual(
            "let Windows manage the size of its paging file, or make it larger, or end programs", needs="host"
        )
    if limit is not None:
        return manual(f"raise {limit}", needs="host")
    return on_linux(
        f"give this process more memory, mount the file system of {folder} without noexec, or let SELinux allow it",
        needs="host",
    )


def unblock(environment: Environment, path: str) -> Fix:
    """Return the fix for a whole file that the system refuses for what it is."""
    if environment.host.system != "Windows":
        folder = shlex.quote(os.path.dirname(path) + os.sep)
        return manual(
            "let what guards this system allow it, an allowlist or a virus scanner: installing it again changes "
            f"nothing. For fapolicyd: sudo fapolicyd-cli --file add {folder} && sudo fapolicyd-cli --update",
            needs="root",
        )
    return manual(
        "let this program load it: the application control of Windows (Smart App Control, AppLocker) or its virus "
        "scanner refuses files that they do not know, and installing them again changes nothing",
        needs="root",
    )


def let_it_be_read(environment: Environment, paths: Iterable[str]) -> Fix:
    """Return the fix for files that this user may not read."""
    wanted = list(dict.fromkeys(paths))
    own = {each.path for each in environment.packages.refused if each.own}
    words = " ".join(map(shlex.quote, wanted))
    return (
        shell(f"chmod -R u+rX {words}")
        if own.issuperset(wanted)
        else shell(f"sudo chmod -R a+rX {words}", needs="root")
    )
