"""The releases of onnxruntime-gpu on the package index: advice must not name one that pip cannot find.

The figures come from the index and from the fat binaries of its wheels when 1.31.1 was the newest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...environment.host import Host
from ...environment.packages.metadata import numbers_of

_LINUX, _AARCH64, _WINDOWS = ("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64")
_GLIBC = {_LINUX: (2, 28), _AARCH64: (2, 34)}  # The wheels need this version or a newer one.


@dataclass(frozen=True, slots=True)
class Code:
    """The GPUs with code in a release."""

    lowest: tuple[int, int]  # Machine code exists for this compute capability and every later one below 10.0.
    exact: tuple[tuple[int, int], ...]  # Machine code exists for these, too.
    ptx: tuple[int, int]  # Just-in-time compilation serves this capability and newer ones.

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return self.lowest <= capability < (10, 0) or capability in self.exact or capability >= self.ptx


@dataclass(frozen=True, slots=True)
class Release:
    requirement: str
    cuda_major: int
    pythons: tuple[tuple[int, int], tuple[int, int]]  # These are the first and the last Python with wheels.
    code: Mapping[tuple[str, str], Code | None]  # The keys are the platforms with wheels; None: not known.

    def runs_on(self, host: Host, capability: tuple[int, int] | None) -> bool:
        """Return True if the release has code for a GPU, or if nothing is known about it."""
        code = self.code.get((host.system, host.machine))
        return code is None or capability is None or code.runs_on(capability)

    def why_not_for(self, host: Host) -> str | None:
        """Return advice for another machine or Python if there is no wheel for this one; else None."""
        if host.implementation != "CPython":
            return f"use CPython: the package index has no wheel of {self.requirement} for {host.implementation}"
        platform = (host.system, host.machine)
        if platform not in self.code:
            places = ", ".join(map(" ".join, self.code))
            return f"use another machine: the package index has wheels of {self.requirement} for {places}"
        if not self.pythons[0] <= host.python[:2] <= self.pythons[1]:
            first, last = ("{}.{}".format(*version) for version in self.pythons)
            python = "{}.{}".format(*host.python)
            return f"use Python {first} to {last}: no wheel of {self.requirement} is known for Python {python}"
        glibc = _GLIBC.get(platform)
        if glibc is None or host.libc is None or (host.libc.startswith("glibc") and numbers_of(host.libc) >= glibc):
            return None
        needed = "glibc {}.{}".format(*glibc)
        return f"use an image with {needed} or newer, which the wheels of {self.requirement} need: this has {host.libc}"


# These are the newest per CUDA major; 1.27.0 was the first for CUDA 13, 1.29.0 the first for aarch64.
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

# These serve GPUs without code in the newest release, newest first. The first and the last have the same code on each
# platform.
_OF_1_28, _OF_1_19 = Code((7, 5), ((10, 0), (12, 0)), (12, 0)), Code((5, 2), (), (8, 0))
FOR_OTHER_GPUS = (
    Release("onnxruntime-gpu==1.28.0", 13, ((3, 11), (3, 14)), {_LINUX: _OF_1_28, _WINDOWS: _OF_1_28}),
    Release("onnxruntime-gpu>=1.24,<1.27", 12, ((3, 11), (3, 14)), FOR_CUDA_12.code),
    Release("onnxruntime-gpu==1.19.2", 12, ((3, 8), (3, 12)), {_LINUX: _OF_1_19, _WINDOWS: _OF_1_19}),
)


def newest_for(host: Host, driver_cuda: tuple[int, int] | None, capabilities: Sequence[tuple[int, int]]) -> Release:
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
    """Return the newest older release with code for one of these GPUs; None if there is none."""
    for release in FOR_OTHER_GPUS:
        if driver_cuda is not None and driver_cuda[0] < release.cuda_major:
            continue
        if any(release.runs_on(host, capability) for capability in capabilities) and release.why_not_for(host) is None:
            return release
    return None


def cuda_major_of(version: str) -> int | None:
    """Return the CUDA major of this version of onnxruntime-gpu on the package index; None if it is no version."""
    numbers = numbers_of(version)[:2]
    if len(numbers) < 2:
        return None
    return 13 if numbers >= (1, 27) else 12 if numbers >= (1, 19) else 11
