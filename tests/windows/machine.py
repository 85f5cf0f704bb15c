"""A Windows machine out of parts: a tree of DLLs with what loads them, and the facts that its files give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ortgpu.diagnosis.facts import Facts, Observed
from ortgpu.environment.libraries.library_file import exported_names, imported_names, read_pe
from ortgpu.environment.libraries.loader_windows import Kernel32, WindowsLoader, missing_from_the_system
from ortgpu.environment.libraries.places import SearchPlaces, folders_of_windows
from ortgpu.environment.libraries.search import resolve
from ortgpu.environment.libraries.wheel import ProviderLibrary, bridge_of, read_provider
from ortgpu.provider.preloading import Plan, PreloadReport, load
from tests.support.made_dlls import X86_64, dll, put
from tests.support.made_facts import HEALTHY
from tests.windows.trees import CUDNN, LAZY, NEEDED, TOOLKIT, places

VISUAL_C = ("MSVCP140.dll", "VCRUNTIME140.dll", "MSVCP140_ATOMIC_WAIT.dll")
OF_WINDOWS = ("KERNEL32.dll", "ntdll.dll")


class PreparedKernel(Kernel32):
    """LoadLibraryExW as Microsoft documents it ("Dynamic-link library search order", winerror.h), on a prepared tree.

    A DLL that is in the process already is found by its name; else beside the one that links it, then in the folders of
    the system. PATH is not searched, as with the flags that :class:`Kernel32` passes.
    """

    def __init__(self, folders: Sequence[str], answers: dict[str, int] | None = None) -> None:
        self.system = list(folders)
        self.in_process: dict[str, str] = {}  # by name in small letters, the first of each
        self.second: list[str] = []
        self.opened: list[str] = []  # by whom this is tested, in order
        self.added: list[str] = []
        self.answers = answers or {}
        self.blocked: dict[str, int] = {}  # by name in small letters: the error of what does not let it be mapped

    def load(self, path: str) -> int:
        by_name = self.in_process.get(path.lower())
        found = path if os.path.isabs(path) else by_name or self._find(path, ())
        if found is None or not os.path.isfile(found):
            return 126
        if found in self.modules():
            return 0
        code = self._map(found)
        if code == 0:
            self.opened.append(os.path.basename(found))
        return code

    def _map(self, path: str) -> int:
        file = read_pe(path)
        if file.problem or file.machine != "x86_64":
            return 193
        before = dict(self.in_process), list(self.second)
        name = os.path.basename(path).lower()
        if name in self.blocked:
            return self.blocked[name]
        if self.in_process.setdefault(name, path) != path:
            self.second.append(path)  # of a name that another file has: nobody gets it who asks by name
        for library in file.needed:
            code = self._serve(library, path)
            if code:
                self.in_process, self.second = before
                return code
        return 0

    def _serve(self, library: str, user: str) -> int:
        if library.startswith("api-ms-"):
            return 0
        if library.lower() not in self.in_process:
            found = self._find(library, (os.path.dirname(user),))
            code = 126 if found is None else self._map(found)
            if code:
                return code
        had = exported_names(self.in_process[library.lower()]) or frozenset()
        taken = imported_names(user, library) or frozenset()
        return 127 if had and not taken <= had else 0

    def _find(self, name: str, first: Iterable[str]) -> str | None:
        paths = (os.path.join(folder, name) for folder in (*first, *self.system, *self.added))
        return next((path for path in paths if os.path.isfile(path)), None)

    def modules(self) -> tuple[str, ...]:
        return (*self.in_process.values(), *self.second)

    def search_also(self, folder: str) -> None:
        self.added.append(folder)

    def folders(self, *, along_path: bool) -> tuple[str, ...]:
        return (*self.system, *self.added)

    def ask(self, path: str, function: str) -> int | None:
        if os.path.basename(path).lower() not in self.in_process:
            return None
        return self.answers.get(function)


@dataclass
class Machine:
    """``tmp_path`` with Windows, a driver, and an ONNX Runtime whose provider links ``needs``."""

    tmp_path: Path
    needs: Sequence[str] = NEEDED
    changes: dict[str, Any] = field(default_factory=dict)  # of the places
    answers: dict[str, int] = field(default_factory=lambda: {"cudnnGetCudartVersion": 13000})

    def __post_init__(self) -> None:
        self.system = put(self.tmp_path / "Windows/System32", *OF_WINDOWS, *VISUAL_C, "nvcuda.dll")
        self.capi = self.tmp_path / "site/onnxruntime/capi"
        self.capi.mkdir(parents=True)
        self.bridge = self.write(self.capi / "onnxruntime_providers_shared.dll", ["KERNEL32.dll"])
        self.provider = self.write(self.capi / "onnxruntime_providers_cuda.dll", self.needs)
        self.kernel = PreparedKernel(folders_of_windows(self.places.variables), self.answers)
        self.loader = WindowsLoader(self.kernel)

    @staticmethod
    def write(path: Path, needs: Any = (), **options: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dll(path.name, needs, **{"machine": X86_64, **options}))
        return path

    def wheels(self, *left_out: str, but: Callable[[str], Any] = lambda _: ()) -> Path:
        """NVIDIA's wheels for CUDA 13 along the search path, but for some DLLs. ``but``: what a DLL links."""
        site = self.tmp_path / "site"
        links = {"cublas64_13.dll": ["cublasLt64_13.dll"], "cudnn_graph64_9.dll": ["KERNEL32.dll"]}
        for names, folder in (((*TOOLKIT, *LAZY), "nvidia/cu13/bin/x86_64"), (CUDNN, "nvidia/cudnn/bin")):
            for name in (each for each in names if each not in left_out):
                self.write(site / folder / name, but(name) or links.get(name, ["KERNEL32.dll"]))
        self.changes["sys_path"] = (str(site),)
        return site

    @property
    def places(self) -> SearchPlaces:
        return places(self.tmp_path, **{"mapped": (), **self.changes})

    @property
    def provider_library(self) -> ProviderLibrary:
        return read_provider(self.provider)

    def preload(self, *, everything: bool = False) -> PreloadReport:
        where = replace(self.places, mapped=self.kernel.modules())
        provider = self.provider_library
        found = Plan(provider, resolve(where, provider.needed, provider.cuda_major or 0))
        return load(found, lazily_opened=None if everything else frozenset(), loader=self.loader)

    def facts(self, **observed: Any) -> Facts:
        """What an inspection finds here, of a machine that is healthy apart from that."""
        provider = self.provider_library
        bridge = read_pe(self.bridge)
        absent = [
            missing_from_the_system(file.path, file.needed, self.kernel.modules(), self.kernel.system)
            for file in (bridge, provider)
        ]
        environment = replace(
            HEALTHY.environment,
            host=replace(HEALTHY.environment.host, system="Windows", machine="AMD64", os_name="Windows 11", libc=None),
            packages=replace(
                HEALTHY.environment.packages,
                onnxruntime=replace(
                    HEALTHY.environment.packages.onnxruntime,
                    folder=str(self.capi.parent),
                    provider_library=str(self.provider),
                    extension=str(self.capi / "onnxruntime_pybind11_state.pyd"),
                ),
                nvidia=(),
            ),
            extension=None,
            bridge=read_pe(bridge_of(provider.path)),
            provider=provider,
            libraries=resolve(self.places, provider.needed, provider.cuda_major or 0) if provider.cuda_major else (),
            mapped=self.kernel.modules(),
            driver=replace(
                HEALTHY.environment.driver,
                libcuda=str(self.system / "nvcuda.dll"),
                device_nodes=(),
                kernel_version=None,
            ),
            system_libraries_missing=tuple(dict.fromkeys(chain(*absent))),
        )
        return Facts(environment, observed=Observed(**observed))
