"""What the published table about distributed training asks of a machine, held against what is installed.

Much of that table is about packages that do not exist any more; each such row says what does. What no fact of the
environment tells (MPI, the network between nodes) is unknown here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..environment.inspection import Environment
from .devices import visible_gpus
from .requirements import Requirement, Status, at_least, dotted

_GB = 10**9
_LAST_RELEASE = "1.19.2"  # the newest onnxruntime-training of the package index, of September 2024
_NOT_LOOKED_AT = "not among the facts that a diagnosis reads"


def check_training(environment: Environment) -> tuple[Requirement, ...]:
    """Every row of the table for distributed training, in its order."""
    return tuple(check(environment) for check in _CHECKS)


def _gpus(environment: Environment) -> Requirement:
    gpus = visible_gpus(environment)
    fit = [gpu for gpu in gpus if gpu.compute_capability is not None and gpu.compute_capability >= (7, 0)]
    known = environment.driver.nvml.available
    names = ", ".join(f"{gpu.name} ({dotted(gpu.compute_capability)})" for gpu in gpus if gpu.compute_capability)
    return Requirement(
        "GPUs",
        "2 of compute capability 7.0",
        "8 A100 or H100 (8.0 or newer)",
        f"{len(gpus)}" + (f": {names}" if names else "") if known else None,
        _judge(len(fit) >= 2, known),
        _judge(len([gpu for gpu in fit if (gpu.compute_capability or (0, 0)) >= (8, 0)]) >= 8, known),
        "as CUDA_VISIBLE_DEVICES leaves them",
    )


def _cuda(environment: Environment) -> Requirement:
    major = environment.provider.cuda_major if environment.provider is not None else None
    status = _judge(major is not None and major >= 12, major is not None)
    minimum = _judge(major is not None and major >= 11, major is not None)
    note = f"the last onnxruntime-training for CUDA, {_LAST_RELEASE}, is built for CUDA 11.8 and no other"
    return Requirement(
        "CUDA", "11.8", "12.x", f"{major}.x, by the provider file" if major else None, minimum, status, note
    )


def _cudnn(environment: Environment) -> Requirement:
    soname = next((library.soname for library in environment.libraries if library.spec.stem == "libcudnn"), None)
    number = int(soname.rpartition(".")[2]) if soname else None
    note = f"onnxruntime-training {_LAST_RELEASE} for CUDA links cuDNN 8, against the published 9.x"
    return Requirement(
        "cuDNN",
        "8.x",
        "9.x",
        f"{number}.x, by the provider file" if number else None,
        _judge((number or 0) >= 8, number is not None),
        _judge((number or 0) >= 9, number is not None),
        note,
    )


def _nccl(environment: Environment) -> Requirement:
    wheel = next((one for one in environment.packages.nvidia if one.name.startswith("nvidia-nccl")), None)
    version = wheel.version if wheel is not None else None
    note = "of NVIDIA's wheel; no published ONNX Runtime uses NCCL itself"
    return Requirement(
        "NCCL",
        "2.10",
        "2.18",
        version,
        _judge(version is not None and at_least(version, "2.10"), version is not None),
        _judge(version is not None and at_least(version, "2.18"), version is not None),
        note if version else f"no nvidia-nccl wheel; one of the system is {_NOT_LOOKED_AT}",
    )


def _mpi(environment: Environment) -> Requirement:
    return Requirement(
        "MPI",
        "Open MPI 4.0 or MPICH",
        "Open MPI 4.1",
        None,
        "unknown",
        "unknown",
        f"{_NOT_LOOKED_AT}: mpirun --version",
    )


def _python(environment: Environment) -> Requirement:
    version = environment.host.python[:2]
    note = "published so; the CUDA wheels of onnxruntime-training end at Python 3.11, only the CPU one has 3.12"
    return Requirement(
        "Python",
        "3.10",
        "3.12",
        dotted(environment.host.python),
        _judge(version >= (3, 10), True),
        _judge(version >= (3, 12), True),
        note,
    )


def _system(environment: Environment) -> Requirement:
    host = environment.host
    here = (host.system, host.machine) == ("Linux", "x86_64")
    ubuntu = _judge(host.os_name is not None and "Ubuntu" in host.os_name, host.os_name is not None)
    found = f"{host.os_name or host.system} {host.machine}"
    return Requirement("operating system", "Linux x86_64", "Ubuntu 22.04", found, _judge(here, True), ubuntu)


def _memory(environment: Environment) -> Requirement:
    size = environment.host.memory_total
    return Requirement(
        "memory",
        "32 GB",
        "256 GB",
        f"{size / _GB:.1f} GB" if size is not None else None,
        _judge((size or 0) >= 32 * _GB, size is not None),
        _judge((size or 0) >= 256 * _GB, size is not None),
        "of this machine, or what this process may use of it",
    )


def _gpu_memory(environment: Environment) -> Requirement:
    sizes = [gpu.memory_total for gpu in visible_gpus(environment) if gpu.memory_total is not None]
    return Requirement(
        "GPU memory",
        "16 GB each",
        "40 GB each",
        f"{min(sizes) / _GB:.1f} GB on the smallest of {len(sizes)}" if sizes else None,
        _judge(min(sizes, default=0) >= 16 * _GB, bool(sizes)),
        _judge(min(sizes, default=0) >= 40 * _GB, bool(sizes)),
    )


def _network(environment: Environment) -> Requirement:
    return Requirement(
        "network between nodes", "10 GbE", "InfiniBand HDR or NDR", None, "unknown", "unknown", _NOT_LOOKED_AT
    )


def _training_package(environment: Environment) -> Requirement:
    installed = environment.packages.onnxruntime
    names = [owner for owner in installed.owners if "training" in owner.name]
    found = ", ".join(f"{owner.name} {owner.version or ''}".strip() for owner in names) or "not installed"
    status = _judge(bool(names), True)
    note = (
        f"the published 1.25.0 was never released: {_LAST_RELEASE} is the newest; it shares its folder with the others"
    )
    return Requirement("onnxruntime-training", _LAST_RELEASE, _LAST_RELEASE, found, status, status, note)


_CHECKS: tuple[Callable[[Environment], Requirement], ...] = (
    _gpus,
    _cuda,
    _cudnn,
    _nccl,
    _mpi,
    _python,
    _system,
    _memory,
    _gpu_memory,
    _network,
    _training_package,
)


def _judge(passes: bool, known: bool) -> Status:
    return "unknown" if not known else "pass" if passes else "fail"
