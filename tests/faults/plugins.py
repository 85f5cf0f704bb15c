"""Group P: CUDA as a plugin, which a package or the program brings to ONNX Runtime's CPU package.

The machine has GPUs, and the lab's CUDA libraries: a real session opens there, and computes nothing. Plain ONNX Runtime
registers no package by itself, so its program does, as the pages of such packages say.
"""

from __future__ import annotations

from tests.faults.case import MENDED, OPENS, Case, in_group, library, removing
from tests.faults.packages import cpu_only
from tests.lab import GPU, NVML, Cuda, Machine, Overlay
from tests.lab.fixtures import PLUGIN, Lab, add_plugin
from tests.lab.installed import CUDA, LINKED, OPENS_CUDNN_AT_NEED, VERSION

NAME = PLUGIN.replace("_", "-")

#: A release whose core ends the process in which the installed one's provider is registered.
ANOTHER_RELEASE = "1.32.0"

#: The first release whose __init__.py registers a bundled plugin.
BUNDLES = (1, 31)

REGISTER = f"""
import ctypes, glob, os, onnxruntime, {PLUGIN} as plugin
site = os.path.dirname(os.path.dirname(plugin.__file__))
for name in {LINKED!r}:
    for path in glob.glob(os.path.join(site, "nvidia", "*", "lib", name)):
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
"""
OF_THE_PROGRAM = {"providers": ["CUDAExecutionProvider"], "preload": False, "before": REGISTER}

#: An illegal access of an earlier run, by whichever library.
STICKY = """
import os, ortgpu
from ortgpu.diagnosis.probe.probing import RELU
session = ortgpu.GPUSession(RELU)
os.environ["STUB_CUDA_STICKY"] = "700"
"""


def with_plugin(lab: Lab) -> Machine:
    return lab.machine_with_plugin()


def without_pci_devices(lab: Lab) -> Machine:
    """As in a sandbox (gVisor) and in a container without /sys, where CUDA works."""
    machine = with_plugin(lab)
    folder = lab.folder / "no-devices"
    folder.mkdir(exist_ok=True)
    return machine.but(env={**machine.env, "STUB_PCI_DEVICES": str(folder)})


def with_driver_for_cuda_11(lab: Lab) -> Machine:
    gpus = (GPU(),)
    nvml = NVML(gpus=gpus, driver="520.61.05", cuda=11080)
    machine = with_plugin(lab).but(cuda=Cuda(devices=gpus, version=11080), nvml=nvml)
    return machine.but(env={**machine.env, "STUB_CUDART_CODE": "35"})


def core_of_another_release(lab: Lab, overlay: Overlay) -> None:
    overlay.uninstall("onnxruntime").add_wheel(lab.wheels.get("onnxruntime", ANOTHER_RELEASE))


def plugin_without_its_library_of_cuda(lab: Lab, overlay: Overlay) -> None:
    """Of an environment without the lab's libraries, with which the real one that the fix installs does not work."""
    add_plugin(overlay)
    cpu_only(lab, overlay)
    overlay.remove(library("libcurand"))


def gpu_package_below(lab: Lab, overlay: Overlay) -> None:
    """What pip leaves that was told to install onnxruntime-gpu first, and a plugin with its core then."""
    overlay.uninstall("onnxruntime").reinstall("onnxruntime-gpu").add_wheel(lab.wheels.cpu_twin)


