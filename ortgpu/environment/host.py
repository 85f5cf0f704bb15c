"""Facts about the machine and the operating system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as this process sees it. None means unknown."""

    system: str  # platform.system(): "Linux", "Windows", "Darwin"
    machine: str  # platform.machine(): "x86_64", "aarch64", "AMD64"
    os_name: str | None  # PRETTY_NAME of /etc/os-release
    kernel: str | None
    libc: str | None  # "glibc 2.36", "musl"
    python: tuple[int, int, int]
    implementation: str  # "CPython"
    executable: str
    memory_total: int | None  # bytes; the smaller of physical memory and the cgroup limit
    container: str | None  # "docker", "podman", "kubernetes", "lxc", or another name; None: none seen
    wsl: bool
    display_vendors: frozenset[int] | None  # PCI vendor ids of display controllers: 0x10de, 0x1002, 0x8086
    frozen: bool  # a PyInstaller-like bundle
