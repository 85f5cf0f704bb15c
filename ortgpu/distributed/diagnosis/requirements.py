"""The published table about distributed training, compared with the installed software.

Much of that table is about packages that do not exist any more. Each such row says what exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...diagnosis.checks.surroundings import visible_gpus
from ...diagnosis.requirements import GB, Requirement, dotted, is_at_least, reaches, row
from ...environment.inspection import Environment
from ...environment.libraries.catalogue import major_of
from ...environment.packages.installed import Distribution, Torch
from ...environment.packages.metadata import numbers_of
from ..environment import REQUIRED, BuildVariable, Mpi, Nccl, Network, TrainingEnvironment
from .packages import LAST_RELEASE, NEWEST_ONNX

_FAST_ETHERNET = 10_000  # Mb/s
_HDR = 200.0  # Gb/s of a port with four lanes


def check_training(environment: Environment, training: TrainingEnvironment) -> tuple[Requirement, ...]:
    """Return the rows of the table for distributed training, then rows of the packages and variables that it names."""
    return (
        _gpus(environment),
        *_nvidia(environment),
        _nccl(training.nccl),
        _mpi(training.mpi),
        *_host(environment),
        _network(training.network),
        _training_package(environment),
        *(_package(training, name) for name in REQUIRED),
        _torch(environment),
        _horovod(training.horovod),
        *map(_build_variable, training.build_variables),
    )


def _gpus(environment: Environment) -> Requirement:
    gpus = visible_gpus(environment)
    names = ", ".join(f"{gpu.name} ({gpu.uuid or 'UUID not known'})" for gpu in gpus)
    value = f"{len(gpus)}: {names}" if gpus else "0"
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    enough = (
        sum(capability >= (7, 0) for capability in capabilities) >= 2,
        sum(capability >= (8, 0) for capability in capabilities) >= 8,
    )
    has_nvml = environment.driver.nvml.available
    return row(
        "GPUs",
        "2 of compute capability 7.0",
        "8 A100 or H100 (8.0 or newer)",
        value if has_nvml else None,
        enough if has_nvml else (None, None),
        "as CUDA_VISIBLE_DEVICES leaves them",
    )


def _nvidia(environment: Environment) -> Iterator[Requirement]:
    version = environment.driver.version
    met = None if version is None else is_at_least(version, "470")
    note = "for CUDA 11.8, which the last training package links; the CUDA that is used here may need a newer one"
    yield row("driver", "470", "470", version, (met, met), note)

    major = environment.cuda_major
    value = f"{major}.x, by the provider file" if major else None
    note = f"the last onnxruntime-training for CUDA, {LAST_RELEASE}, is built for CUDA 11.8 and no other"
    yield row("CUDA", "11.8", "12.x", value, reaches(major, 11, 12), note)

    soname = next((library.soname for library in environment.libraries if library.spec.stem == "libcudnn"), None)
    number = major_of(soname) if soname else None
    value = f"{number}.x, by the provider file" if number else None
    note = f"onnxruntime-training {LAST_RELEASE} for CUDA links cuDNN 8, against the published 9.x"
    yield row("cuDNN", "8.x", "9.x", value, reaches(number, 8, 9), note)


def _nccl(nccl: Nccl) -> Requirement:
    library = nccl.chosen
    note = "of the library that would be loaded; no published ONNX Runtime uses NCCL itself"
    if library is None:
        return row("NCCL", "2.10", "2.18", "no libnccl.so.2 was found", (False, False), note)
    others = len(nccl.libraries) - 1
    return row(
        "NCCL",
        "2.10",
        "2.18",
        str(library) if library.version else None,
        reaches(library.version, (2, 10), (2, 18)),
        note + (f"; {others} more copies" if others else ""),
    )


def _mpi(mpi: Mpi) -> Requirement:
    version = mpi.launcher or mpi.library
    condition = ("MPI", "Open MPI 4.0 or MPICH", "Open MPI 4.1")
    if version is None:
        if mpi.mpirun is None and mpi.mpi4py is None and mpi.error is None:
            return row(*condition, "neither mpirun nor mpi4py", (False, False))
        return row(*condition, None, (None, None), mpi.error or f"{mpi.mpirun} does not say what it is")
    launcher = f"{mpi.launcher} ({mpi.mpirun})" if mpi.launcher else "no mpirun"
    library = f"mpi4py {mpi.mpi4py} with {mpi.library}" if mpi.library else "no MPI library for mpi4py"
    met: tuple[bool | None, bool | None] = (version.vendor == "MPICH", False)
    if version.vendor == "Open MPI":
        met = reaches(version.version, (4, 0), (4, 1))
    return row(*condition, f"{launcher}; {library}", met, "the probe tries whether it starts")


def _host(environment: Environment) -> Iterator[Requirement]:
    host = environment.host
    note = "published so; the CUDA wheels of onnxruntime-training end at Python 3.11, only the CPU one has 3.12"
    yield row("Python", "3.10", "3.12", dotted(host.python), reaches(host.python, (3, 10), (3, 12)), note)

    is_supported = (host.system, host.machine) == ("Linux", "x86_64")
    is_ubuntu = "Ubuntu" in host.os_name if host.os_name is not None else None
    system = f"{host.os_name or host.system} {host.machine}"
    yield row("operating system", "Linux x86_64", "Ubuntu 22.04", system, (is_supported, is_ubuntu))

    size = host.memory_total
    value = f"{size / GB:.1f} GB" if size is not None else None
    note = "of this machine, or what this process may use of it"
    yield row("memory", "32 GB", "256 GB", value, reaches(size, 32 * GB, 256 * GB), note)

    sizes = [gpu.memory_total for gpu in visible_gpus(environment) if gpu.memory_total is not None]
    least = min(sizes, default=None)
    value = f"{least / GB:.1f} GB on the smallest of {len(sizes)}" if least is not None else None
    yield row("GPU memory", "16 GB each", "40 GB each", value, reaches(least, 16 * GB, 40 * GB))


def _network(network: Network) -> Requirement:
    """The fastest port counts. The switch behind it is not seen."""
    ports = [port for port in network.infiniband or () if port.active is not False]
    rates = [port.rate for port in ports if port.rate is not None and port.link_layer != "Ethernet"]
    speeds = [port.rate * 1000 for port in ports if port.rate is not None]
    speeds += [float(card.speed) for card in network.cards if card.speed is not None]
    is_known = network.interfaces is not None
    value = "; ".join(map(str, (*ports, *network.cards)))
    note = "of this machine's ports; the way to the other nodes is not seen"
    return row(
        "network between nodes",
        "10 GbE",
        "InfiniBand HDR or NDR",
        value or ("only virtual ports" if is_known else None),
        (
            max(speeds) >= _FAST_ETHERNET if speeds else None,
            max(rates, default=0.0) >= _HDR if is_known and (rates or not ports) else None,
        ),
        note if ports else f"no InfiniBand port; {note}",
    )


def _training_package(environment: Environment) -> Requirement:
    installed = environment.packages.onnxruntime
    names = [owner for owner in installed.owners if "training" in owner.name]
    value = ", ".join(f"{owner.name} {owner.version or ''}".strip() for owner in names) or "not installed"
    note = (
        f"the published 1.25.0 was never released: {LAST_RELEASE} is the newest; it shares its folder with the others"
    )
    return row("onnxruntime-training", LAST_RELEASE, LAST_RELEASE, value, (bool(names), bool(names)), note)


# From the package's metadata, except for onnx
_LOWEST: Final = {"numpy": "1.16.6", "setuptools": "61"}


def _package(training: TrainingEnvironment, name: str) -> Requirement:
    installed = training.packages.get(name)
    version = installed.version if installed is not None else None
    condition, note = _LOWEST.get(name, "any"), ""
    met: bool | None = installed is not None
    if name in _LOWEST and installed is not None:
        met = None if version is None else is_at_least(version, condition)
    if name == "onnx":
        condition, note = f"up to {NEWEST_ONNX}", "published without a limit; what newer ones write cannot be trained"
        met = met and (None if version is None else numbers_of(version)[:2] <= numbers_of(NEWEST_ONNX))
    return row(name, condition, condition, _version_of(installed), (met, met), note)


def _torch(environment: Environment) -> Requirement:
    torch = environment.packages.torch
    version = torch.version if torch is not None else None
    is_older = None if version is None else not is_at_least(version, "2.9")
    note = "not published: onnxruntime.training imports it; ORTModule needs one older than 2.9"
    return row("torch", "any", "older than 2.9", _version_of(torch), (torch is not None, is_older), note)


def _horovod(horovod: Distribution | None) -> Requirement:
    note = "published as an alternative; ONNX Runtime dropped it in 2020, and the newest, 0.28.1, is of 2023"
    return row("Horovod", "none", "none", _version_of(horovod), (True, True), note)


def _version_of(package: Distribution | Torch | None) -> str:
    return "not installed" if package is None else package.version or "version not known"


def _build_variable(variable: BuildVariable) -> Requirement:
    condition = f"unset, or {variable.holds}"
    met = variable.leads_there is not False
    note = "a build from source reads it, and nothing else; that such a build succeeds is not promised"
    return row(variable.name, condition, condition, variable.value or "not set", (met, met), note)
