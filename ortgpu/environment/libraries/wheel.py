"""Read from the installed provider library the libraries that it needs and the GPUs that it holds code for.

Tables per release go stale, but the file cannot. The architectures come from the headers of the first container of the
section ``.nv_fatbin``. In every examined wheel for Linux (1.18.1, 1.22.0, 1.26.0, 1.27.0, 1.31.1; checked against
cuobjdump) it names each architecture of all later containers. The wheels for Windows from 1.19.2 to 1.28.0 do the same.
In 1.29.0 and 1.31.1 for Windows some kernels are for compute capability 9.0 as well, and most are not.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal

from ..packages.plugins import provider_file_name
from .catalogue import CUDNN_CODE, is_dll, major_of, stem_of
from .library_file import (
    absent_strings,
    borrows,
    find_section,
    read_library,
    read_section,
    this_machine,
    wrong_machine,
)

_FATBIN_MAGIC = 0xBA55ED50
_PTX, _SASS = 1, 2
# cuobjdump prints a suffix for these flags. "a" is code for that one GPU generation. "f" is code, or PTX, for the later
# ones of its major version as well (CUDA 12.9 and newer).
_ARCHITECTURE_SPECIFIC, _FAMILY_SPECIFIC = 0x100000, 0x200000

Coverage = Literal["native", "jit", "none"]

# If such a variable is 1, CUDA ignores code of this kind.
PASSED_OVER = {"CUDA_FORCE_PTX_JIT": "machine code", "CUDA_DISABLE_PTX_JIT": "PTX"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One target of the fat binary: ``sm_90a`` is machine code, ``compute_120f`` is PTX."""

    major: int
    minor: int
    ptx: bool
    specific: bool  # The code runs on exactly this compute capability.
    family: bool = False  # The PTX runs on this major version only, as machine code does.

    def __str__(self) -> str:
        suffix = "a" if self.specific else "f" if self.family else ""
        return f"{'compute' if self.ptx else 'sm'}_{self.major}{self.minor}{suffix}"

    def covers(self, capability: tuple[int, int]) -> bool:
        """Return True if a GPU of this compute capability can use the code.

        See the CUDA C++ Programming Guide, "Binary Compatibility" and "Feature Set Compiler Targets".
        """
        target = (self.major, self.minor)
        if self.specific:
            return target == capability
        if self.ptx and not self.family:
            return target <= capability
        return self.major == capability[0] and self.minor <= capability[1]


@dataclass(frozen=True, slots=True)
class ProviderLibrary:
    """The facts in the file of ``libonnxruntime_providers_cuda.so``, or of ``onnxruntime_providers_cuda.dll``."""

    path: str
    problem: str | None  # reason why the loader would refuse the file
    needed: tuple[str, ...]  # DT_NEEDED, or the import table, in the file's order
    search_path: tuple[str, ...]
    architectures: tuple[Architecture, ...] | None  # None: the file has no readable fat binary

    @property
    def cuda_major(self) -> int | None:
        return cuda_major_of(self.needed)

    def coverage(self, capability: tuple[int, int], variables: Mapping[str, str] | None = None) -> Coverage | None:
        return coverage_by(self.architectures, capability, variables)


def coverage_by(
    architectures: Iterable[Architecture] | None,
    capability: tuple[int, int],
    variables: Mapping[str, str] | None = None,
) -> Coverage | None:
    """Return ``native`` for machine code, ``jit`` for PTX that the driver compiles at first use, None if unknown.

    ``variables``: environment variables of the process. Two of them make CUDA ignore machine code or PTX (CUDA
    Programming Guide, "CUDA Environment Variables").
    """
    if not architectures:
        return None
    fitting = {"PTX" if a.ptx else "machine code" for a in architectures if a.covers(capability)}
    for name, code in PASSED_OVER.items():
        if (variables or {}).get(name) == "1":
            fitting.discard(code)
    return "native" if "machine code" in fitting else "jit" if fitting else "none"


