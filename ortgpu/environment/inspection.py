"""All facts in one record."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..process.untranslated import untranslated
from .gpu.driver import Asked, Driver, find_interposed, read_driver
from .host import Host, read_host
from .libraries.catalogue import CUDNN_CODE, TOOLKIT_MAJORS
from .libraries.library_file import LibraryFile, read_library
from .libraries.loader import read_mapped_libraries
from .libraries.loader_windows import WindowsLoader, missing_from_the_system
from .libraries.search import Resolution, places_for, resolve
from .libraries.wheel import (
    Architecture,
    ProviderLibrary,
    read_architectures_of_cudnn,
    read_provider,
    release_wanted,
)
from .packages.installed import Packages, read_packages
from .packages.installer import Installer, read_installer
from .variables import Variables, read_variables


@dataclass(frozen=True, slots=True)
class Environment:
    """All facts that decide whether ONNX Runtime reaches a GPU."""

    host: Host
    installer: Installer
    packages: Packages
    extension: LibraryFile | None  # ONNX Runtime's Python extension; read on Linux and Windows only
    bridge: LibraryFile | None  # libonnxruntime_providers_shared: every provider is opened through it
    provider: ProviderLibrary | None  # None: there is no CUDA provider file
    libraries: tuple[Resolution, ...]
    mapped: tuple[str, ...]  # libraries of this process, by path
    driver: Driver
    variables: Variables
    system_libraries_missing: tuple[str, ...] = ()  # DLLs of Windows and Visual C++ that ONNX Runtime's files link
    cudnn_architectures: tuple[Architecture, ...] | None = None  # targets of cuDNN's code; None: not known
    release_wanted: str | None = None  # release of ONNX Runtime that a plugin needs, if another one is installed
    # The stems of the installed libraries by CUDA major. It is filled only if there is no provider file to name them.
    libraries_by_cuda: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def cuda_major(self) -> int | None:
        """The major version of the CUDA that the provider file links; None if there is none, or it does not say."""
        return self.provider.cuda_major if self.provider is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data, for JSON."""
        return dict(plain_data(self))


@untranslated()
def inspect_environment(*, unasked: Collection[Asked] = (), compare_contents: bool = False) -> Environment:
    """Read all facts, in some tens of milliseconds. A fact that cannot be read is None.

    No CUDA context is created. The only CUDA libraries loaded are the driver's own, libcuda and NVML, unless "libcuda"
    or "nvml" is among the ``unasked``. With ``compare_contents`` all libraries of all packages are read: gigabytes.

    A defective driver may never return from this call. ``ortgpu.diagnose(probe=True)`` asks it in a child first.
    """
    environment = UnreadEnvironment(
        host=read_host(),
        packages=read_packages(compare_contents=compare_contents),
        driver=dataclasses.replace(read_driver(unasked=unasked), interposed=find_interposed()),
    )
    return Environment(**{name: getattr(environment, name) for name in Environment.__slots__})


class UnreadEnvironment(Environment):
    """An environment that reads each fact when it is first asked for, and keeps it."""

    __slots__ = ()

    def __init__(self, **known: Any) -> None:
        for name, value in known.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS:
            raise AttributeError(name)
        with untranslated():
            value = _FACTS[name](self)
        object.__setattr__(self, name, value)
        return value


def _read_provider(environment: Environment) -> ProviderLibrary | None:
    path = environment.packages.onnxruntime.provider_library
    return read_provider(path) if path else None


def _resolve_libraries(environment: Environment) -> tuple[Resolution, ...]:
    provider = environment.provider
    if provider is None or provider.cuda_major is None:
        return ()
    return resolve(places_for(provider, environment.packages.torch), provider.needed, provider.cuda_major)


def _release_wanted(environment: Environment) -> str | None:
    installed = environment.packages.onnxruntime
    is_plugin = installed.provider_library is not None and installed.cuda_is_plugin
    return release_wanted(installed.provider_library or "", installed.version or "") if is_plugin else None


def _read_cudnn_architectures(environment: Environment) -> tuple[Architecture, ...] | None:
    files = (resolution.chosen for resolution in environment.libraries if resolution.spec.stem in CUDNN_CODE)
    return read_architectures_of_cudnn(file.path for file in files if file is not None)


def _libraries_by_cuda(environment: Environment) -> dict[int, tuple[str, ...]]:
    if environment.provider is not None:
        return {}
    stems: dict[int, tuple[str, ...]] = {}
    for major in TOOLKIT_MAJORS:
        resolutions = resolve(places_for(None, environment.packages.torch, cuda_major=major), (), major)
        stems[major] = tuple(resolution.spec.stem for resolution in resolutions if resolution.chosen)
    return stems


def _read(path: str | None) -> LibraryFile | None:
    return read_library(path) if path is not None and sys.platform in ("linux", "win32") else None


def _missing_from_the_system(environment: Environment) -> tuple[str, ...]:
    if sys.platform != "win32":
        return ()
    extension, provider, mapped = environment.extension, environment.provider, environment.mapped
    loader = WindowsLoader()
    absent: list[str] = []
    if extension is not None:  # Python opens it without PATH.
        folders = loader.folders(along_path=False)
        absent += missing_from_the_system(extension.path, extension.needed, mapped, folders)
    if provider is not None:
        folders = loader.folders(along_path=True)
        absent += missing_from_the_system(provider.path, provider.needed, mapped, folders)
    return tuple(dict.fromkeys(absent))


_FACTS: Final[dict[str, Callable[[Environment], Any]]] = {
    "host": lambda _: read_host(with_memory=False),
    "installer": lambda _: read_installer(),
    "packages": lambda _: read_packages(),
    "mapped": lambda _: read_mapped_libraries(),
    "driver": lambda _: read_driver(),
    "variables": lambda _: read_variables(),
    "extension": lambda environment: _read(environment.packages.onnxruntime.extension),
    "bridge": lambda environment: _read(environment.packages.onnxruntime.bridge),
    "provider": _read_provider,
    "libraries": _resolve_libraries,
    "system_libraries_missing": _missing_from_the_system,
    "cudnn_architectures": _read_cudnn_architectures,
    "release_wanted": _release_wanted,
    "libraries_by_cuda": _libraries_by_cuda,
}


def plain_data(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [plain_data(item) for item in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    if hasattr(value, "items"):
        return {str(key): plain_data(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
