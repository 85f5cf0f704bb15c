"""Facts about environment variables: as they are now, and as they were when the process started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .packages.metadata import LINUX_ROOT, read_file

NAMES: Final[tuple[str, ...]] = (
    # These select the GPUs of the process, and the order of CUDA's ordinals.
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    # Container engines read these: without "compute" there is no libcuda, although nvidia-smi works.
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_DISABLE_REQUIRE",
    # The CUDA driver reads these.
    "CUDA_MODULE_LOADING",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "NVIDIA_TF32_OVERRIDE",
    # Searches for libraries read these.
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDNN_HOME",
    "CUDNN_PATH",
    "CUDACXX",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "DYLD_LIBRARY_PATH",
    "PATH",
    # Python's search for packages reads these.
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONNOUSERSITE",
    # ONNX Runtime and ortgpu read these.
    "ORT_CUDA_UNAVAILABLE",
    "ORTGPU_ALLOW_CPU",
    "ORTGPU_ENFORCE",
    "ORTGPU_MEMORY",
    "ORTGPU_ENFORCE_EXCEPT",
)


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables that matter here, now and at the start of the process. ``at_start`` None: unknown.

    The dynamic loader reads LD_LIBRARY_PATH once, at start. A later change of os.environ does not reach it.
    """

    now: Mapping[str, str]
    at_start: Mapping[str, str] | None


def entries_of(variable: str, value: str) -> list[str]:
    """Return the entries of a search path, or of LD_PRELOAD: spaces separate its entries too, see ld.so(8)."""
    return re.split("[: ]", value) if variable == "LD_PRELOAD" else value.split(os.pathsep)


def parse_environment_block(block: bytes) -> dict[str, str] | None:
    """Parse NUL-separated ``NAME=value`` entries, as the kernel shows them. None: this is no such block.

    A program that renames itself (setproctitle: Ray, gunicorn) writes its title over the block. If only zeros and a
    title are left, the result is None and not empty. Entries that survive such a write are returned as they stand.
    """
    variables: dict[str, str] = {}
    for entry in block.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if name and equals:
            # The first entry wins, as it does for getenv and the dynamic loader.
            variables.setdefault(os.fsdecode(name), os.fsdecode(value))
    return variables if variables or not block else None


def read_variables(environ: Mapping[str, str] | None = None, start: bytes | None = None) -> Variables:
    """Read the variables of ``NAMES`` from ``environ`` (``os.environ``) and ``start`` (/proc/self/environ).

    Changes made by C code after Python started are not seen.
    """
    now = os.environ if environ is None else environ
    if start is None:
        start = read_file("/proc/self/environ") if LINUX_ROOT is not None else None
    before = parse_environment_block(start) if start is not None else None
    return Variables(_chosen(now), None if before is None else _chosen(before))


def _chosen(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: variables[name] for name in NAMES if name in variables}
