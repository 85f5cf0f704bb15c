"""Group B: CUDA libraries of other versions than the provider needs, and providers that need others."""

from __future__ import annotations

import os
import shutil
import zipfile
from typing import Literal

from tests.faults.case import H200, MENDED, NEEDED_BY_CONV, Break, Case, in_group, library, own_path, with_gpus
from tests.faults.driver import STUB_REFUSED, V100
from tests.faults.package_files import CUDA_PROVIDER
from tests.lab import NVML, Cuda, Overlay
from tests.lab.fixtures import Lab
from tests.lab.installed import CUDA, LINKED, soname
from tests.support.releases import TOO_OLD

# The releases whose needs differ from those of the package under test: the last for CUDA 12, the first for CUDA 13.
LAST_OF_CUDA_12 = "1.26.0"
FIRST_OF_CUDA_13 = "1.27.0"
FOR_CUDA_13 = (1, 27)

ASKED: tuple[Literal["session", "probe"], ...] = ("session", "probe")


def other_cudnn(lab: Lab, overlay: Overlay) -> None:
    overlay.remove("nvidia/cudnn/lib/*")
    overlay.replace("nvidia/cudnn/lib/libcudnn.so.8", lab.stubs.library("libcudnn.so.8", {"cudnnGetVersion": 8907}))


def other_cublas(lab: Lab, overlay: Overlay) -> None:
    overlay.remove(library("libcublas"), library("libcublasLt"))
    for stem in ("libcublas", "libcublasLt"):
        overlay.replace(f"nvidia/cublas/lib/{stem}.so.11", lab.stubs.library(f"{stem}.so.11"))


CUDA_12 = {
    "libcublas.so.12": "cublas",
    "libcublasLt.so.12": "cublas",
    "libcudart.so.12": "cuda_runtime",
    "libcufft.so.11": "cufft",
}


def wheels_of_cuda_12(lab: Lab, overlay: Overlay) -> None:
    """What stays when only ONNX Runtime was upgraded: libraries of the major before, in the layout of their wheels."""
    overlay.remove("nvidia", "nvidia_*.dist-info")
    for name, component in {**CUDA_12, "libcudnn.so.9": "cudnn"}.items():
        overlay.replace(f"nvidia/{component}/lib/{name}", lab.stubs.library(name))


OLDER_RUNTIME = soname("libcudart", CUDA - 1)


def half_upgraded(lab: Lab, overlay: Overlay) -> None:
    """cuBLAS of one CUDA, and the runtime of the CUDA before."""
    overlay.remove(library("libcudart"))
    overlay.replace(f"nvidia/cuda_runtime/lib/{OLDER_RUNTIME}", lab.stubs.library(OLDER_RUNTIME))


