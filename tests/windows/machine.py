"""A Windows machine out of parts: a tree of DLLs with what loads them, and the facts that its files give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ortgpu.diagnosis.facts import Facts, Observed
from ortgpu.environment.libraries.library_file import read_pe
from ortgpu.environment.libraries.loader_windows import missing_from_the_system
from ortgpu.environment.libraries.places import SearchPlaces, folders_of_windows
from ortgpu.environment.libraries.search import resolve
from ortgpu.environment.libraries.wheel import ProviderLibrary, bridge_of, read_provider
from tests.support.made_dlls import X86_64, dll, put
from tests.support.made_facts import HEALTHY
from tests.windows.trees import CUDNN, LAZY, NEEDED, TOOLKIT, places

VISUAL_C = ("MSVCP140.dll", "VCRUNTIME140.dll", "MSVCP140_ATOMIC_WAIT.dll")
OF_WINDOWS = ("KERNEL32.dll", "ntdll.dll")


@dataclass
class Machine:
    """``tmp_path`` with Windows, a driver, and an ONNX Runtime whose provider links ``needs``."""

    tmp_path: Path
    needs: Sequence[str] = NEEDED
    changes: dict[str, Any] = field(default_factory=dict)  # of the places
    mapped: tuple[str, ...] = ()  # the paths of what is loaded

    def __post_init__(self) -> None:
        self.system = put(self.tmp_path / "Windows/System32", *OF_WINDOWS, *VISUAL_C, "nvcuda.dll")
        self.capi = self.tmp_path / "site/onnxruntime/capi"
        self.capi.mkdir(parents=True)
        self.bridge = self.write(self.capi / "onnxruntime_providers_shared.dll", ["KERNEL32.dll"])
        self.provider = self.write(self.capi / "onnxruntime_providers_cuda.dll", self.needs)

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

    def facts(self, **observed: Any) -> Facts:
        """What an inspection finds here, of a machine that is healthy apart from that."""
        provider = self.provider_library
        bridge = read_pe(self.bridge)
        absent = [
            missing_from_the_system(file.path, file.needed, self.mapped, folders_of_windows(self.places.variables))
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
            mapped=self.mapped,
            driver=replace(
                HEALTHY.environment.driver,
                libcuda=str(self.system / "nvcuda.dll"),
                device_nodes=(),
                kernel_version=None,
            ),
            system_libraries_missing=tuple(dict.fromkeys(chain(*absent))),
        )
        return Facts(environment, observed=Observed(**observed))
