"""Facts about the machine and the operating system."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from .packages.interpreter import is_frozen, is_pex
from .packages.metadata import LINUX_ROOT, read_below, read_text

if sys.platform != "win32":
    import resource

_DISPLAY_CLASS: Final = 0x03
# A 32-bit Python has this machine on a system that reports the other.
_OF_32_BITS: Final = {"x86_64": "i686", "AMD64": "x86", "aarch64": "armv7l", "ARM64": "arm"}
_NO_LIMIT: Final = 1 << 60  # In cgroup v1 a number near 2**63 means no limit.


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """File descriptors of this process: number in use, soft limit and hard limit (ulimit -n, -Hn)."""

    used: int
    limit: int
    hard_limit: int


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as this process sees it. None means unknown."""

    system: str  # platform.system(): "Linux", "Windows", "Darwin"
    machine: str  # platform.machine(): "x86_64", "aarch64", "AMD64"; of a 32-bit Python "i686", "x86"
    os_name: str | None  # PRETTY_NAME of /etc/os-release; "Windows 11 10.0.26100"
    kernel: str | None
    libc: str | None  # "glibc 2.36", "musl"
    python: tuple[int, int, int]
    implementation: str  # "CPython"
    executable: str
    memory_total: int | None  # bytes; the smaller of physical memory and the cgroup limit
    container: str | None  # "docker", "podman", "kubernetes", "lxc", or another name; None: none seen
    wsl: bool
    display_vendors: frozenset[int] | None  # PCI vendor ids of display controllers: 0x10de, 0x1002, 0x8086
    frozen: bool  # True: a bundle of PyInstaller, pex and the like
    address_space: int | None = None  # bytes that this process may map (ulimit -v); None: no limit, or unknown
    data: int | None = None  # bytes of private writable memory (ulimit -d); None: no limit, or unknown
    open_files: OpenFiles | None = None
    stack: int | None = None  # bytes of each thread's stack (ulimit -s); None: no limit, or unknown
    service: str | None = None  # hosted service that runs this process: "Google Colab"; None: none is known

    @property
    def is_windows(self) -> bool:
        """True for Windows itself; WSL is Linux."""
        return self.system == "Windows"


def read_host(
    root: Path | None = LINUX_ROOT, environ: Mapping[str, str] | None = None, *, with_memory: bool = True
) -> Host:
    """Read the operating system's facts about itself. ``container`` None does not prove that there is none.

    No failure of a session depends on ``memory_total``: many files say what limits it.
    """
    variables = os.environ if environ is None else environ
    release = read_below(root, "proc/sys/kernel/osrelease")
    kernel = (release or platform.release()).strip() or None
    version, machine = sys.version_info, platform.machine()
    about = read_below(root, "etc/os-release") or read_below(root, "usr/lib/os-release")
    named = re.search(r"""^PRETTY_NAME=(["']?)(.*?)\1\s*$""", about, re.MULTILINE)
    name = (named[2].strip() or None) if named else None
    return Host(
        system=platform.system(),
        machine=machine if sys.maxsize > 1 << 32 else _OF_32_BITS.get(machine, machine),
        os_name=f"Windows {platform.release()} {platform.version()}" if sys.platform == "win32" else name,
        kernel=kernel,
        libc=_read_libc(root) if root is not None else None,
        python=(version.major, version.minor, version.micro),
        implementation=platform.python_implementation(),
        executable=sys.executable or "",
        memory_total=(_read_memory(root) if root is not None else _read_memory_of_windows()) if with_memory else None,
        container=_read_container(root, variables),
        wsl=kernel is not None and "microsoft" in kernel.lower(),
        display_vendors=_read_display_vendors(root) if root is not None else None,
        frozen=is_frozen() or is_pex(),
        address_space=_read_limits("RLIMIT_AS")[0],
        data=_read_limits("RLIMIT_DATA")[0],
        stack=_read_limits("RLIMIT_STACK")[0],
        open_files=_read_open_files(),
        service=_read_service(variables),
    )