def lacking_symbols_and_first(lab: Lab, overlay: Overlay) -> None:
    """`pip install --target` of something older, in a folder that PYTHONPATH names."""
    for package in overlay.site.glob("nvidia/__init__.py"):  # in the wheels for CUDA 12: those alone are a package
        path = overlay.root / "first" / package.relative_to(overlay.site)
        path.parent.mkdir(parents=True)
        path.write_bytes(package.read_bytes())
    for name in LINKED:
        path = overlay.root / "first" / own_path(overlay, f"nvidia/*/lib/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lab.stubs.library(name).read_bytes())


def lacking_symbols(lab: Lab, overlay: Overlay) -> None:
    """A library of the right name and an older version of it: what the provider was built against is not in it."""
    overlay.replace(own_path(overlay, library("libcudart")), lab.stubs.library(soname("libcudart")))


def release(version: str, *patterns: str) -> Break:
    """Another release of ONNX Runtime among the CUDA libraries of the installed one, without some of those."""

    def breaks(lab: Lab, overlay: Overlay) -> None:
        overlay.uninstall("onnxruntime-gpu").add_wheel(lab.wheels.get("onnxruntime-gpu", version))
        if patterns:
            overlay.remove(*patterns)

    return breaks


def provider_of_another_release(lab: Lab, overlay: Overlay) -> None:
    """Two installations written over each other: the provider file is of one, the rest of the other."""
    with zipfile.ZipFile(lab.wheels.get("onnxruntime-gpu", FIRST_OF_CUDA_13)) as archive:
        overlay.replace(CUDA_PROVIDER, archive.read(CUDA_PROVIDER))


def cudnn_for_cuda_12(lab: Lab, overlay: Overlay) -> None:
    """One name, two builds: this cuDNN says that it is of CUDA 12.8, and its wheel is on record beside the other."""
    made = lab.stubs.library("libcudnn.so.9", {"cudnnGetCudartVersion": 12080})
    graph = lab.stubs.library("libcudnn_graph.so.9")
    overlay.replace("nvidia/cudnn/lib/libcudnn.so.9", made).replace("nvidia/cudnn/lib/libcudnn_graph.so.9", graph)
    overlay.replace(
        "nvidia_cudnn_cu12-9.10.2.21.dist-info/METADATA",
        b"Metadata-Version: 2.1\nName: nvidia-cudnn-cu12\nVersion: 9.10.2.21\n",
    )
    overlay.replace("nvidia_cudnn_cu12-9.10.2.21.dist-info/INSTALLER", b"pip\n")
    overlay.replace(
        "nvidia_cudnn_cu12-9.10.2.21.dist-info/RECORD",
        b"nvidia/cudnn/lib/libcudnn.so.9,,\nnvidia/cudnn/lib/libcudnn_graph.so.9,,\n"
        b"nvidia_cudnn_cu12-9.10.2.21.dist-info/METADATA,,\nnvidia_cudnn_cu12-9.10.2.21.dist-info/INSTALLER,,\n"
        b"nvidia_cudnn_cu12-9.10.2.21.dist-info/RECORD,,\n",
    )


def cudnn_for_cuda_12_of_the_system(lab: Lab, overlay: Overlay) -> None:
    """A cuDNN that came with the CUDA 12 of an image, and none among the wheels."""
    folder = overlay.root / "system"
    shutil.copytree(overlay.site / "nvidia" / "cudnn" / "lib", folder, copy_function=os.link)
    for name, functions in {"libcudnn.so.9": {"cudnnGetCudartVersion": 12080}, "libcudnn_graph.so.9": {}}.items():
        (folder / name).unlink()
        shutil.copy(lab.stubs.library(name, functions), folder / name)
    overlay.remove("nvidia/cudnn", "nvidia_cudnn_cu*.dist-info")


def torch_for_cuda_12(lab: Lab, overlay: Overlay) -> None:
    """A torch of another CUDA, with the libraries that its wheels bring: they are of no use to this ONNX Runtime."""
    overlay.remove("torch", "torch-*.dist-info") if (overlay.site / "torch").exists() else None
    overlay.replace("torch/version.py", b"__version__ = '2.8.0+cu128'\ncuda = '12.8'\n")
    overlay.replace("torch-2.8.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0+cu128\n")
    for name, component in CUDA_12.items():
        overlay.replace(f"nvidia/{component}/lib/{name}", lab.stubs.library(name))


def only_torch_for_cuda_12(lab: Lab, overlay: Overlay) -> None:
    overlay.remove("nvidia", "nvidia_*.dist-info")
    torch_for_cuda_12(lab, overlay)
    overlay.replace("nvidia/curand/lib/libcurand.so.10", lab.stubs.library("libcurand.so.10"))  # of both CUDAs


def runtime_of_cuda_12_is_loaded(lab: Lab, overlay: Overlay) -> None:
    """The real runtime of CUDA 12 stands first on the loader's path, as a program that was built with it has it."""
    folder = overlay.root / "cuda12"
    with zipfile.ZipFile(lab.wheels.get("nvidia-cuda-runtime-cu12", "12.9.79")) as archive:
        (folder / "libcudart.so.12").parent.mkdir()
        (folder / "libcudart.so.12").write_bytes(archive.read("nvidia/cuda_runtime/lib/libcudart.so.12"))


CUDA_12_WHEELS = {
    "nvidia-cublas-cu12": "12.9.3.13",
    "nvidia-cuda-runtime-cu12": "12.9.79",
    "nvidia-cuda-nvrtc-cu12": "12.9.86",
    "nvidia-cudnn-cu12": "9.27.0.42",
    "nvidia-cufft-cu12": "11.4.1.4",
    "nvidia-curand-cu12": "10.3.10.19",
    "nvidia-nvjitlink-cu12": "12.9.86",
}


def newest_of_cuda_12(lab: Lab, overlay: Overlay) -> None:
    """What an installer takes: this cuDNN has no code for the GPUs before 7.5, and this ONNX Runtime has."""
    release(LAST_OF_CUDA_12)(lab, overlay)
    overlay.remove("nvidia", "nvidia_c*.dist-info", "nvidia_nv*.dist-info")
    for name, version in CUDA_12_WHEELS.items():
        overlay.add_wheel(lab.wheels.get(name, version))


CUDNN = f"nvidia-cudnn-cu{CUDA}"
OTHER_CUDNN = "9.13.0.50"


def part_of_another_cudnn(name: str) -> Break:
    """An installation that was interrupted between two files, or a part that was copied from elsewhere."""
    path = f"nvidia/cudnn/lib/{name}.so.9"

    def breaks(lab: Lab, overlay: Overlay) -> None:
        with zipfile.ZipFile(lab.wheels.get(CUDNN, OTHER_CUDNN)) as archive:
            overlay.replace(path, archive.read(path))

    return breaks


def another_cudnn_first_on_the_loader_path(lab: Lab, overlay: Overlay) -> None:
    """All of its parts, as a system package has them: none of them may come beside those of the wheel."""
    folder = overlay.root / "other"
    with zipfile.ZipFile(lab.wheels.get(CUDNN, OTHER_CUDNN)) as archive:
        for name in archive.namelist():
            if "/lib/libcudnn" in name:
                archive.extract(name, folder)


CASES = in_group(
    "B",
    [
        Case(
            "cuda-12-wheels-for-a-cuda-13-build",
            "LibraryNotFoundError",  # of cuRAND there is none: its major did not change with CUDA's
            ("libcublas.so.13", "libcublas.so.12", "libcudart.so.12", "built for CUDA 13", "nvidia-cublas"),
            wheels_of_cuda_12,
            rows=("A07",),
            plain="printed logged",
            after=MENDED,
            since=FOR_CUDA_13,
        ),
        Case(
            "cuda-12-wheels-and-driver-for-a-cuda-13-build",  # its libraries would be of no use with this driver
            "DriverTooOldError",
            ("12.8", "CUDA 13", "'onnxruntime-gpu>=1.20,<1.27'", "This explains: library-not-found"),
            wheels_of_cuda_12,
            rows=("A07",),
            cuda=Cuda(version=TOO_OLD[13][0], devices=(H200,)),
            nvml=NVML(gpus=(H200,), driver=TOO_OLD[13][1], cuda=TOO_OLD[13][0]),
            others=("LibraryNotFoundError",),
            silent_about=("Also found",),
            plain="printed logged",
            after=STUB_REFUSED,
            needs=("driver",),
            since=FOR_CUDA_13,
        ),
        Case(
            "cublas-of-another-cuda",
            "LibraryVersionError",
            ("libcublas.so", "libcublas.so.11", "libcublasLt.so.11", "nvidia-cublas"),
            other_cublas,
            rows=("A07",),
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "cudnn-8-and-a-convolution",
            "LibraryVersionError",
            ("libcudnn.so.9", "libcudnn.so.8", *NEEDED_BY_CONV, "nvidia-cudnn"),
            other_cudnn,
            rows=("B09",),
            model="conv",
            details={"needed": ["libcudnn.so.9"]},
            after=MENDED,
        ),
        Case(
            "first-release-of-cuda-13-without-the-runtime",
            "LibraryNotFoundError",
            ("libcudart.so.13", "nvidia-cuda-runtime"),
            release(FIRST_OF_CUDA_13, library("libcudart")),
            rows=("A06", "A08"),
            cpu=False,
            plain="raised",
            after=MENDED,
            slow_break=True,
            since=FOR_CUDA_13,
        ),
        Case(
            "first-release-of-cuda-13-without-nvrtc",
            "LibraryNotFoundError",
            ("libnvrtc.so.13", "nvidia-cuda-nvrtc"),
            release(FIRST_OF_CUDA_13, library("libnvrtc")),
            rows=("B06", "B14"),
            plain="raised",
            after=MENDED,
            slow_break=True,
            since=FOR_CUDA_13,
        ),
        Case(
            "last-release-of-cuda-12-among-cuda-13-wheels",
            "LibraryVersionError",
            ("libcublas.so.12", "libcublas.so.13", "built for CUDA 12"),
            release(LAST_OF_CUDA_12),
            rows=("A10", "A12"),
            plain="printed logged",
            after="LibraryConflictError",  # cuDNN has the same name for both
            slow_break=True,
            since=FOR_CUDA_13,
        ),
        Case(
            "first-release-of-cuda-13-without-cudnn",
            "LibraryNotFoundError",
            ("libcudnn.so.9", "nvidia-cudnn-cu13"),
            release(FIRST_OF_CUDA_13, "nvidia/cudnn"),
            rows=("B08",),
            plain="raised",
            after=MENDED,
            slow_break=True,
            since=FOR_CUDA_13,
        ),
        Case(
            "half-upgraded",
            "LibraryVersionError",
            (soname("libcudart"), OLDER_RUNTIME, "nvidia-cuda-runtime"),
            half_upgraded,
            plain="printed logged",
            after=MENDED,
        ),
        Case(
            "library-without-what-it-had",
            "LibraryVersionError",
            (soname("libcudart"), "nvidia-cuda-runtime"),
            lacking_symbols,
            cuda=Cuda(),
            plain="printed logged",
            after="NoDeviceError",
        ),
        Case(
            "cudnn-without-code-for-the-gpu",
            "DriverUnusableError",  # as far as the stub goes; a session is refused: tests/session/test_cudnn_code.py
            ("the installed cuDNN holds no code for Tesla V100 (compute capability 7.0)",),
            newest_of_cuda_12,
            others=("UnsupportedDeviceError",),
            advice_of="UnsupportedDeviceError",
            after=STUB_REFUSED,
            needs=("driver", "host"),
            plain="printed",
            slow_break=True,
            since=FOR_CUDA_13,
            **with_gpus(V100),
        ),
        Case(
            "cudnn-for-cuda-12-and-a-convolution",
            MENDED,
            ("library-conflict", "libcudnn.so.9", "built for CUDA 12", "ONNX Runtime for CUDA 13"),
            cudnn_for_cuda_12,
            model="conv",
            others=("LibraryConflictError",),
            advice_of="LibraryConflictError",
            after=MENDED,
            needs=("driver", "host"),
            since=FOR_CUDA_13,
        ),
        *(
            Case(
                f"cudnn-for-cuda-12-of-the-system-in-a-{ask}",
                MENDED,
                ("library-conflict", "libcudnn.so.9", "built for CUDA 12", "ONNX Runtime for CUDA 13"),
                cudnn_for_cuda_12_of_the_system,
                model="conv",
                ask=ask,
                env={"LD_LIBRARY_PATH": "{overlay}/system"},
                others=("LibraryConflictError",),
                advice_of="LibraryConflictError",
                after=MENDED,
                needs=("driver", "host"),
                since=FOR_CUDA_13,
            )
            for ask in ASKED
        ),
        Case(
            "torch-for-cuda-12",
            MENDED,
            ("libcuda.so.1",),
            torch_for_cuda_12,
            rows=("B18",),
            silent_about=("torch", ".so.12", "library-"),
            needs=("driver", "host"),
            since=FOR_CUDA_13,
        ),
        Case(
            "only-the-libraries-of-a-torch-for-cuda-12",
            "LibraryVersionError",
            ("libcublas.so.13", "libcublas.so.12", "built for CUDA 13"),
            only_torch_for_cuda_12,
            rows=("B18",),
            others=("DriverNotFoundError",),
            plain="printed logged",
            after=MENDED,
            since=FOR_CUDA_13,
        ),
        Case(
            "cuda-runtime-12-is-loaded",
            MENDED,
            ("libcuda.so.1",),
            runtime_of_cuda_12_is_loaded,
            rows=("B19",),
            env={"LD_LIBRARY_PATH": "{overlay}/cuda12"},
            prelude="import ctypes; ctypes.CDLL('libcudart.so.12')",
            silent_about=("libcudart",),
            needs=("driver", "host"),
            since=FOR_CUDA_13,
        ),
        Case(
            "part-of-another-cudnn",
            MENDED,
            ("library-conflict", "the parts of cuDNN in this process are of different releases"),
            part_of_another_cudnn("libcudnn_ops"),
            rows=("B12",),
            ask="probe",
            others=("LibraryConflictError", "BrokenPackageError"),
            advice_of="LibraryConflictError",
            after=MENDED,
            needs=("driver", "host"),
            slow_break=True,
        ),
        Case(
            "engines-of-another-cudnn",
            MENDED,
            ("broken-package", f"libraries of {CUDNN} differ from those that were installed"),
            part_of_another_cudnn("libcudnn_engines_precompiled"),
            ask="probe",  # Without a driver a session asks no package that can be loaded.
            rows=("B12",),
            others=("BrokenPackageError",),
            advice_of="BrokenPackageError",
            after=MENDED,
            needs=("driver", "host"),
            slow_break=True,
        ),
        Case(
            "another-cudnn-first-on-the-loader-path",
            MENDED,
            ("libcuda.so.1",),
            another_cudnn_first_on_the_loader_path,
            rows=("B12",),
            ask="probe",
            env={"LD_LIBRARY_PATH": "{overlay}/other/nvidia/cudnn/lib"},
            silent_about=("different releases", "/other/"),
            needs=("driver", "host"),
            slow_break=True,
        ),
        Case(
            "other-wheels-first-on-pythonpath",
            "LibraryVersionError",
            ("lacks", "first/nvidia", "unset PYTHONPATH"),
            lacking_symbols_and_first,
            env={"PYTHONPATH": "{overlay}/first"},
            silent_about=("pip",),
            plain="printed",
            after="DriverUnusableError",  # of the stub
            slow_fix=False,
            **with_gpus(H200),
        ),
        Case(
            "provider-file-of-another-release",
            "BrokenPackageError",
            ("libonnxruntime_providers_cuda.so", "changed since its installation"),
            provider_of_another_release,
            ask="probe",  # Without a driver a session asks no package that can be loaded.
            after=MENDED,
            slow_break=True,
            since=FOR_CUDA_13,
        ),
    ],
)
