"""Group B, what is newer than this library: an ONNX Runtime for the CUDA after the newest that it knows."""

from __future__ import annotations

from tests.faults.case import MENDED, Case, edit, in_group, own_path
from tests.faults.library_versions import FOR_CUDA_13
from tests.faults.package_files import BUILD, CUDA_PROVIDER
from tests.lab import Overlay
from tests.lab.fixtures import Lab

NEWER = "1.99.0"


def onnxruntime_for_cuda_14(_lab: Lab, overlay: Overlay) -> None:
    """The installed one under another version, with a provider that links the libraries of the next CUDA."""
    edit(overlay, CUDA_PROVIDER, rb"(libcublasLt|libcublas|libcudart)\.so\.13\0", "\\1.so.14\0")
    edit(overlay, BUILD, rb"(__version__ = )'.*'", rf"\1'{NEWER}'")
    folder = own_path(overlay, "onnxruntime_gpu-*.dist-info")
    newer = f"onnxruntime_gpu-{NEWER}.dist-info"
    overlay.rename(folder, newer)
    edit(overlay, f"{newer}/METADATA", rb"(?m)^Version: .*$", f"Version: {NEWER}")
    edit(overlay, f"{newer}/RECORD", folder.replace(".", r"\.").encode(), newer)
    edit(overlay, f"{newer}/RECORD", rb"(?m)^(%s),.*$" % BUILD.replace(".", r"\.").encode(), r"\1,,")


def with_cuda_14(lab: Lab, overlay: Overlay) -> None:
    """Its libraries too: in the folder where they would be, beside those of CUDA 13."""
    onnxruntime_for_cuda_14(lab, overlay)
    for soname in ("libcublasLt.so.14", "libcublas.so.14", "libcudart.so.14", "libnvrtc.so.14", "libcufft.so.13"):
        overlay.replace(f"nvidia/cu14/lib/{soname}", lab.stubs.library(soname))
    curand = own_path(overlay, "nvidia/cu13/lib/libcurand.so.10")
    overlay.duplicate(curand, "nvidia/cu14/lib/libcurand.so.10")


CASES = in_group(
    "B",
    [
        Case(
            "cuda-14-is-not-installed",
            "LibraryVersionError",
            ("libcublas.so.14", "install CUDA 14", f"'onnxruntime-gpu>=1.28,<{NEWER}'"),
            onnxruntime_for_cuda_14,
            silent_about=("system package",),
            after=MENDED,
            needs=("",),
            since=FOR_CUDA_13,
        ),
        Case(
            "cuda-14-and-no-driver",
            MENDED,
            ("libcuda.so.1", "NVIDIA driver for CUDA 14"),
            with_cuda_14,
            silent_about=("library-not-found", "library-version"),
            needs=("driver", "host"),
            since=FOR_CUDA_13,
        ),
    ],
)