# Each service sets its variable for its users. Sources: kagglehub's env.py; docs.aws.amazon.com/lambda, "Defined
# runtime environment variables"; Cloud Run's container contract; modal.com/docs, "Environment variables"; the package
# spaces; huggingface.co/docs/hub, "Spaces Overview". A Space with ZeroGPU is a Space too, so ZeroGPU comes first.
_SERVICES: Final = (
    ("Kaggle", "KAGGLE_KERNEL_RUN_TYPE"),
    ("Google Colab", "COLAB_RELEASE_TAG"),
    ("AWS Lambda", "AWS_LAMBDA_FUNCTION_NAME"),
    ("Google Cloud Run", "K_SERVICE"),
    ("Google Cloud Run", "CLOUD_RUN_JOB"),
    ("Modal", "MODAL_TASK_ID"),
    ("Hugging Face ZeroGPU", "SPACES_ZERO_GPU"),
    ("Hugging Face Spaces", "SPACE_ID"),
)


def _read_service(environ: Mapping[str, str]) -> str | None:
    if environ.get("KUBERNETES_SERVICE_HOST") and environ.get("K_SERVICE"):
        return None  # This is Knative in a self-managed cluster.
    for name, variable in _SERVICES:
        if environ.get(variable):
            return name
    return None


def _read_limits(name: str) -> tuple[int | None, int | None]:
    if sys.platform == "win32":
        return None, None
    soft, hard = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard


_MOST_FILES: Final = 1 << 20  # default of /proc/sys/fs/nr_open, the maximum on Linux


def _read_open_files() -> OpenFiles | None:
    limit, hard_limit = _read_limits("RLIMIT_NOFILE")
    if limit is None:
        return None
    try:
        used = len(os.listdir("/dev/fd")) - 1  # Listing the folder opens one more.
    except OSError as error:
        if error.errno != errno.EMFILE:
            return None
        used = limit
    return OpenFiles(used, limit, _MOST_FILES if hard_limit is None else hard_limit)


def parse_memory_limit(text: str) -> int | None:
    """Return the bytes of a cgroup's memory.max or memory.limit_in_bytes. None: no limit, or not a number."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    limit = int(text)
    return limit if 0 < limit < _NO_LIMIT else None


def _read_memory(root: Path) -> int | None:
    cgroups, limits = read_text(root / "proc/self/cgroup"), list[Path]()
    for line, folder, file in (
        (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max"),
        (r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$", "sys/fs/cgroup/memory", "memory.limit_in_bytes"),  # version 1
    ):
        match = re.search(line, cgroups, re.MULTILINE)
        path = PurePosixPath(match[1] if match else "")
        # The limits of all ancestors apply too. In a container the path may be the host's, and the mount's root the
        # container.
        limits += [root / folder / ancestor / file for ancestor in (path, *path.parents)]
    values = [*map(parse_memory_limit, map(read_text, limits))]
    total = re.search(r"^MemTotal:\s*([0-9]{1,18}) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if total is not None:
        values.append(int(total[1]) * 1024)
    return min(filter(None, values), default=None)


def _read_memory_of_windows() -> int | None:
    if sys.platform != "win32":
        return None
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and dwMemoryLoad (two DWORDs), then ullTotalPhys
    return status[1] if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else None


def _read_container(root: Path | None, environ: Mapping[str, str]) -> str | None:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if root is None:
        return None
    for name, mark in (
        ("docker", ".dockerenv"),
        ("podman", "run/.containerenv"),
        ("apptainer", ".singularity.d"),
    ):
        if os.path.lexists(root / mark):
            return name
    start = re.search(r"(?:^|\0)container=([^\0]+)", read_text(root / "proc/1/environ"))
    container = (start[1] if start else read_text(root / "run/systemd/container")).strip()
    # systemd counts WSL as a container, but Host has a field for it.
    return container if container not in ("", "wsl") else None


def _read_display_vendors(root: Path) -> frozenset[int] | None:
    folder, vendors = root / "sys/bus/pci/devices", set()
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        with suppress(ValueError):
            if int(read_text(folder / name / "class"), 16) >> 16 == _DISPLAY_CLASS:
                vendors.add(int(read_text(folder / name / "vendor"), 16))
    return frozenset(vendors)


def _read_libc(root: Path) -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    # platform.libc_ver() reads through the whole executable for this.
    with suppress(ValueError, OSError):
        if name := os.confstr("CS_GNU_LIBC_VERSION"):
            return name
    with suppress(OSError):
        return "musl" if any((root / "lib").glob("ld-musl-*")) else None
    return None