CASES = in_group(
    "P",
    [
        Case(
            "plugin-of-another-release",
            "LibraryVersionError",
            (f"belongs to ONNX Runtime {VERSION}", f"onnxruntime {ANOTHER_RELEASE} is installed", "Provider_GetHost"),
            core_of_another_release,
            starts=with_plugin,
            details={"needed": [f"onnxruntime {VERSION}"]},
            plain="aborted",
            plain_arguments=OF_THE_PROGRAM,
            after=OPENS,
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-that-lists-no-device",
            "NoDeviceError",
            ("registered, but lists no GPU", "/sys/bus/pci/devices", "onnxruntime-gpu"),
            starts=without_pci_devices,
            plain="warned",
            plain_arguments=OF_THE_PROGRAM,
            after=OPENS,
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-package-without-its-library",
            "BrokenPackageError",
            (f"the plugin package {NAME} {VERSION} has no CUDA provider library", "expected in /"),
            removing(f"{PLUGIN}/*providers_cuda*"),
            starts=with_plugin,
            details={"package": NAME},
            plain="raised",
            plain_arguments=OF_THE_PROGRAM,
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-a-library-is-gone",
            "LibraryNotFoundError",
            ("libcurand.so.10", "nvidia-curand"),
            plugin_without_its_library_of_cuda,
            others=(MENDED,),
            plain="raised",
            plain_arguments=OF_THE_PROGRAM,
            after=MENDED,
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-both-packages",
            "ConflictingPackagesError",
            ("onnxruntime ", "onnxruntime-gpu", "the GPU build was overwritten", "uninstall"),
            gpu_package_below,
            starts=with_plugin,
            details={"packages": ["onnxruntime", "onnxruntime-gpu"]},
            plain="warned",  # CUDA is not in this build; a program that registers the plugin has it
            after=OPENS,
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-that-nobody-registered",
            "CPUOnlyPackageError",
            (f"{NAME} {VERSION} is installed, but this program has not registered it", "get_library_path()"),
            starts=with_plugin,
            ask="guarded",
            details={"package": "onnxruntime"},
            plain="warned",
            after=OPENS,
            slow_fix=False,
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-file-that-nobody-registered",
            "CPUOnlyPackageError",
            ("without CUDA", "CUDA as a plugin for ONNX Runtime", "register its library first"),
            starts=lambda lab: lab.machine_with_plugin(packaged=False),
            plain="warned",
            after=OPENS,
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-a-misspelt-option",
            "ProviderOptionError",
            ("devise_id", "device_id"),
            starts=with_plugin,
            arguments={"providers": [("CUDAExecutionProvider", {"devise_id": "0"})]},
            cpu=False,
            plain="aborted logged",
            plain_arguments={**OF_THE_PROGRAM, "providers": [("CUDAExecutionProvider", {"devise_id": "0"})]},
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-a-device-that-is-not-there",
            "DeviceNotFoundError",
            ("7", "NVIDIA H200"),
            starts=with_plugin,
            arguments={"device": 7},
            details={"requested": 7},
            plain="logged",
            plain_arguments={**OF_THE_PROGRAM, "providers": [("CUDAExecutionProvider", {"device_id": "7"})]},
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-a-branch",
            "PlacementError",
            ("cannot compute If", "Provider_GetHost"),
            starts=with_plugin,
            model="branch",
            plain="aborted",
            plain_arguments=OF_THE_PROGRAM,
            needs=("", ""),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "plugin-and-a-sticky-error",
            "PoisonedContextError",
            ("ended this process's use of the GPU", "restart this process"),
            starts=with_plugin,
            prelude=STICKY,
            plain="aborted logged",
            plain_arguments={"providers": ["CUDAExecutionProvider"], "preload": False},
            needs=("",),
            since=OPENS_CUDNN_AT_NEED,
        ),
        Case(
            "bundled-plugin-that-only-warned",
            "CPUOnlyPackageError",
            (f"the CUDA plugin of onnxruntime {VERSION} was not registered when it was imported", "preload()"),
            prelude="import onnxruntime",
            starts=lambda lab: lab.machine_with_bundled_plugin(),
            ask="guarded",
            details={"package": "onnxruntime"},
            plain="warned",
            after=OPENS,
            slow_fix=False,
            since=BUNDLES,
        ),
        Case(
            "plugin-for-a-newer-cuda",
            "DriverTooOldError",
            ("supports CUDA up to 11.8", f"the CUDA plugin of ONNX Runtime needs CUDA {CUDA}"),
            starts=with_driver_for_cuda_11,
            plain="warned",
            plain_arguments=OF_THE_PROGRAM,
            needs=("driver",),
            since=OPENS_CUDNN_AT_NEED,
        ),
    ],
)
