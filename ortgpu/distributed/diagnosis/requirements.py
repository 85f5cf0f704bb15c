"""What the published table about distributed training asks of a machine, held against what is installed.

Much of that table is about packages that do not exist any more; each such row says what does.
"""

from __future__ import annotations

from collections.abc import Callable

from ...diagnosis.checks.visible import visible_gpus
from ...diagnosis.requirements import Requirement, Status, at_least, dotted, numbers_of
from ...environment.inspection import Environment
from ...environment.libraries.catalogue import major_of
from ..environment.network import InfinibandPort, Interface
from ..environment.training import BuildVariable, TrainingEnvironment
from .packages import NEWEST_ONNX
from .refusals import LAST_RELEASE

_GB = 10**9
_FAST_ETHERNET = 10_000  # Mb/s
_HDR = 200.0  # Gb/s of a port with four lanes


def check_training(environment: Environment, training: TrainingEnvironment) -> tuple[Requirement, ...]:
    """Every row of the table for distributed training, in its order; then the packages and variables that it names."""
    return (
        *(check(environment) for check in _OF_THE_MACHINE),
        _nccl(training),
        _mpi(training),
        *(check(environment) for check in _OF_THE_SYSTEM),
        _network(training),
        _training_package(environment),
        *(_package(training, *row) for row in _PACKAGES),
        _torch(environment),
        _horovod(training),
        *(_build_variable(variable) for variable in training.build_variables),
    )


def _gpus(environment: Environment) -> Requirement:
    gpus = visible_gpus(environment)
    fit = [gpu for gpu in gpus if gpu.compute_capability is not None and gpu.compute_capability >= (7, 0)]
    known = environment.driver.nvml.available
    names = ", ".join(
        f"{gpu.name} ({dotted(gpu.compute_capability)}, {gpu.uuid or 'UUID not known'})"
        for gpu in gpus
        if gpu.compute_capability
    )
    return Requirement(
        "GPUs",
        "2 of compute capability 7.0",
        "8 A100 or H100 (8.0 or newer)",
        f"{len(gpus)}" + (f": {names}" if names else "") if known else None,
        _judge(len(fit) >= 2, known),
        _judge(len([gpu for gpu in fit if (gpu.compute_capability or (0, 0)) >= (8, 0)]) >= 8, known),
        "as CUDA_VISIBLE_DEVICES leaves them",
    )


def _driver(environment: Environment) -> Requirement:
    driver = environment.driver
    version = driver.version
    status = _judge(version is not None and at_least(version, "470"), version is not None)
    note = "for CUDA 11.8, which the last training package links; the CUDA that is used here may need a newer one"
    return Requirement("driver", "470", "470", version, status, status, note)


def _cuda(environment: Environment) -> Requirement:
    major = environment.cuda_major
    status = _judge(major is not None and major >= 12, major is not None)
    minimum = _judge(major is not None and major >= 11, major is not None)
    note = f"the last onnxruntime-training for CUDA, {LAST_RELEASE}, is built for CUDA 11.8 and no other"
    return Requirement(
        "CUDA", "11.8", "12.x", f"{major}.x, by the provider file" if major else None, minimum, status, note
    )


def _cudnn(environment: Environment) -> Requirement:
    soname = next((library.soname for library in environment.libraries if library.spec.stem == "libcudnn"), None)
    number = major_of(soname) if soname else None
    note = f"onnxruntime-training {LAST_RELEASE} for CUDA links cuDNN 8, against the published 9.x"
    return Requirement(
        "cuDNN",
        "8.x",
        "9.x",
        f"{number}.x, by the provider file" if number else None,
        _judge((number or 0) >= 8, number is not None),
        _judge((number or 0) >= 9, number is not None),
        note,
    )


def _nccl(training: TrainingEnvironment) -> Requirement:
    library = training.nccl.chosen
    version = library.version if library is not None else None
    note = "of the library that would be loaded; no published ONNX Runtime uses NCCL itself"
    if library is None:
        return Requirement("NCCL", "2.10", "2.18", "no libnccl.so.2 was found", "fail", "fail", note)
    cuda = f", for CUDA {dotted(library.cuda_version)}" if library.cuda_version else ""
    found = f"{dotted(version)}{cuda}: {library.path} ({library.source})" if version else None
    others = len(training.nccl.libraries) - 1
    return Requirement(
        "NCCL",
        "2.10",
        "2.18",
        found,
        _judge(version is not None and version >= (2, 10), version is not None),
        _judge(version is not None and version >= (2, 18), version is not None),
        (f"{library.path}: {library.error}" if library.error else note) + (f"; {others} more copies" if others else ""),
    )