def cuda_major_of(needed: tuple[str, ...]) -> int | None:
    """Return the CUDA major version of libcudart among these names, or None.

    On Windows providers may have libcudart built in (ONNX Runtime 1.27 and newer). cuBLAS has the same version.
    """
    major = None
    for name in needed:
        stem = stem_of(name)
        if stem == "libcudart":
            return major_of(name)
        if stem == "libcublas" and is_dll(name) and major is None:
            major = major_of(name)
    return major


def read_provider(path: str | os.PathLike[str]) -> ProviderLibrary:
    """Read the provider file, in under a millisecond. Never raises for its content."""
    file = read_library(path)
    problem = file.problem or wrong_machine(file.machine, this_machine())
    return ProviderLibrary(file.path, problem, file.needed, file.search_path, read_architectures(file.path))


@functools.cache  # A registered library does not change.
def uses_internals(provider: str) -> bool:
    """Return True for a plugin that depends on internals of one release of ONNX Runtime, as in 1.31.1."""
    return borrows(provider, ("Provider_GetHost",))


def release_wanted(provider: str, core: str) -> str | None:
    """Return the release of ONNX Runtime that a plugin is tied to, if it is another one than ``core``.

    Such a plugin ends the process in any other release: 1.31.1's plugin does in 1.32.0. Other plugins ask for their
    version of the interface when they are registered.
    """
    release = re.match(r"\d+\.\d+\.\d+", core)  # A nightly build has the date behind it.
    if release is None or not uses_internals(provider) or not absent_strings(provider, [release[0]]):
        return None
    match = re.search(rb"\0(1\.\d+\.\d+)\0", read_section(provider, ".rodata") or b"")
    return match[1].decode("ascii") if match is not None else None


def provider_beside(provider: str, name: str) -> str:
    """Return the path of another provider library of ONNX Runtime, in the same folder and for the same system."""
    system = "Windows" if is_dll(provider) else "Linux"
    return os.path.join(os.path.dirname(provider), provider_file_name(name, system))


def read_architectures(path: str) -> tuple[Architecture, ...] | None:
    # The linker of Windows keeps eight letters of a section's name.
    section = find_section(path, ".nv_fatb" if is_dll(path) else ".nv_fatbin")
    if section is None:
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            return parse_container(file, *section)
    except (OSError, ValueError, struct.error):
        return None


def read_architectures_of_cudnn(paths: Iterable[str]) -> tuple[Architecture, ...] | None:
    """Return the architectures of cuDNN's parts in CUDNN_CODE; None if a part is missing, or names none.

    In 9.1.0, 9.3.0, 9.5.1, 9.10.2, 9.11.0, 9.20.0 and 9.28.0 they agree with the release notes. Other parts begin with
    containers for one generation each. The parts for Windows were not examined, so the result for them is None.
    """
    parts = [None if is_dll(path) else read_architectures(path) for path in paths]
    if len(parts) < len(CUDNN_CODE) or not all(parts):
        return None
    return tuple(dict.fromkeys(architecture for architectures in parts for architecture in architectures or ()))


def parse_container(file: BinaryIO, start: int, length: int) -> tuple[Architecture, ...] | None:
    """Return the entries of the first fat binary container at ``start``; None if there is no container."""
    file.seek(start)
    magic, version, header_size, body_size = struct.unpack("<IHHQ", file.read(16))
    if magic != _FATBIN_MAGIC or version != 1 or header_size + body_size > length:
        return None
    architectures: list[Architecture] = []
    at, end = start + header_size, start + header_size + body_size
    while at + 48 <= end and len(architectures) < 64:
        file.seek(at)
        head = file.read(48)
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", head, 0)
        (number,) = struct.unpack_from("<I", head, 28)
        (flags,) = struct.unpack_from("<Q", head, 40)
        if kind in (_PTX, _SASS):
            specific, family = bool(flags & _ARCHITECTURE_SPECIFIC), bool(flags & _FAMILY_SPECIFIC)
            architectures.append(Architecture(number // 10, number % 10, kind == _PTX, specific, family))
        if entry_header + payload == 0:
            break
        at += entry_header + payload
    return tuple(architectures) or None
