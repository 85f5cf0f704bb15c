"""Fixtures of the lab: ``lab`` is what a test needs, the others are what it consists of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.child import Machine
from tests.lab.installed import OPENS_CUDNN_AT_NEED, older_than, soname
from tests.lab.models import Models
from tests.lab.overlay import Overlay
from tests.lab.stubs import GPU, NVML, Cuda, Stubs, why_not_here
from tests.lab.wheels import Wheels

#: Set to anything, a test that would be skipped because the lab cannot be built fails instead.
STRICT = "ORTGPU_LAB_STRICT"

#: What the extra `distributed` brings and the preflight uses of it, in releases for every Python from 3.10 on.
NCCL_BINDINGS = {"nccl4py": "0.6.0", "cuda-pathfinder": "1.8.0"}


@dataclass
class Lab:
    """Makes machines. Each gets an overlay of its own in ``folder``."""

    folder: Path
    stubs: Stubs
    models: Models
    wheels: Wheels

    def overlay(self) -> Overlay:
        number = sum(1 for _ in self.folder.glob("environment*"))
        return Overlay(self.folder / f"environment{number}")

    def machine(
        self, *, cuda: Cuda | None = None, nvml: NVML | None = None, env: Mapping[str, str | None] | None = None
    ) -> Machine:
        """A machine with everything installed and, unless told otherwise, neither driver nor GPU."""
        return Machine(self.overlay(), self.stubs, cuda, nvml, env or {})

    def machine_that_places(self, provider_library: str) -> Machine:
        """A machine with a GPU on which sessions open and place their nodes as on a real one, and compute nothing."""
        if reason := older_than(OPENS_CUDNN_AT_NEED):
            pytest.skip(reason)
        gpus = (GPU(),)
        machine = self.machine(cuda=Cuda(devices=gpus), nvml=NVML(gpus=gpus), env={"STUB_CUDA_CONTEXT": "1"})
        for name, stub in self.stubs.toolkit(provider_library).items():
            file = machine.overlay.path(f"nvidia/*/lib/{name}").relative_to(machine.overlay.site)
            machine.overlay.replace(str(file), stub)
        machine.overlay.remove("nvidia/cudnn/lib/libcudnn*")  # the real one asks the GPU
        return machine

    def machine_with_nccl(self, gpus: int = 3) -> Machine:
        """A machine with GPUs, on which the real nccl4py meets a CUDA runtime and an NCCL that are stubs."""
        machine = self.machine()
        for distribution, version in NCCL_BINDINGS.items():
            machine.overlay.add_wheel(self.wheels.get(distribution, version))
        machine.overlay.replace("nvidia/nccl/lib/libnccl.so.2", self.stubs.nccl)
        runtime = machine.overlay.path(f"nvidia/*/lib/{soname('libcudart')}").relative_to(machine.overlay.site)
        machine.overlay.replace(str(runtime), self.stubs.cudart)
        folder = self.folder / "nccl"
        folder.mkdir()
        return with_gpus(machine.but(env={"STUB_NCCL_FOLDER": str(folder)}), gpus)


def with_gpus(machine: Machine, count: int) -> Machine:
    """The same machine with so many GPUs."""
    devices = tuple(GPU(uuid=f"GPU-00000000-0000-0000-0000-{number:012}") for number in range(count))
    return machine.but(cuda=Cuda(devices=devices), nvml=NVML(gpus=devices))


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    """The stub libraries of this test run."""
    if reason := why_not_here():
        if os.environ.get(STRICT):
            pytest.fail(f"{STRICT} is set, and {reason}")
        pytest.skip(reason)
    return Stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Model files."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def wheels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Wheels, kept between test runs in pytest's cache, where it has one (not with ``-p no:cacheprovider``)."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    return Wheels(cache.mkdir("lab-wheels") if cache is not None else tmp_path_factory.mktemp("lab-wheels"))


@pytest.fixture
def lab(tmp_path: Path, stubs: Stubs, models: Models, wheels: Wheels) -> Iterator[Lab]:
    """The lab, with a folder of this test's own. Its environments go with the test: some hold gigabytes of wheels."""
    yield Lab(tmp_path, stubs, models, wheels)
    for environment in tmp_path.glob("environment*"):
        shutil.rmtree(environment, ignore_errors=True)


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory, stubs: Stubs, models: Models, wheels: Wheels) -> Iterator[Lab]:
    """The lab, for machines that the tests of a module share and leave as they are."""
    folder = tmp_path_factory.mktemp("lab")
    yield Lab(folder, stubs, models, wheels)
    shutil.rmtree(folder, ignore_errors=True)