def _mpi(training: TrainingEnvironment) -> Requirement:
    mpi = training.mpi
    version = mpi.launcher or mpi.library
    row = ("MPI", "Open MPI 4.0 or MPICH", "Open MPI 4.1")
    if version is None:
        if mpi.mpirun is None and mpi.mpi4py is None:
            return Requirement(*row, "neither mpirun nor mpi4py", "fail", "fail")
        return Requirement(*row, None, "unknown", "unknown", mpi.error or f"{mpi.mpirun} does not say what it is")
    open_mpi = version.vendor == "Open MPI"
    launcher = f"{mpi.launcher} ({mpi.mpirun})" if mpi.launcher else "no mpirun"
    library = f"mpi4py {mpi.mpi4py} with {mpi.library}" if mpi.library else "no MPI library for mpi4py"
    return Requirement(
        *row,
        f"{launcher}; {library}",
        _judge(version.version >= (4, 0) if open_mpi else version.vendor == "MPICH", True),
        _judge(open_mpi and version.version >= (4, 1), True),
        "whether it starts is what the probe tries",
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


def _network(training: TrainingEnvironment) -> Requirement:
    """The fastest port counts; what it is plugged into is not seen."""
    network = training.network
    ports = [port for port in network.infiniband or () if port.active is not False]
    rates = [port.rate for port in ports if port.rate is not None and port.link_layer != "Ethernet"]
    speeds = [port.rate * 1000 for port in ports if port.rate is not None]
    cards = [card for card in network.interfaces or () if card.up is not False and not card.virtual]
    speeds += [float(card.speed) for card in cards if card.speed is not None]
    found = [*map(_port, ports), *map(_card, cards)]
    known = network.interfaces is not None
    minimum = _judge(max(speeds, default=0.0) >= _FAST_ETHERNET, bool(speeds))
    recommended = _judge(max(rates, default=0.0) >= _HDR, known and (bool(rates) or not ports))
    note = "of this machine's ports; the way to the other nodes is not seen"
    return Requirement(
        "network between nodes",
        "10 GbE",
        "InfiniBand HDR or NDR",
        "; ".join(found) or ("no port that is no virtual one" if known else None),
        minimum,
        recommended,
        note if ports else f"no InfiniBand port; {note}",
    )


def _port(port: InfinibandPort) -> str:
    rate = f"{port.rate:g} Gb/s" if port.rate is not None else "of unknown rate"
    return f"{port.device} port {port.port}: {port.link_layer or 'link layer not known'}, {rate}"


def _card(card: Interface) -> str:
    return f"{card.name}: {card.speed} Mb/s" if card.speed is not None else f"{card.name}: speed not known"


def _training_package(environment: Environment) -> Requirement:
    installed = environment.packages.onnxruntime
    names = [owner for owner in installed.owners if "training" in owner.name]
    found = ", ".join(f"{owner.name} {owner.version or ''}".strip() for owner in names) or "not installed"
    status = _judge(bool(names), True)
    note = (
        f"the published 1.25.0 was never released: {LAST_RELEASE} is the newest; it shares its folder with the others"
    )
    return Requirement("onnxruntime-training", LAST_RELEASE, LAST_RELEASE, found, status, status, note)


# Name, lowest version (None: any), highest (None: any), note. As the package's metadata has them, but for onnx.
_PACKAGES: tuple[tuple[str, str | None, str | None, str], ...] = (
    ("cerberus", None, None, ""),
    ("flatbuffers", None, None, ""),
    ("h5py", None, None, ""),
    ("numpy", "1.16.6", None, ""),
    ("onnx", None, NEWEST_ONNX, "published without a limit; what newer ones write cannot be trained"),
    ("packaging", None, None, ""),
    ("protobuf", None, None, ""),
    ("sympy", None, None, ""),
    ("setuptools", "61", None, ""),
)


def _package(
    training: TrainingEnvironment, name: str, lowest: str | None, highest: str | None, note: str
) -> Requirement:
    installed = training.packages.get(name)
    version = installed.version if installed is not None else None
    wanted = lowest or (f"up to {highest}" if highest else "any")
    if installed is None:
        return Requirement(name, wanted, wanted, "not installed", "fail", "fail", note)
    fits = lowest is None or (version is not None and at_least(version, lowest))
    if highest is not None and version is not None:
        fits = numbers_of(version)[: len(numbers_of(highest))] <= numbers_of(highest)
    status = _judge(fits, version is not None or wanted == "any")
    return Requirement(name, wanted, wanted, version or "version not known", status, status, note)


def _torch(environment: Environment) -> Requirement:
    torch = environment.packages.torch
    version = torch.version if torch is not None else None
    older = version is not None and not at_least(version, "2.9")
    note = "not published: onnxruntime.training imports it; ORTModule needs one older than 2.9"
    found = version or ("version not known" if torch else "not installed")
    return Requirement(
        "torch",
        "any",
        "older than 2.9",
        found,
        _judge(torch is not None, True),
        _judge(older, version is not None),
        note,
    )


def _horovod(training: TrainingEnvironment) -> Requirement:
    horovod = training.horovod
    note = "published as an alternative; ONNX Runtime dropped it in 2020, and the newest, 0.28.1, is of 2023"
    if horovod is None:
        return Requirement("Horovod", "none", "none", "not installed", "pass", "pass", note)
    built = [
        f"{'with' if there else 'without'} {name}" if there is not None else f"{name} not known"
        for name, there in (("NCCL", horovod.nccl), ("MPI", horovod.mpi))
    ]
    found = f"{horovod.version or 'version not known'}, built {', '.join(built)}"
    if horovod.error is not None:
        note = f"{horovod.error.splitlines()[-1]}; {note}"
    return Requirement("Horovod", "none", "none", found, "pass", "pass", note)


def _build_variable(variable: BuildVariable) -> Requirement:
    wanted = f"unset, or {variable.holds}"
    status = _judge(variable.leads_there is not False, True)
    note = "a build from source reads it, and nothing else; that such a build succeeds is not promised"
    return Requirement(variable.name, wanted, wanted, variable.value or "not set", status, status, note)


_OF_THE_MACHINE: tuple[Callable[[Environment], Requirement], ...] = (_gpus, _driver, _cuda, _cudnn)
_OF_THE_SYSTEM: tuple[Callable[[Environment], Requirement], ...] = (_python, _system, _memory, _gpu_memory)


def _judge(passes: bool, known: bool) -> Status:
    return "unknown" if not known else "pass" if passes else "fail"
