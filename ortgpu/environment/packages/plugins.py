"""How CUDA reaches ONNX Runtime: built into it, or as a plugin that a package or the program brings.

Since release 1.23 an execution provider may be a plugin: a library that exports ``CreateEpFactories`` and is registered
with ``onnxruntime.register_execution_provider_library``. Packages of plugins are named ``onnxruntime-ep-*``. Their
modules have ``get_library_path()`` and ``get_ep_name()`` and no entry points. None of them is imported here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..libraries.library_file import read_section
from .metadata import MetadataFolder, Place, list_distributions, list_names, read_text

Way = Literal["built in", "registered by the program", "bundled plugin", "plugin package"]

CUDA: Final = "CUDAExecutionProvider"
PREFIX: Final = "onnxruntime-ep-"  # onnxruntime-ep-cuda13, onnxruntime-ep-webgpu
_NVIDIA: Final = 0x10DE  # number of the vendor on the PCI bus
LIBRARY: Final = "_ORTGPU_CUDA_PLUGIN"  # A child process reads the plugin's file of its parent's program in it.
FILE_NAMES: Final = {"Linux": "lib{}.so", "Windows": "{}.dll", "Darwin": "lib{}.dylib"}  # file names of providers
CUDA_LIBRARY: Final = re.compile(r"(lib)?onnxruntime_providers_cuda\w*\.(so|dll)")


@dataclass(frozen=True, slots=True)
class PluginPackage:
    """A distribution that brings an execution provider as a plugin, or the metadata of one.

    Attributes:
        folder: the folder of its module; None for a meta-package.
        library: the CUDA provider's file in that folder; None if there is none.
    """

    name: str
    version: str | None
    location: str
    folder: str | None
    library: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version or ''}".rstrip()

    @property
    def cuda_major(self) -> int | None:
        match = re.search(r"-(?:cuda|cu)(\d+)$", self.name)
        return int(match[1]) if match else None

    @property
    def is_for_cuda(self) -> bool:
        return self.library is not None or re.fullmatch(PREFIX + r"cuda\d*", self.name) is not None


@dataclass(frozen=True, slots=True)
class Arrival:
    """The way CUDA reaches ONNX Runtime, and the provider's file."""

    way: Way
    library: str
    package: PluginPackage | None = None  # owner of the file, for a "plugin package"

    def __str__(self) -> str:
        if self.way == "registered by the program":
            return f"plugin {self.way}"
        return f"{self.way}: {self.package}" if self.package is not None else self.way

    @property
    def is_plugin(self) -> bool:
        return self.way != "built in"


def read_plugins(places: Sequence[Place]) -> tuple[PluginPackage, ...]:
    plugins = [
        _read_plugin(dist, (place, *places))
        for place in places
        if any(name.startswith("onnxruntime_ep_") for name in place.names)
        for dist in list_distributions(place)
        if dist.name.startswith(PREFIX)
    ]
    return tuple(sorted(plugins, key=lambda one: -(one.cuda_major or 0)))


def _read_plugin(one: MetadataFolder, places: Sequence[Place]) -> PluginPackage:
    # The module of onnxruntime-ep-nv-tensorrt-rtx-cu13 has no "cu13" in its name. An editable install has its module
    # elsewhere.
    modules = [*(one.read("top_level.txt") or b"").decode("utf-8", "replace").split(), one.name.replace("-", "_")]
    candidates = (os.path.join(place.folder, module) for place in places for module in modules if module in place.names)
    folder = next(candidates, None)
    libraries = sorted(filter(CUDA_LIBRARY.fullmatch, list_names(folder))) if folder is not None else []
    library = os.path.join(folder or "", libraries[0]) if libraries else None
    return PluginPackage(one.name, one.read_version(), one.location, folder, library)


def provider_file_name(provider: str, system: str) -> str:
    return FILE_NAMES.get(system, FILE_NAMES["Linux"]).format(f"onnxruntime_providers_{provider}")


