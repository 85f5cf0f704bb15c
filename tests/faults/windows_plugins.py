"""Group P on Windows: CUDA as a plugin, beside ONNX Runtime's CPU package.

Wine has no DXGI, by which ONNX Runtime finds GPUs: with everything in order, a plugin lists none there.
"""

from __future__ import annotations

from typing import Any

from tests.faults.on_windows import RTX_4090, SITE_PACKAGES, Break, WindowsCase
from tests.faults.windows_breaks import (
    CAPI,
    CUBLAS,
    CUDA,
    DRIVER,
    all_of,
    deleting,
    only_the_cpu_package,
    removing,
    unpacking,
)
from tests.lab.fixtures import PLUGIN_MODULE
from tests.lab.stubs import NVML, Cuda
from tests.lab.windows import Windows

PLUGIN, VERSION, ANOTHER_RELEASE = "onnxruntime_ep_cuda13", "1.31.1", "1.32.0"
NAME = PLUGIN.replace("_", "-")
PROVIDER = "onnxruntime_providers_cuda.dll"
WHOLE = "NoDeviceError"  # what is left when everything was mended

FOLDER = f"C:\\{CUDA}\\"
REGISTER = f"""
import ctypes, onnxruntime, {PLUGIN} as plugin
for name in ("cublasLt64_13.dll", "cublas64_13.dll"):
    ctypes.WinDLL({FOLDER!r} + name)
onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
"""
OF_THE_PROGRAM = {"providers": ["CUDAExecutionProvider"], "preload": False, "before": REGISTER}
NOT_REGISTERED = {"providers": ["CUDAExecutionProvider"], "preload": False}


def add_plugin(machine: Windows) -> None:
    """Put the provider of the GPU package into a package of its own."""
    info, provider = f"{PLUGIN}-{VERSION}.dist-info", machine.path(f"{CAPI}\\{PROVIDER}").read_bytes()
    files = {
        f"{PLUGIN}\\{PROVIDER}": provider,
        f"{PLUGIN}\\__init__.py": PLUGIN_MODULE.encode(),
        f"{info}\\METADATA": f"Metadata-Version: 2.4\nName: {PLUGIN}\nVersion: {VERSION}\n".encode(),
    }
    recorded = [*(name.replace("\\", "/") for name in files), f"{info}/RECORD"]
    files[f"{info}\\RECORD"] = "".join(f"{name},,\n" for name in recorded).encode()
    for name, content in files.items():
        machine.write(f"{SITE_PACKAGES}\\{name}", content)


def add_file(machine: Windows) -> None:
    """Put the provider into a folder, for the program to register."""
    machine.write(f"plugin\\{PROVIDER}", machine.path(f"{CAPI}\\{PROVIDER}").read_bytes())


def plugin(name: str, error: str, *said: str, breaks: Break = lambda _machine: None, **changes: Any) -> WindowsCase:
    given = {"driver": DRIVER, "plain": "warned", "plain_arguments": OF_THE_PROGRAM, **changes}
    return WindowsCase(f"plugin-{name}", error, said, all_of(add_plugin, only_the_cpu_package, breaks), **given)


def bundle(machine: Windows) -> None:
    """Make a build that bundles CUDA as a plugin: the CPU package, whose build information says so."""
    provider = machine.path(f"{CAPI}\\{PROVIDER}").read_bytes()
    only_the_cpu_package(machine)
    machine.write(f"{CAPI}\\{PROVIDER}", provider)
    extension = f"{CAPI}\\onnxruntime_pybind11_state.pyd"
    content = machine.path(extension).read_bytes()
    said, says = b", fp8-kv-cache=1, bu", b", cuda-plugin-ep=1, "  # "bu" of "build type=Release"
    assert said in content
    machine.write(extension, content.replace(said, says))


PLUGINS = [
    plugin(
        "that-lists-no-device",
        WHOLE,
        *("registered, but lists no GPU", "among the devices of Windows", "onnxruntime-gpu"),
        after="DriverUnusableError",
    ),
    plugin(
        "package-without-its-library",
        "BrokenPackageError",
        *(f"the plugin package {NAME} {VERSION} has no CUDA provider library", "expected in C:\\"),
        breaks=removing(f"{PLUGIN}/{PROVIDER}"),
        plain="raised",
        needs=("a person",),
    ),
    plugin(
        "and-a-library-is-gone",
        "LibraryNotFoundError",
        *(CUBLAS, "nvidia-cublas"),
        breaks=deleting(f"{CUDA}\\{CUBLAS}"),
        plain="raised",
        after=WHOLE,
    ),
    WindowsCase(
        "plugin-and-both-packages",
        "ConflictingPackagesError",
        ("onnxruntime ", "onnxruntime-gpu", "the GPU build was overwritten", "uninstall"),
        all_of(add_plugin, Windows.install_cpu_package),
        driver=DRIVER,
        plain="warned",
        plain_arguments=OF_THE_PROGRAM,
        after="DriverUnusableError",
    ),
    plugin(
        "that-nobody-registered",
        "CPUOnlyPackageError",
        *(f"{NAME} {VERSION} is installed, but this program has not registered it", "get_library_path()"),
        ask="guarded",
        plain_arguments=NOT_REGISTERED,
        after=WHOLE,
    ),
    WindowsCase(
        "plugin-file-that-nobody-registered",
        "CPUOnlyPackageError",
        ("without CUDA", "CUDA as a plugin for ONNX Runtime", "register its library first"),
        all_of(add_file, only_the_cpu_package),
        driver=DRIVER,
        plain="warned",
        after="DriverUnusableError",
    ),
    plugin(
        "and-a-misspelt-option",
        "ProviderOptionError",
        *("devise_id", "device_id"),
        arguments={"providers": [("CUDAExecutionProvider", {"devise_id": "0"})]},
        cpu=None,
        plain_arguments={**OF_THE_PROGRAM, "providers": [("CUDAExecutionProvider", {"devise_id": "0"})]},
        needs=("a person",),
    ),
    plugin(
        "and-a-device-that-is-not-there",
        "DeviceNotFoundError",
        *("7", RTX_4090.name),
        arguments={"device": 7},
        plain="warned logged",
        plain_arguments={**OF_THE_PROGRAM, "providers": [("CUDAExecutionProvider", {"device_id": "7"})]},
        needs=("a person",),
    ),
    plugin(
        "for-a-newer-cuda",
        "DriverTooOldError",
        *("supports CUDA up to 11.8", "the CUDA plugin of ONNX Runtime needs CUDA 13"),
        driver=(Cuda(devices=(RTX_4090,), version=11080), NVML(gpus=(RTX_4090,), driver="522.06", cuda=11080)),
        needs=("driver",),
    ),
    plugin(
        "of-another-release",
        "LibraryVersionError",
        *(f"belongs to ONNX Runtime {VERSION}", f"onnxruntime {ANOTHER_RELEASE} is installed", "Provider_GetHost"),
        breaks=all_of(removing("onnxruntime", f"onnxruntime-{VERSION}.dist-info"), unpacking("onnxruntime-1.32.0")),
        index=(f"onnxruntime=={ANOTHER_RELEASE}", f"onnxruntime=={VERSION}"),
        after=WHOLE,
    ),
    WindowsCase(
        "bundled-plugin-that-only-warned",
        "CPUOnlyPackageError",
        (f"the CUDA plugin of onnxruntime {VERSION} was not registered when it was imported", "preload()"),
        bundle,
        driver=DRIVER,
        prelude="import onnxruntime",
        ask="guarded",
        plain="warned logged",
        after=WHOLE,
    ),
]
