"""The text of fixes, written for the environment at hand: its interpreter, its installer, its versions."""

from __future__ import annotations

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
    words = " ".join(shlex.quote(requirement) for requirement in requirements)
    options = " --upgrade" if upgrade else ""
    if again:
        options = " --reinstall --no-deps" if environment.installer.name == "uv" else " --force-reinstall --no-deps"
    return shell(f"{environment.installer.install}{options} {words}")


def reinstall_onnxruntime(environment: Environment, *, leftover: str | None = None) -> Fix:
    """Remove every distribution that owns the import, and what they leave behind, then install the GPU build."""
    names = dict.fromkeys(owner.name for owner in environment.packages.onnxruntime.owners)
    steps = [f"{environment.installer.uninstall} {' '.join(names)}"] if names else []
    if leftover is not None:
        steps.append(f"rm -rf {shlex.quote(leftover)}")
    steps.append(f"{environment.installer.install} {shlex.quote(gpu_requirement(environment))}")
    return shell(" && ".join(steps))


def gpu_requirement(environment: Environment) -> str:
    """The GPU package to install: the version that is here already, else the newest that the driver can run."""
    for owner in environment.packages.onnxruntime.owners:
        if owner.name == "onnxruntime-gpu" and owner.version:
            return f"onnxruntime-gpu=={owner.version}"
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


def install_libraries(environment: Environment, wheels: Iterable[str]) -> Fix:
    """Install wheels, again where the installer has them on record and their libraries are still not there."""
    wanted = list(wheels)
    present = {wheel.name: wheel.version for wheel in environment.packages.nvidia}
    damaged = [name for name in map(wheel_name, wanted) if name in present]
    if not damaged:
        return install(environment, wanted)
    pinned = [f"{name}=={present[name]}" if present[name] else name for name in damaged]
    new = [wheel for wheel in wanted if wheel_name(wheel) not in present]
    commands = [install(environment, pinned, again=True)] + ([install(environment, new)] if new else [])
    return shell(" && ".join(commands))


def update_driver(cuda_major: int) -> Fix:
    version = LOWEST_DRIVER.get(cuda_major)
    return manual(
        f"install an NVIDIA driver for CUDA {cuda_major}" + (f": {version} or newer" if version else ""), needs="driver"
    )


def wheel_of(soname: str, cuda_major: int | None) -> str | None:
    spec = spec_for(soname)
    return spec.wheels.get(cuda_major) if spec is not None and cuda_major is not None else None
