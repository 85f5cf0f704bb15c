"""Releases of ONNX Runtime, what ``readelf -d`` says of their providers, and what they want of a driver."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from ortgpu.environment.libraries.catalogue import CUDNN_CORE_PARTS, LIBRARIES
from tests.lab import Stubs
from tests.lab.stubs import SOURCES


@dataclass(frozen=True)
class Release:
    """A release, and what ``readelf -d`` says of its provider: the library under test reads files by its own means.

    Attributes:
        linked: the CUDA libraries that the provider links, in the order of the file.
        opened: those that it opens on demand, of those that a model can need.
        links_driver: whether it links libcuda.so.1, so that it cannot be opened where there is no driver.
        imports_alone: whether ``import onnxruntime`` works without CUDA libraries in the process.
        places: whether it can tell which node is placed where.
    """

    version: str
    cuda: int
    linked: tuple[str, ...]
    opened: tuple[str, ...] = ()
    links_driver: bool = False
    imports_alone: bool = True
    places: bool = False

    def __str__(self) -> str:
        return self.version

    @property
    def cudnn(self) -> str:
        return next(soname for soname in (*self.linked, *self.opened) if soname.startswith("libcudnn.so"))

    @property
    def parts_of_cudnn(self) -> tuple[str, ...]:
        """Those that the first convolution opens."""
        major = int(self.cudnn.rpartition(".")[2])
        return tuple(f"{stem}.so.{major}" for stem in CUDNN_CORE_PARTS[major])

    @property
    def requirements(self) -> list[str]:
        """What pip is asked for. The wheels are the catalogue's, so that what errors advise is what is tested.

        Nothing that only the command line uses is among them: a session must do without.
        """
        wheels = dict.fromkeys(spec.wheels[self.cuda] for spec in LIBRARIES if self.cuda in spec.wheels)
        return [f"onnxruntime-gpu=={self.version}", *wheels, "nvidia-ml-py", "onnx", "numpy"]


def sonames(*names: str) -> tuple[str, ...]:
    """``cublas.12`` is libcublas.so.12."""
    return tuple("lib{}.so.{}".format(*name.split(".", 1)) for name in names)


def shortened(soname: str) -> str:
    return soname.removeprefix("lib").replace(".so", "", 1)


RELEASES = (
    Release("1.18.1", 11, sonames("cublasLt.11", "cublas.11", "cudnn.8", "curand.10", "cufft.10", "cudart.11.0")),
    Release(
        "1.22.0",
        12,
        sonames("cublasLt.12", "cublas.12", "cudnn.9", "curand.10", "cufft.11", "cudart.12", "nvrtc.12"),
    ),
    Release(
        "1.26.0",
        12,
        sonames("cublasLt.12", "cublas.12", "cudnn.9", "curand.10", "cufft.11", "cudart.12"),
        places=True,
    ),
    Release(
        "1.27.0",
        13,
        sonames("cublasLt.13", "cublas.13", "curand.10", "cufft.12", "cudart.13", "nvrtc.13", "cudnn.9"),
        links_driver=True,
        imports_alone=False,
        places=True,
    ),
    Release(
        "1.31.1",
        13,
        sonames("cublasLt.13", "cublas.13", "curand.10", "cudart.13"),
        opened=sonames("cudnn.9", "cufft.12"),
        links_driver=True,
        places=True,
    ),
)

# By CUDA major: what a driver of the major before says of itself, and the fewest that a driver must have. Every driver
# of a major serves every runtime of it: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility".
TOO_OLD = {11: (10020, "440.33.01"), 12: (11080, "520.61.05"), 13: (12080, "570.86.15")}
OLDEST = {11: (11000, "450.80.02"), 12: (12000, "525.60.13"), 13: (13000, "580.65.06")}

OLDER_DRIVER = """
#define cuGetProcAddress stub_for_cuda_11
#define cuGetProcAddress_v2 stub_for_cuda_12
#include "libcuda_stub.c"
#undef cuGetProcAddress
#undef cuGetProcAddress_v2

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    return stub_for_cuda_12(symbol, function, version, flags, status);
}

/* The runtime of CUDA 11 asks for this one by name, and takes what it gets for a function of four arguments. */
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    int result = stub_for_cuda_11(symbol, function, version, flags);
    if (version < 12000 && !strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress;
    return result;
}

/* Looked up by 1.18.1 and 1.22.0 while the provider is being loaded. Where one is missing, or libcuda.so.1 is, they die
 * of SIGSEGV: they throw before the library has what their exceptions need (onnxruntime issue 24652). */
int cuFuncSetAttribute(void) { return NOT_SUPPORTED; }
int cuFuncSetCacheConfig(void) { return NOT_SUPPORTED; }
int cuLaunchCooperativeKernel(void) { return NOT_SUPPORTED; }
int cuLaunchKernel(void) { return NOT_SUPPORTED; }
int cuLinkAddData_v2(void) { return NOT_SUPPORTED; }
int cuLinkAddFile_v2(void) { return NOT_SUPPORTED; }
int cuLinkComplete(void) { return NOT_SUPPORTED; }
int cuLinkCreate_v2(void) { return NOT_SUPPORTED; }
int cuLinkDestroy(void) { return NOT_SUPPORTED; }
"""


class StubsForOlderReleases(Stubs):
    """The lab's driver, and what older providers and runtimes want of one."""

    @functools.cached_property
    def cuda(self) -> Path:
        source = self.folder / "libcuda_for_older_releases.c"
        source.write_text(OLDER_DRIVER, encoding="utf-8")
        return self._build(str(source), "cuda/libcuda.so.1", "-Wl,-soname,libcuda.so.1", f"-I{SOURCES}")
