"""Fixtures of the lab: ``lab`` is what a test needs, the others are what it consists of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from tests.lab.child import Machine
from tests.lab.installed import CUDA, GPU_DISTRIBUTION, OPENS_CUDNN_AT_NEED, older_than, soname
from tests.lab.models import Models
from tests.lab.overlay import Overlay, installed_site
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

    def machine_with_plugin(self, *, packaged: bool = True, gpus: int = 1) -> Machine:
        """A machine that places, with the CPU package, and CUDA's provider as a plugin of a package of its own.

        ``packaged`` False: the file is in the folder "plugin" of site-packages, for the program to register. ONNX
        Runtime's search for devices sees the GPUs.
        """
        machine = with_gpus(self.machine_that_places(str(provider_library())), gpus)
        add_plugin(machine.overlay, PLUGIN if packaged else "plugin", packaged=packaged)
        machine.overlay.uninstall(GPU_DISTRIBUTION).add_wheel(self.wheels.cpu_twin)
        return self.with_pci_devices(machine, gpus)

    def machine_with_bundled_plugin(self, version: str | None = None) -> Machine:
        """A machine with a build that bundles CUDA as a plugin: the CPU package, whose build information says so.

        ``version``: of that package, where it is not that of the provider.
        """
        if reason := older_than((1, 31)):  # whose __init__.py registers such a plugin
            pytest.skip(reason)
        machine = self.machine_with_plugin(packaged=False, gpus=2)
        if version is not None:
            machine.overlay.uninstall("onnxruntime").add_wheel(self.wheels.get("onnxruntime", version))
        library = provider_library().name
        machine.overlay.duplicate(f"plugin/{library}", f"onnxruntime/capi/{library}").remove("plugin")
        extension = machine.overlay.path("onnxruntime/capi/onnxruntime_pybind11_state*.so")
        content = extension.read_bytes()
        said, says = b", fp8-kv-cache=1, bu", b", cuda-plugin-ep=1, "  # "bu" of "build type=Release"
        assert content.count(said) == 2, "as a string, and in the pieces from which get_build_info makes another"
        machine.overlay.replace(f"onnxruntime/capi/{extension.name}", content.replace(said, says))
        return machine

    def with_pci_devices(self, machine: Machine, gpus: int) -> Machine:
        """The same machine, where ONNX Runtime's search for devices sees so many GPUs."""
        devices = self.folder / f"pci{machine.overlay.root.name}"
        for number in range(gpus):
            folder = devices / f"0000:{number + 1:02x}:00.0"
            folder.mkdir(parents=True)
            for name, value in {"vendor": "0x10de", "device": "0x2335", "class": "0x030200"}.items():
                (folder / name).write_text(value + "\n", encoding="ascii")
        return machine.but(env={**machine.env, "STUB_PCI_DEVICES": str(devices)})

    def machine_with_nccl(self, gpus: int = 3) -> Machine:
        """A machine with GPUs, on which the real nccl4py meets a CUDA runtime and an NCCL that are stubs."""
        return with_gpus(self.with_nccl(self.machine()), gpus)

    def with_nccl(self, machine: Machine) -> Machine:
        """The same machine with nccl4py, and stubs of a CUDA runtime and an NCCL that work together."""
        for distribution, version in NCCL_BINDINGS.items():
            machine.overlay.add_wheel(self.wheels.get(distribution, version))
        machine.overlay.replace("nvidia/nccl/lib/libnccl.so.2", self.stubs.nccl)
        runtime = machine.overlay.path(f"nvidia/*/lib/{soname('libcudart')}").relative_to(machine.overlay.site)
        machine.overlay.replace(str(runtime), self.stubs.cudart)
        folder = self.folder / "nccl"
        folder.mkdir()
        return machine.but(env={**machine.env, "STUB_NCCL_FOLDER": str(folder)})


def provider_library() -> Path:
    """The CUDA provider's file of the installed GPU package."""
    (found,) = installed_site().glob("onnxruntime/capi/*onnxruntime_providers_cuda.*")
    return found


#: Of onnxruntime-ep-webgpu 0.4.0, whose form others are to have
PLUGIN_MODULE = """
from pathlib import Path

def get_library_path() -> str:
    (path,) = Path(__file__).parent.glob("*onnxruntime_providers_*")
    return str(path)

def get_ep_name() -> str:
    return "CUDAExecutionProvider"

def get_ep_names() -> list[str]:
    return [get_ep_name()]
"""


PLUGIN = f"onnxruntime_ep_cuda{CUDA}"  # the announced name, as that of a module


def add_plugin(overlay: Overlay, name: str = PLUGIN, *, packaged: bool = True, content: bytes | None = None) -> None:
    """Put the provider's file of the GPU package into another folder, that of a package if ``packaged``.

    ``content``: other bytes in its place.
    """
    library = provider_library()
    if content is None:
        overlay.duplicate(f"onnxruntime/capi/{library.name}", f"{name}/{library.name}")
    else:
        overlay.replace(f"{name}/{library.name}", content)
    if not packaged:
        return
    overlay.replace(f"{name}/__init__.py", PLUGIN_MODULE.encode())
    version = metadata.version(GPU_DISTRIBUTION)
    folder = f"{name}-{version}.dist-info"
    overlay.replace(f"{folder}/METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n".encode())
    files = (f"{name}/__init__.py", f"{name}/{library.name}", f"{folder}/METADATA", f"{folder}/RECORD")
    overlay.replace(f"{folder}/RECORD", "".join(f"{file},,\n" for file in files).encode())


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