def choose_arrival(
    built_in: str | None,
    extension: str | None,
    plugins: Sequence[PluginPackage],
    *,
    in_process: bool,
    driver_cuda: int | None = None,
    loaded: str | None = None,
) -> Arrival | None:
    """Return how CUDA arrives: by a registered plugin, else the built-in or bundled provider, else a package.

    A registered file of a bundled plugin or of a package is named so, whoever registered it. Next comes a file that
    lists no GPU. Last comes the file that the program of another process had registered: the parent process, or the
    process that pickled a session.

    Args:
        built_in: the provider's file in ONNX Runtime's own package.
        extension: the file of its extension module.
        in_process: this process uses the package, and its program may have registered a plugin.
        driver_cuda: the major version of CUDA that the driver supports. It decides between several packages.
        loaded: the file of a plugin that this process has opened, if nothing is built in.
    """
    registered = registered_library() if in_process else None
    if registered is not None:
        if _is_file(registered, built_in) and _bundles_plugin(extension, sys.modules.get("onnxruntime")):
            return Arrival("bundled plugin", registered)
        package = next((plugin for plugin in plugins if _is_file(registered, plugin.library)), None)
        return Arrival("plugin package" if package is not None else "registered by the program", registered, package)
    if built_in is not None:
        bundled = _bundles_plugin(extension, sys.modules.get("onnxruntime") if in_process else None)
        return Arrival("bundled plugin" if bundled else "built in", built_in)
    usable = [plugin for plugin in plugins if plugin.library is not None]
    fitting = [plugin for plugin in usable if driver_cuda is None or (plugin.cuda_major or 0) <= driver_cuda]
    package = next(iter(fitting or usable), None)
    if package is not None and package.library is not None:
        return Arrival("plugin package", package.library, package)
    library = loaded or _told or os.environ.get(LIBRARY) if in_process else None
    return Arrival("registered by the program", library) if library and os.path.isfile(library) else None


def _is_file(path: str, other: str | None) -> bool:
    return other is not None and os.path.realpath(path) == os.path.realpath(other)


_told: str | None = None


def tell(library: str) -> None:
    """Set the plugin's file that another process had registered. A session registers it if there is no other CUDA."""
    global _told
    _told = library


def environ_of_child() -> dict[str, str]:
    """Return the variables for a child that runs modules of this library, not this program.

    They name the CUDA plugin that this program has registered. The guard is off, because the child compares with plain
    ONNX Runtime. So is ONNX Runtime's telemetry: it writes to the temporary folder, through links of other users.
    """
    library = registered_library()
    variables = {name: value for name, value in os.environ.items() if name != "ORTGPU_ENFORCE"}
    return {**variables, "ORT_DISABLE_TELEMETRY": "1", **({LIBRARY: library} if library is not None else {})}


def registered_library() -> str | None:
    """Return the file of a CUDA plugin that is registered in this process and lists a GPU; None if there is none."""
    for device in _listed_devices():
        if device.ep_name == CUDA and (path := dict(device.ep_metadata).get("library_path")):
            return str(path)
    return None


def listed_providers() -> tuple[str, ...]:
    """Return the providers that list a device in this process: the CPU provider and registered plugins."""
    return tuple(dict.fromkeys(device.ep_name for device in _listed_devices()))


def listed_accelerators() -> frozenset[str]:
    """Return the providers of registered plugins that list a GPU or an NPU in this process."""
    return frozenset(device.ep_name for device in _listed_devices() if device.device.type.name in ("GPU", "NPU"))


def list_other_cuda_plugins() -> tuple[Any, ...]:
    """Return the NVIDIA GPUs that registered plugins list, if ONNX Runtime itself does not know their providers."""
    ask: Any = getattr(sys.modules.get("onnxruntime"), "get_all_providers", tuple)
    return tuple(
        device
        for device in _listed_devices()
        if device.device.type.name == "GPU" and device.device.vendor_id == _NVIDIA and device.ep_name not in ask()
    )


def takes_ordinal(provider: str) -> bool:
    """Return True if a registered plugin selects its device by an option ``device_id``, as CUDA's provider does."""
    return any(device.ep_name == provider and "device_id" in dict(device.ep_options) for device in _listed_devices())


def _listed_devices() -> Sequence[Any]:
    ask: Any = getattr(sys.modules.get("onnxruntime"), "get_ep_devices", tuple)
    try:
        return tuple(ask())
    except Exception:  # noqa: BLE001 - a mock in its place may do anything
        return ()


def _bundles_plugin(extension: str | None, module: object) -> bool:
    """Return True if ONNX Runtime registers its own provider file as a plugin, according to its build information."""
    build_info: Any = getattr(module, "get_build_info", None)
    if callable(build_info):
        return _MARK.decode() in str(build_info())
    if extension is None:
        return False
    package = os.path.dirname(os.path.dirname(extension))
    if "cuda-plugin-ep" not in read_text(os.path.join(package, "__init__.py")):
        return False
    return _MARK in (read_section(extension, ".rodata") or b"")


_MARK: Final = b", cuda-plugin-ep="
