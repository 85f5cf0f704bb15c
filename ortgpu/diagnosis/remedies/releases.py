"""The releases of onnxruntime-gpu on the package index, and the machines that they are for.

Advice must not name one that pip cannot find. An installed wheel is read (environment/libraries/wheel.py); these are
not installed. Read from the index and from the fat binaries of its wheels when 1.31.1 was the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...environment.host import Host
from ...environment.packages.metadata import numbers_of

_LINUX, _AARCH64, _WINDOWS = ("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64")
_GLIBC = {_LINUX: (2, 28), _AARCH64: (2, 34)}  # that the wheels need


@dataclass(frozen=True, slots=True)
class Code:
    """The GPUs that a release has code for."""

    lowest: tuple[int, int]  # machine code for this compute capability and every later one below 10.0
    exact: tuple[tuple[int, int], ...]  # machine code for these
    ptx: tuple[int, int]  # this one and newer by just-in-time compilation

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return self.lowest <= capability < (10, 0) or capability in self.exact or capability >= self.ptx


@dataclass(frozen=True, slots=True)
class Release:
    """One release, or a range of them that is alike in what is said here."""

    requirement: str
    cuda_major: int
    pythons: tuple[tuple[int, int], tuple[int, int]]  # the first and the last with wheels
    code: Mapping[tuple[str, str], Code | None]  # by platform that has wheels; None: not known

    def runs_on(self, host: Host, capability: tuple[int, int] | None) -> bool:
        """Return True if it has code for a GPU, or nothing is known about it."""
        code = self.code.get((host.system, host.machine))
        return code is None or capability is None or code.runs_on(capability)

    def why_not_for(self, host: Host) -> str | None:
        """Return what to use instead of this machine or Python if there is no wheel for it; else None."""
        if host.implementation != "CPython":
            return f"use CPython: the package index has no wheel of {self.requirement} for {host.implementation}"
        platform = (host.system, host.machine)
        if platform not in self.code:
            places = ", ".join(map(" ".join, self.code))
            return f"use another machine: the package index has wheels of {self.requirement} for {places}"
        first, last = ("{}.{}".format(*one) for one in self.pythons)
        if not self.pythons[0] <= host.python[:2] <= self.pythons[1]:
            here = "{}.{}".format(*host.python)
            return f"use Python {first} to {last}: no wheel of {self.requirement} is known for Python {here}"
        glibc = _GLIBC.get(platform)
        if glibc is None or host.libc is None or (host.libc.startswith("glibc") and numbers_of(host.libc) >= glibc):
            return None
        needed = "glibc {}.{}".format(*glibc)
        return f"use an image with {needed} or newer, which the wheels of {self.requirement} need: this has {host.libc}"


# The newest per CUDA major; 1.27.0 was the first for CUDA 13, 1.29.0 the first for aarch64.
_NONE = (1000, 0)
FOR_CUDA_12 = Release("onnxruntime-gpu>=1.20,<1.27", 12, ((3, 10), (3, 14)), {
    _LINUX: Code((6, 0), (), (9, 0)),
    _WINDOWS: Code((8, 6), ((5, 2), (5, 3), (6, 1), (6, 2), (7, 5)), (9, 0)),
})  # fmt: skip
FOR_CUDA_13 = Release("onnxruntime-gpu>=1.28", 13, ((3, 11), (3, 14)), {
    _LINUX: Code((7, 5), ((12, 0),), _NONE),
    _WINDOWS: Code(_NONE, ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (12, 0)), _NONE),
})  # fmt: skip
FOR_AARCH64 = Release("onnxruntime-gpu>=1.29", 13, ((3, 11), (3, 14)), {_AARCH64: None})

# For GPUs for which the newest has no code; newest first. The code of the first and the last is alike on each platform.
_OF_1_28, _OF_1_19 = Code((7, 5), ((10, 0), (12, 0)), (12, 0)), Code((5, 2), (), (8, 0))
FOR_OTHER_GPUS = (
    Release("onnxruntime-gpu==1.28.0", 13, ((3, 11), (3, 14)), {_LINUX: _OF_1_28, _WINDOWS: _OF_1_28}),
    Release("onnxruntime-gpu>=1.24,<1.27", 12, ((3, 11), (3, 14)), FOR_CUDA_12.code),
    Release("onnxruntime-gpu==1.19.2", 12, ((3, 8), (3, 12)), {_LINUX: _OF_1_19, _WINDOWS: _OF_1_19}),
)


def newest_for(
    host: Host, driver_cuda: tuple[int, int] | None, capabilities: Sequence[tuple[int, int]] = ()
) -> Release:
    """Return the newest release for a machine, by its Python, the CUDA of its driver and its GPUs, if known."""
    if host.machine == "aarch64":
        return FOR_AARCH64
    for_cuda_13 = host.python >= FOR_CUDA_13.pythons[0] and (driver_cuda is None or driver_cuda >= (13, 0))
    newest = FOR_CUDA_13 if for_cuda_13 else FOR_CUDA_12
    if not capabilities or any(newest.runs_on(host, capability) for capability in capabilities):
        return newest
    return newest_for_gpus(host, driver_cuda, capabilities) or newest


def newest_for_gpus(
    host: Host, driver_cuda: tuple[int, int] | None, capabilities: Sequence[tuple[int, int]]
) -> Release | None:
    """Return the newest release with code for one of these GPUs, for which the newest of all has none; else None."""
    for release in FOR_OTHER_GPUS:
        if driver_cuda is not None and driver_cuda[0] < release.cuda_major:
            continue
        if any(release.runs_on(host, capability) for capability in capabilities) and release.why_not_for(host) is None:
            return release
    return None


def cuda_major_of(version: str) -> int | None:
    """Return the CUDA major of onnxruntime-gpu of this version on the package index; None if it is no number."""
    numbers = numbers_of(version)[:2]
    if len(numbers) < 2:
        return None
    return 13 if numbers >= (1, 27) else 12 if numbers >= (1, 19) else 11
