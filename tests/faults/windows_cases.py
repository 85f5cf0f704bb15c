"""The faults of Windows: those of the other modules that have a meaning there, and its own."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from typing import Any, Literal

from ortgpu.environment.libraries.library_file import imported_names
from tests.faults.case import MENDED, Code
from tests.faults.on_windows import A100, RTX_4090, SITE_PACKAGES, Break, WindowsCase
from tests.faults.windows_breaks import (
    CAPI,
    CLEAR,
    CUBLAS,
    CUBLAS_LT,
    CUDA,
    CUDNN,
    DRIVER,
    INFO,
    all_of,
    deleting,
    driver,
    first_on_the_path,
    making,
    only_the_cpu_package,
    removing,
    truncating,
    unpacking,
    writing,
)
from tests.faults.windows_plugins import PLUGINS
from tests.lab.stubs import NVML, Cuda
from tests.lab.windows import CUDNN as CUDNN_PARTS
from tests.lab.windows import SYSTEM32, TOOLKIT, TORCH, Windows
from tests.support.made_dlls import ARM64

# A: packages and the import


def removed_again(info: str) -> Break:
    """Remove what one of the two packages has on record, as pip does."""

    def breaks(machine: Windows) -> None:
        kept = machine.site / INFO
        recorded = (kept / "RECORD").read_text(encoding="utf-8")
        machine.install_cpu_package()
        if info != INFO:
            recorded = (machine.site / info / "RECORD").read_text(encoding="utf-8")
        for line in recorded.splitlines():
            (machine.site / line.split(",")[0]).unlink(missing_ok=True)
        shutil.rmtree(machine.site / info, ignore_errors=True)

    return breaks


def the_gpu_package_last(machine: Windows) -> None:
    folder = machine.site / "onnxruntime"
    mine = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    machine.install_cpu_package()
    for name, content in mine.items():
        machine.write(f"{SITE_PACKAGES}\\onnxruntime\\{str(name).replace('/', chr(92))}", content)


def cpu_package_in_a_folder_of_its_own(machine: Windows) -> None:
    whole = machine.site / "onnxruntime"
    aside = machine.folder / "gpu"
    shutil.move(whole, aside)
    machine.install_cpu_package()
    home = machine.path("C:\\tools")
    home.mkdir()
    shutil.move(whole, home / "onnxruntime")
    for info in machine.site.glob("onnxruntime-*.dist-info"):
        shutil.move(info, home / info.name)
    shutil.move(aside, whole)
    first_on_the_path(machine, "C:\\tools")


def trimmed_copy(machine: Windows) -> None:
    trimmed = shutil.ignore_patterns("onnxruntime_providers_cuda.dll", "onnxruntime_providers_tensorrt.dll")
    shutil.copytree(machine.site / "onnxruntime", machine.path("C:\\copy\\onnxruntime"), ignore=trimmed)
    first_on_the_path(machine, "C:\\copy")


def older_metadata(machine: Windows) -> None:
    """What an upgrade leaves that was interrupted."""
    for name in ("METADATA", "RECORD"):
        text = (machine.site / INFO / name).read_text(encoding="utf-8").replace("1.31.1", "1.30.0")
        machine.write(f"{SITE_PACKAGES}\\onnxruntime_gpu-1.30.0.dist-info\\{name}", text.encode())


def as_it_comes(machine: Windows) -> None:
    """As python.org's embeddable distribution is: it looks into no folder that pip could install into."""
    machine.site.rename(machine.path("C:\\Python\\packages"))
    machine.write("Python\\python311._pth", b"python311.zip\n.\npackages\nR:\\\n#import site\n")


def in_an_archive(machine: Windows) -> None:
    package = machine.site / "onnxruntime"
    with zipfile.ZipFile(machine.path("C:\\packed.zip"), "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(machine.site))
    first_on_the_path(machine, "C:\\packed.zip")


def cuda_build_of_another_name(machine: Windows) -> None:
    """As distributions build it: with CUDA, and called onnxruntime."""
    for name in ("METADATA", "RECORD"):
        text = (machine.site / INFO / name).read_text(encoding="utf-8")
        text = text.replace("Name: onnxruntime-gpu\n", "Name: onnxruntime\n").replace(
            INFO, "onnxruntime-1.31.1.dist-info"
        )
        machine.write(f"{SITE_PACKAGES}\\onnxruntime-1.31.1.dist-info\\{name}", text.encode())
    machine.remove(INFO, "onnxruntime/capi/onnxruntime_providers_cuda.dll")


def numpy_for_newer_processors(machine: Windows) -> None:
    """As NumPy 2.4 and newer end their import on a processor without SSE4.2, in their words."""
    words = "NumPy was built with baseline optimizations: \\n(X86_V2) but your machine doesn't support:\\n(X86_V2)."
    machine.write(f"{SITE_PACKAGES}\\numpy\\__init__.py", f'raise RuntimeError("{words}")\n'.encode())
    old, new = "numpy-1.26.4.dist-info", "numpy-2.4.0.dist-info"
    for name in ("METADATA", "RECORD"):
        text = (machine.site / old / name).read_text(encoding="utf-8").replace("Version: 1.26.4", "Version: 2.4.0")
        machine.write(f"{SITE_PACKAGES}\\{new}\\{name}", text.replace(old, new).encode())
    machine.remove(old)


def packages_in_another_folder(machine: Windows) -> None:
    """Move what an environment shares with another to a folder that is not its own."""
    folder = machine.path("C:\\shared")
    folder.mkdir()
    for path in machine.site.glob("onnxruntime*"):
        shutil.move(path, folder / path.name)
    first_on_the_path(machine, "C:\\shared")


def moved_to(folder: str) -> Break:
    """Move Python to another folder of drive C."""

    def breaks(machine: Windows) -> None:
        target = machine.path(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(machine.path("C:\\Python"), target, symlinks=True)

    return breaks


PACKAGES = [
    WindowsCase(
        "not-installed",
        "OnnxRuntimeNotInstalledError",
        ("ONNX Runtime is not installed", "-m pip install"),
        removing("onnxruntime", INFO),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-package-only",
        "CPUOnlyPackageError",
        ("onnxruntime", "without CUDA"),
        only_the_cpu_package,
        rows=("A02",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-package-over-gpu-package",
        "ConflictingPackagesError",
        ("onnxruntime 1.31.1", "onnxruntime-gpu 1.31.1", "the GPU build was overwritten"),
        Windows.install_cpu_package,
        rows=("A01", "A03"),
        plain="warned",
        after=MENDED,
        shown=True,
    ),
    WindowsCase(
        "directml-over-gpu-package",
        "ConflictingPackagesError",
        ("onnxruntime-directml 1.24.4", "onnxruntime-gpu 1.31.1", "uninstall"),
        unpacking("onnxruntime_directml"),
        rows=("A18",),
        index=("onnxruntime-directml==1.24.4",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "gpu-package-over-cpu-package",
        MENDED,
        ("nvcuda.dll",),
        the_gpu_package_last,
        rows=("A01",),
        others=("ConflictingPackagesError",),
        advice_of="ConflictingPackagesError",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-twin-uninstalled-again",
        "BrokenPackageError",
        ("has no file __init__.py",),
        removed_again("onnxruntime-1.31.1.dist-info"),
        rows=("A04",),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "gpu-twin-uninstalled-again",
        "BrokenPackageError",
        ("has no file __init__.py",),
        removed_again(INFO),
        rows=("A04",),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "module-of-the-users-own",
        "BrokenPackageError",
        ("C:\\Python\\onnxruntime.py instead of the installed package", "rename"),
        writing("C:\\Python\\onnxruntime.py"),
        cpu=None,
        plain="raised",
        needs=("a person",),
    ),
    WindowsCase(
        "checkout-first-on-the-path",
        "BrokenPackageError",
        ("C:\\Python\\onnxruntime", "which is no installed package"),
        writing("C:\\Python\\onnxruntime\\__init__.py"),
        cpu=None,
        plain="raised",
        needs=("a person",),
    ),
    WindowsCase(
        "folder-of-that-name",
        "OnnxRuntimeNotInstalledError",
        ("it has no file __init__.py, and is nobody's on record",),
        all_of(removing("onnxruntime", INFO), writing("C:\\Python\\onnxruntime\\model.onnx")),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "package-in-an-archive",
        "BrokenPackageError",
        ("C:\\packed.zip", "nothing that is compiled can be imported from a zip archive"),
        in_an_archive,
        cpu=None,
        plain="raised",
        needs=("a person",),
    ),
    WindowsCase(
        "cpu-package-in-a-folder-before-the-gpu-package",
        "CPUOnlyPackageError",
        ("C:\\tools\\onnxruntime", "shadowed by it: onnxruntime-gpu 1.31.1"),
        cpu_package_in_a_folder_of_its_own,
        plain="warned",
        needs=("a person",),
    ),
    WindowsCase(
        "no-metadata-and-no-provider-file",
        "BrokenPackageError",
        ("the CUDA provider library of ONNX Runtime is missing",),
        removing(INFO, "onnxruntime/capi/onnxruntime_providers_cuda.dll"),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "older-metadata-left-behind",
        MENDED,
        ("onnxruntime-gpu is on record 2 times",),
        older_metadata,
        others=("ConflictingPackagesError",),
        advice_of="ConflictingPackagesError",
        after=MENDED,
    ),
    WindowsCase(
        "leftovers-of-an-interrupted-pip",
        MENDED,
        ("nvcuda.dll",),
        all_of(writing(f"{SITE_PACKAGES}\\~nnxruntime\\__init__.py"), writing(f"{SITE_PACKAGES}\\~vidia\\x.dll")),
        silent_about=("~",),
        needs=("driver",),
    ),
    WindowsCase(
        "provider-file-missing",
        "BrokenPackageError",
        ("missing: onnxruntime/capi/onnxruntime_providers_cuda.dll", "--force-reinstall --no-deps"),
        deleting(f"{CAPI}\\onnxruntime_providers_cuda.dll"),
        rows=("B23",),
        after=MENDED,
        shown=True,
        plain="logged",
    ),
    WindowsCase(
        "provider-file-truncated",
        "BrokenPackageError",
        ("onnxruntime_providers_cuda.dll",),
        truncating(f"{CAPI}\\onnxruntime_providers_cuda.dll", 100_000),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "provider-file-is-a-pointer",
        "BrokenPackageError",
        ("onnxruntime_providers_cuda.dll",),
        writing(f"{CAPI}\\onnxruntime_providers_cuda.dll", b"version https://git-lfs.github.com/spec/v1\n"),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "shared-provider-file-missing",
        "BrokenPackageError",
        ("missing: onnxruntime/capi/onnxruntime_providers_shared.dll",),
        deleting(f"{CAPI}\\onnxruntime_providers_shared.dll"),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "shared-provider-file-truncated",
        "BrokenPackageError",
        ("onnxruntime_providers_shared.dll",),
        truncating(f"{CAPI}\\onnxruntime_providers_shared.dll", 1000),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "provider-file-of-another-architecture",
        "BrokenPackageError",
        ("onnxruntime_providers_cuda.dll",),
        making(f"{CAPI}\\onnxruntime_providers_cuda.dll", exports={"GetProvider": 0}, machine=ARM64),
        after=MENDED,
        plain="logged",
    ),
    WindowsCase(
        "trimmed-copy-first-on-the-path",
        "BrokenPackageError",
        ("C:\\copy\\onnxruntime",),
        trimmed_copy,
        plain="printed logged",
        needs=("a person",),
    ),
    WindowsCase(
        "extension-module-missing",
        "BrokenPackageError",
        ("missing: onnxruntime/capi/onnxruntime_pybind11_state.pyd",),
        deleting(f"{CAPI}\\onnxruntime_pybind11_state.pyd"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "extension-module-truncated",
        "BrokenPackageError",
        ("onnxruntime_pybind11_state.pyd",),
        truncating(f"{CAPI}\\onnxruntime_pybind11_state.pyd", 100_000),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "init-file-missing",
        "BrokenPackageError",
        ("has no file __init__.py",),
        deleting(f"{SITE_PACKAGES}\\onnxruntime\\__init__.py"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "file-altered",
        "BrokenPackageError",
        ("changed since its installation: onnxruntime/capi/_pybind_state.py",),
        writing(f"{CAPI}\\_pybind_state.py", b"raise ImportError('altered')\n"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "numpy-missing",
        "BrokenPackageError",
        ("numpy, which it needs, is not installed", "-m pip install numpy"),
        removing("numpy", "numpy-1.26.4.dist-info"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "numpy-damaged",
        "BrokenPackageError",
        ("the installed numpy 1.26.4 cannot be imported", "numpy==1.26.4"),
        writing(f"{SITE_PACKAGES}\\numpy\\core\\multiarray.py", b"raise ImportError('damaged')\n"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "visual-c-too-old",
        "LibraryNotFoundError",
        ("ONNX Runtime links MSVCP140_ATOMIC_WAIT.dll", "Visual C++ Redistributable"),
        deleting(f"{SYSTEM32}\\msvcp140_atomic_wait.dll"),
        rows=("W01", "A17"),
        driver=DRIVER,
        variables={"WINEDLLOVERRIDES": "mscoree,mshtml=d;winedbg.exe=d;msvcp140_atomic_wait=d"},
        silent_about=("pip", "Also found"),
        plain="logged",
        needs=("root",),
    ),
    WindowsCase(
        "visual-c-missing",
        "LibraryNotFoundError",
        ("ONNX Runtime links MSVCP140_1.dll", "Visual C++ Redistributable"),
        deleting(f"{SYSTEM32}\\msvcp140_1.dll"),
        rows=("W01", "A17"),
        variables={"WINEDLLOVERRIDES": "mscoree,mshtml=d;winedbg.exe=d;msvcp140_1=d"},
        silent_about=("pip",),
        cpu=None,
        plain="raised",
        needs=("root",),
    ),
    WindowsCase(
        "onnxruntime-of-windows-in-system32",
        MENDED,
        ("nvcuda.dll",),
        making(f"{SYSTEM32}\\onnxruntime.dll", exports={"OrtGetApiBase": 0}),
        rows=("W07",),
        silent_about=("System32\\onnxruntime.dll",),
        needs=("driver",),
    ),
    WindowsCase(
        "onnxruntime-of-windows-loaded-first",
        MENDED,
        ("nvcuda.dll",),
        making(f"{SYSTEM32}\\onnxruntime.dll", exports={"OrtGetApiBase": 0}),
        rows=("W07",),
        prelude="import ctypes; ctypes.WinDLL('onnxruntime.dll')",
        needs=("driver",),
    ),
    WindowsCase(
        "older-cpu-package-over-gpu-package",
        "ConflictingPackagesError",
        ("onnxruntime 1.30.0", "onnxruntime-gpu 1.31.1", "uninstall"),
        unpacking("onnxruntime-1.30.0"),
        rows=("A03",),
        index=("onnxruntime==1.30.0",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-package-without-record-over-gpu-package",
        "ConflictingPackagesError",
        ("onnxruntime ", "onnxruntime-gpu"),
        all_of(Windows.install_cpu_package, removing("onnxruntime-1.31.1.dist-info/RECORD")),
        silent_about=("uninstall -y",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-package-of-conda",
        "CPUOnlyPackageError",
        ("onnxruntime", "without CUDA"),
        all_of(
            only_the_cpu_package,
            writing(f"{SITE_PACKAGES}\\onnxruntime-1.31.1.dist-info\\INSTALLER", b"conda\n"),
            writing("Python\\conda-meta\\history"),
        ),
        rows=("A16",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "extension-of-another-python",
        "BrokenPackageError",
        ("onnxruntime_pybind11_state.pyd", "python312.dll"),
        making(
            f"{CAPI}\\onnxruntime_pybind11_state.pyd",
            exports={"PyInit_onnxruntime_pybind11_state": 0},
            needs={"python312.dll": ["PyModule_Create2"]},
        ),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "provider-file-missing-in-a-cuda-build-of-another-name",
        "BrokenPackageError",
        ("the installed onnxruntime is damaged", "onnxruntime_providers_cuda.dll", 'install "onnxruntime-gpu'),
        cuda_build_of_another_name,
        plain="logged",
        after=MENDED,
    ),
    WindowsCase(
        "numpy-for-newer-processors",
        "BrokenPackageError",
        ("is built for newer processors", "X86_V2", '"numpy<2.4"'),
        numpy_for_newer_processors,
        silent_about=("uninstall", "install onnxruntime"),
        cpu=None,
        plain="raised",
        after=MENDED,
    ),
    WindowsCase(
        "damaged-in-another-folder",
        "BrokenPackageError",
        ("onnxruntime_providers_cuda.dll", "--target", "C:\\shared"),
        all_of(deleting(f"{CAPI}\\onnxruntime_providers_cuda.dll"), packages_in_another_folder),
        plain="printed logged",
        after=MENDED,
    ),
    WindowsCase(
        "conflict-in-another-folder",
        "ConflictingPackagesError",
        ("the GPU build was overwritten", "--target", "C:\\shared"),
        all_of(Windows.install_cpu_package, packages_in_another_folder),
        silent_about=("uninstall -y",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "cpu-package-and-a-plugin",
        "CPUOnlyPackageError",
        ("built without CUDA", "onnxruntime-ep-webgpu 0.4.0 brings another provider", "onnxruntime-gpu"),
        all_of(only_the_cpu_package, unpacking("onnxruntime_ep_webgpu")),
        index=("onnxruntime-ep-webgpu==0.4.0",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "portable-python-without-pip",
        "LibraryNotFoundError",
        ("C:\\Python\\python.exe has no pip", "get-pip.py"),
        cuda=False,
        pip=False,
        silent_about=("restart",),
        needs=("driver", "root"),
        shown=True,
        plain="printed logged",
    ),
    WindowsCase(
        "portable-python-as-it-comes",
        "LibraryNotFoundError",
        ("once C:\\Python\\python311._pth has the line C:\\Python\\Lib\\site-packages, and", "get-pip.py"),
        as_it_comes,
        cuda=False,
        pip=False,
        plain="printed logged",
        needs=("driver", "root"),
    ),
    WindowsCase(
        "python-embeded-of-comfyui",
        "ConflictingPackagesError",
        ("\\python_embeded\\python.exe -s -m pip uninstall -y onnxruntime onnxruntime-gpu",),
        all_of(Windows.install_cpu_package, moved_to("C:\\ComfyUI_windows_portable\\python_embeded")),
        python="C:\\ComfyUI_windows_portable\\python_embeded\\python.exe",
        options=("-s",),
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "python-in-a-folder-with-a-space",
        "ConflictingPackagesError",
        ('C:\\"My Programs"\\python.exe -m pip uninstall -y onnxruntime onnxruntime-gpu',),
        all_of(Windows.install_cpu_package, moved_to("C:\\My Programs")),
        python="C:\\My Programs\\python.exe",
        plain="warned",
        after=MENDED,
    ),
    WindowsCase(
        "python-in-a-folder-beyond-ascii",
        "LibraryNotFoundError",
        ("C:\\Büro 東京\\Lib\\site-packages\\nvidia".replace("Büro 東京", "Büro東京"), CUBLAS_LT),
        all_of(truncating(f"{CUDA}\\{CUBLAS_LT}", 300), moved_to("C:\\Büro東京")),
        python="C:\\Büro東京\\python.exe",
        after=MENDED,
        plain="raised",
    ),
]

# B: loading the CUDA libraries

OLD_GPU = replace(RTX_4090, name="a GPU", capability=(6, 1))
PROVIDER = "onnxruntime/capi/onnxruntime_providers_cuda.dll"

ASKED: tuple[Literal["session", "probe"], ...] = ("session", "probe")

_MISSING = WindowsCase("", "LibraryNotFoundError", (), rows=("B01", "W01"), plain="printed logged", after=MENDED)


def no_library(name: str, wheel: str, **changes: Any) -> WindowsCase:
    said = (f"{name}: found nowhere", f"-m pip install --force-reinstall --no-deps {wheel}==")
    return replace(_MISSING, name=f"no-{name}", says=said, breaks=deleting(f"{CUDA}\\{name}"), **changes)


def unusable_library(kind: str, breaks: Break, *said: str) -> WindowsCase:
    return replace(
        _MISSING, name=f"library-{kind}", says=(CUBLAS_LT, "nvidia-cublas==", *said), breaks=breaks, rows=("own",)
    )


def a_library_of_cuda_12(machine: Windows) -> None:
    machine.remove(*CLEAR)
    for name in ("cublas64_12.dll", "cublasLt64_12.dll"):
        machine.make(f"{SITE_PACKAGES}\\nvidia\\cublas\\bin\\{name}", exports={"call": 0})


def cudnn_answers(path: str, cuda: int) -> Break:
    return making(path, exports={"call": 0, "cudnnGetCudartVersion": cuda, "cudnnGetVersion": 92801})


def folder_in_its_place(machine: Windows) -> None:
    deleting(f"{CUDA}\\{CUBLAS_LT}")(machine)
    machine.path(f"{CUDA}\\{CUBLAS_LT}").mkdir()


def nvidia_is_somebody_elses(machine: Windows) -> None:
    machine.write("mine\\nvidia\\__init__.py")
    first_on_the_path(machine, "C:\\mine")


def provider_of_another_release(machine: Windows) -> None:
    """Two installations written over each other: the provider file is of one, the rest of the other."""
    (wheel,) = (machine.folder / "dosdevices/w:").glob("onnxruntime_gpu-1.27.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        machine.write(f"{CAPI}\\onnxruntime_providers_cuda.dll", archive.read(PROVIDER))


def onnxruntime_for_cuda_14(machine: Windows) -> None:
    """Give the installed one another version, and a provider that links the libraries of the next CUDA."""
    provider = (machine.site / PROVIDER).read_bytes()
    for stem in (b"cublasLt64_", b"cublas64_"):
        provider = provider.replace(stem + b"13.dll\0", stem + b"14.dll\0")
    machine.write(f"{CAPI}\\onnxruntime_providers_cuda.dll", provider)
    build, newer = "onnxruntime/capi/build_and_package_info.py", "onnxruntime_gpu-1.99.0.dist-info"
    text = (machine.site / build).read_text(encoding="utf-8").replace("1.31.1", "1.99.0")
    machine.write(f"{CAPI}\\build_and_package_info.py", text.encode())
    for name in ("METADATA", "RECORD"):
        text = (machine.site / INFO / name).read_text(encoding="utf-8")
        text = text.replace("Version: 1.31.1", "Version: 1.99.0").replace(INFO, newer)
        lines = [f"{line.split(',')[0]},," if line.startswith((build, PROVIDER)) else line for line in text.split("\n")]
        machine.write(f"{SITE_PACKAGES}\\{newer}\\{name}", "\n".join(lines).encode())
    machine.remove(INFO)


def with_cuda_14(machine: Windows) -> None:
    onnxruntime_for_cuda_14(machine)
    for name in ("cublasLt64_14.dll", "cublas64_14.dll"):
        exports = dict.fromkeys(imported_names(machine.site / PROVIDER, name) or (), 0)
        machine.make(f"{SITE_PACKAGES}\\nvidia\\cu14\\bin\\x86_64\\{name}", exports={"call": 0, **exports})


def cudnn_of_the_system(machine: Windows) -> None:
    """Leave a cuDNN for CUDA 12 in a folder of PATH, and none among the wheels."""
    shutil.move(machine.path(CUDNN), machine.path("system"))
    cudnn_answers("system\\cudnn64_9.dll", 12080)(machine)
    for info in machine.site.glob("nvidia_cudnn*.dist-info"):
        shutil.rmtree(info)


def torch_for_cuda_12(machine: Windows) -> None:
    machine.install_torch("2.8.0", "12.8")
    shutil.rmtree(machine.path(TORCH))
    for name in ("cublas64_12.dll", "cublasLt64_12.dll", "cudart64_12.dll", "cufft64_11.dll"):
        machine.make(f"{TORCH}\\{name}", exports={"call": 0})


def real_wheels(machine: Windows) -> None:
    machine.install_cuda(real=True)


ENDING: dict[str, Any] = {
    "needs": {"KERNEL32.dll": ["ExitProcess"]},
    "on_load": "((void (*)(unsigned))ExitProcess)(0xC0000409);",
}
IN_A_FOLDER: Break = lambda machine: machine.place_cuda("libs")  # noqa: E731 - as the other breaks

LIBRARIES = [
    no_library(CUBLAS_LT, "nvidia-cublas", shown=True),
    no_library(CUBLAS, "nvidia-cublas"),
    replace(
        _MISSING,
        name="no-cuda-wheels-at-all",
        says=(CUBLAS_LT, CUBLAS, "-m pip install nvidia-cublas~=13.0", "nvidia-cudnn-cu13~=9.0"),
        silent_about=("curand",),
        cuda=False,
    ),
    WindowsCase(
        "cuda-path-is-set-and-leads-to-nothing",
        "LibraryNotFoundError",
        (CUBLAS_LT,),
        rows=("W03",),
        cuda=False,
        variables={"CUDA_PATH": "C:\\CUDA\\v13.0"},
        after=MENDED,
        plain="printed logged",
    ),
    WindowsCase(
        "cudart-is-not-linked",
        MENDED,
        ("nvcuda.dll",),
        deleting(f"{CUDA}\\cudart64_13.dll"),
        silent_about=("cudart",),
        needs=("driver",),
    ),
    WindowsCase(
        "wheels-that-nobody-loaded",
        MENDED,
        ("nvcuda.dll",),
        rows=("B02",),
        silent_about=("cublas",),
        plain_arguments={"providers": ["CUDAExecutionProvider"], "preload": False},
        needs=("driver",),
        plain="logged",
    ),
    WindowsCase(
        "toolkit-alone",
        MENDED,
        ("nvcuda.dll",),
        lambda machine: machine.place_cuda(TOOLKIT),
        cuda=False,
        needs=("driver",),
        plain="printed logged",
    ),
    WindowsCase(
        "toolkit-of-the-right-major-beside-cuda-path-of-another",
        MENDED,
        ("nvcuda.dll",),
        all_of(lambda machine: machine.place_cuda(TOOLKIT), writing("C:\\CUDA\\v12.9\\bin\\cublas64_12.dll")),
        rows=("W06",),
        cuda=False,
        variables={"CUDA_PATH": "C:\\CUDA\\v12.9"},
        needs=("driver",),
        plain="printed logged",
    ),
    WindowsCase(
        "folder-on-path-that-the-program-set",
        MENDED,
        ("nvcuda.dll",),
        IN_A_FOLDER,
        cuda=False,
        prelude="import os; os.environ['PATH'] = 'C:\\\\libs;' + os.environ['PATH']",
        needs=("driver",),
    ),
    WindowsCase(
        "folder-of-add-dll-directory",
        MENDED,
        ("nvcuda.dll",),
        IN_A_FOLDER,
        cuda=False,
        prelude="import os; os.add_dll_directory('C:\\\\libs')",
        needs=("driver",),
    ),
    WindowsCase(
        "only-the-libraries-of-torch",
        MENDED,
        ("nvcuda.dll",),
        Windows.install_torch,
        rows=("B03",),
        cuda=False,
        silent_about=("cublas",),
        needs=("driver",),
        plain="printed logged",
    ),
    WindowsCase(
        "cudnn-of-torch-for-cuda-12-and-a-convolution",
        MENDED,
        ("nvcuda.dll",),
        all_of(Windows.install_torch, cudnn_answers(f"{TORCH}\\cudnn64_9.dll", 12090)),
        rows=("B20",),
        model="conv",
        others=("LibraryConflictError",),
        advice_of="LibraryConflictError",
        needs=("a person",),
    ),
    WindowsCase(
        "cudnn-for-cuda-12-and-a-convolution",
        MENDED,
        ("nvcuda.dll",),
        cudnn_answers(f"{CUDNN}\\cudnn64_9.dll", 12090),
        model="conv",
        others=("LibraryConflictError",),
        advice_of="LibraryConflictError",
        needs=("a person",),
    ),
    WindowsCase(
        "no-cudnn-and-a-convolution",
        "LibraryNotFoundError",
        ("cudnn64_9.dll", "this model's Conv nodes need", "nvidia-cudnn-cu13"),
        removing("nvidia/cudnn"),
        rows=("B10",),
        model="conv",
        after=MENDED,
        shown=True,
    ),
    WindowsCase(
        "part-of-cudnn-missing-and-a-convolution",
        "LibraryNotFoundError",
        ("cudnn_graph64_9.dll", "nvidia-cudnn-cu13=="),
        deleting(f"{CUDNN}\\cudnn_graph64_9.dll"),
        rows=("W05",),
        model="conv",
        after=MENDED,
    ),
    WindowsCase(
        "no-cudnn-and-no-need-of-it",
        MENDED,
        ("nvcuda.dll",),
        removing("nvidia/cudnn"),
        others=("LibraryNotFoundError",),
        advice_of="LibraryNotFoundError",
        after=MENDED,
    ),
    unusable_library("truncated", truncating(f"{CUDA}\\{CUBLAS_LT}", 300), "truncated"),
    unusable_library("empty", writing(f"{CUDA}\\{CUBLAS_LT}"), "empty"),
    unusable_library("is-text", writing(f"{CUDA}\\{CUBLAS_LT}", b"<html>" * 400), "is unusable"),
    unusable_library(
        "of-another-processor",
        making(f"{CUDA}\\{CUBLAS_LT}", exports={"call": 0}, machine=ARM64),
        "aarch64",
    ),
    unusable_library("refuses-to-start", making(f"{CUDA}\\{CUBLAS_LT}", exports={"call": 0}, fails=True), "1114"),
    unusable_library("is-a-folder", folder_in_its_place, "is a directory"),
    unusable_library(
        "crashes-while-it-starts",
        making(f"{CUDA}\\{CUBLAS_LT}", exports={"call": 0}, on_load="*(volatile int *)0 = 1;"),
        "error 998",
    ),
    replace(
        unusable_library("that-ends-the-process", making(f"{CUDA}\\{CUBLAS_LT}", exports={"call": 0}, **ENDING)),
        error="BrokenPackageError",
        says=("loading the CUDA libraries", "0xC0000409", CUBLAS_LT, "nvidia-cublas=="),
        driver=DRIVER,
        ask="probe",
        plain="aborted",
        after="DriverUnusableError",
    ),
    WindowsCase(
        "nvidia-is-a-package-of-somebody-else",
        MENDED,
        ("nvcuda.dll",),
        nvidia_is_somebody_elses,
        silent_about=("cublas",),
        needs=("driver",),
    ),
    WindowsCase(
        "wheels-of-nvidia",
        MENDED,
        ("nvcuda.dll",),
        real_wheels,
        cuda=False,
        silent_about=("cublas", "cudnn", "library-"),
        model="conv",
        needs=("driver",),
    ),
    WindowsCase(
        "a-session-before-the-wheels-were-loaded",
        MENDED,
        ("nvcuda.dll",),
        rows=("B04",),
        prelude="import onnxruntime\n"
        "try:\n    onnxruntime.InferenceSession(b'', providers=['CUDAExecutionProvider'])\n"
        "except Exception:\n    pass",
        silent_about=("cublas",),
        needs=("driver",),
    ),
    replace(
        _MISSING,
        name="nvidia-is-a-package-of-somebody-else-and-a-library-is-gone",
        says=(CUBLAS_LT, "nvidia-cublas=="),
        breaks=all_of(nvidia_is_somebody_elses, deleting(f"{CUDA}\\{CUBLAS_LT}")),
        rows=("own",),
    ),
    WindowsCase(
        "empty-libraries-on-path",
        MENDED,
        ("nvcuda.dll",),
        all_of(*(writing(f"toolkit\\{name}") for name in (CUBLAS_LT, CUBLAS))),
        variables={"WINEPATH": "C:\\toolkit"},
        silent_about=("C:\\toolkit",),
        needs=("driver",),
    ),
    WindowsCase(
        "half-upgraded",
        "LibraryVersionError",
        (CUBLAS_LT, "cublasLt64_12.dll", "nvidia-cublas"),
        all_of(
            deleting(f"{CUDA}\\{CUBLAS_LT}"),
            making(f"{SITE_PACKAGES}\\nvidia\\cublas\\bin\\cublasLt64_12.dll", exports={"call": 0}),
        ),
        plain="printed logged",
        after=MENDED,
    ),
    WindowsCase(
        "cuda-runtime-12-is-loaded",
        MENDED,
        ("nvcuda.dll",),
        making("cuda12\\cudart64_12.dll", exports={"call": 0}),
        rows=("B19",),
        prelude="import ctypes; ctypes.WinDLL(r'C:\\cuda12\\cudart64_12.dll')",
        silent_about=("cudart",),
        needs=("driver",),
    ),
    WindowsCase(
        "part-of-cublas-loaded-from-elsewhere",
        MENDED,
        ("nvcuda.dll",),
        lambda machine: shutil.move(machine.path(f"{CUDA}\\{CUBLAS_LT}"), machine.path(CUBLAS_LT)),
        prelude=f"import ctypes; ctypes.WinDLL(r'C:\\{CUBLAS_LT}')",
        silent_about=("cublas",),
        needs=("driver",),
    ),
    *(
        WindowsCase(
            f"cudnn-for-cuda-12-of-the-system-in-a-{ask}",
            MENDED,
            ("library-conflict", "cudnn64_9.dll", "built for CUDA 12", "ONNX Runtime for CUDA 13"),
            cudnn_of_the_system,
            model="conv",
            ask=ask,
            variables={"WINEPATH": "C:\\system"},
            others=("LibraryConflictError",),
            advice_of="LibraryConflictError",
            after=MENDED,
        )
        for ask in ASKED
    ),
    WindowsCase(
        "part-of-another-cudnn",
        MENDED,
        ("broken-package", "differ from those that were installed"),
        making(f"{CUDNN}\\cudnn_ops64_9.dll", exports={f"of_another_{number}": 0 for number in range(99)}),
        rows=("B12",),
        ask="probe",
        others=("BrokenPackageError",),
        advice_of="BrokenPackageError",
        after=MENDED,
    ),
    WindowsCase(
        "another-cudnn-first-on-path",
        MENDED,
        ("nvcuda.dll",),
        lambda machine: machine.place_cuda("other", *CUDNN_PARTS),
        rows=("B12",),
        model="conv",
        ask="probe",
        variables={"WINEPATH": "C:\\other"},
        silent_about=("different releases", "C:\\other"),
        needs=("driver",),
    ),
    replace(
        _MISSING,
        name="wheels-of-nvidia-without-cublasLt",
        says=(f"{CUBLAS_LT}: found nowhere", "nvidia-cublas==13.10.0.20"),
        breaks=all_of(real_wheels, deleting(f"{CUDA}\\{CUBLAS_LT}")),
        cuda=False,
    ),
    replace(
        _MISSING,
        name="wheels-of-nvidia-with-a-cublasLt-cut-short",
        says=(CUBLAS_LT, "truncated", "nvidia-cublas==13.10.0.20"),
        breaks=all_of(real_wheels, truncating(f"{CUDA}\\{CUBLAS_LT}", 1_000_000)),
        cuda=False,
        rows=("own",),
    ),
    WindowsCase(
        "wheels-of-nvidia-without-a-part-of-cudnn-and-a-convolution",
        "LibraryNotFoundError",
        ("cudnn_graph64_9.dll", "nvidia-cudnn-cu13==9.28.1.4"),
        all_of(real_wheels, deleting(f"{CUDNN}\\cudnn_graph64_9.dll")),
        cuda=False,
        rows=("W05",),
        model="conv",
        after=MENDED,
    ),
    WindowsCase(
        "torch-for-cuda-12",
        MENDED,
        ("nvcuda.dll",),
        torch_for_cuda_12,
        rows=("B18",),
        silent_about=("torch", "_12.dll", "library-"),
        needs=("driver",),
    ),
    WindowsCase(
        "only-the-libraries-of-a-torch-for-cuda-12",
        "LibraryNotFoundError",
        (CUBLAS, "built for CUDA 13"),
        torch_for_cuda_12,
        rows=("B18",),
        cuda=False,
        after=MENDED,
        plain="printed logged",
    ),
    WindowsCase(
        "cuda-12-wheels-and-driver-for-a-cuda-13-build",
        "DriverTooOldError",
        ("12.4", "CUDA 13", "onnxruntime-gpu>=1.20,<1.27", "This explains: library-version"),
        a_library_of_cuda_12,
        driver=(Cuda(version=12040, devices=(RTX_4090,)), NVML(gpus=(RTX_4090,), driver="551.61", cuda=12040)),
        rows=("A07",),
        silent_about=("Also found",),
        plain="printed logged",
        index=("onnxruntime-gpu==1.26.0",),
        after="ProviderFallbackError",
    ),
    WindowsCase(
        "cudnn-loaded-from-elsewhere",
        MENDED,
        ("nvcuda.dll",),
        lambda machine: shutil.move(machine.path(CUDNN), machine.path("elsewhere")),
        prelude="import ctypes; ctypes.WinDLL(r'C:\\elsewhere\\cudnn64_9.dll')",
        model="conv",
        silent_about=("cudnn",),
        needs=("driver",),
    ),
    WindowsCase(
        "library-links-what-is-not-there",
        "LibraryNotFoundError",
        ("helper.dll", "install what brings helper.dll"),
        making(f"{CUDA}\\{CUBLAS_LT}", exports={"call": 0}, needs={"helper.dll": ["help"]}),
        rows=("W01",),
        silent_about=("pip",),
        needs=("root",),
        plain="printed logged",
    ),
    WindowsCase(
        "cublas-of-another-cuda",
        "LibraryVersionError",
        ("only other versions are installed", "nvidia-cublas~=13.0"),
        a_library_of_cuda_12,
        rows=("A07",),
        after=MENDED,
        plain="printed logged",
    ),
    WindowsCase(
        "toolkit-of-another-cuda-on-path",
        "LibraryVersionError",
        ("cublas64_12.dll", "nvidia-cublas~=13.0"),
        all_of(*(making(f"CUDA\\v12.9\\bin\\{name}64_12.dll", exports={"call": 0}) for name in ("cublas", "cublasLt"))),
        cuda=False,
        variables={"WINEPATH": "C:\\CUDA\\v12.9\\bin"},
        after=MENDED,
        plain="printed logged",
    ),
    WindowsCase(
        "last-release-of-cuda-12-among-cuda-13-wheels",
        "LibraryVersionError",
        (CUBLAS.replace("13", "12"), "built for CUDA 12"),
        all_of(removing("onnxruntime", INFO), unpacking("onnxruntime_gpu-1.26.0")),
        rows=("A10", "A12"),
        index=("onnxruntime-gpu==1.26.0",),
        plain="printed logged",
        after="LibraryConflictError",
    ),
    WindowsCase(
        "provider-file-of-another-release",
        "BrokenPackageError",
        ("onnxruntime_providers_cuda.dll", "changed since its installation"),
        provider_of_another_release,
        index=("onnxruntime-gpu==1.27.0",),
        plain="printed",
        after=MENDED,
    ),
    WindowsCase(
        "cuda-14-is-not-installed",
        "LibraryVersionError",
        ("cublas64_14.dll", "install CUDA 14", '"onnxruntime-gpu>=1.28,<1.99.0"'),
        onnxruntime_for_cuda_14,
        plain="logged",
        after=MENDED,
    ),
    WindowsCase(
        "cuda-14-and-no-driver",
        MENDED,
        ("nvcuda.dll", "NVIDIA driver for CUDA 14"),
        with_cuda_14,
        silent_about=("library-not-found", "library-version"),
        plain="logged",
        needs=("driver",),
    ),
    WindowsCase(
        "first-release-of-cuda-13-without-cudnn",
        "LibraryNotFoundError",
        ("cudnn64_9.dll", "nvidia-cudnn-cu13"),
        all_of(removing("onnxruntime", INFO, "nvidia/cudnn"), unpacking("onnxruntime_gpu-1.27.0")),
        rows=("B08",),
        index=("onnxruntime-gpu==1.27.0",),
        plain="printed logged",
        after=MENDED,
    ),
    WindowsCase(
        "cudnn-8-and-a-convolution",
        "LibraryVersionError",
        ("cudnn64_9.dll", "cudnn64_8.dll", "nvidia-cudnn-cu13"),
        all_of(removing("nvidia/cudnn"), making(f"{CUDNN}\\cudnn64_8.dll", exports={"call": 0})),
        rows=("B09",),
        model="conv",
        after=MENDED,
    ),
    WindowsCase(
        "frozen-program-without-the-wheels",
        "LibraryNotFoundError",
        (CUBLAS_LT, "this program is frozen"),
        rows=("B30",),
        cuda=False,
        prelude="import sys; sys.frozen = True",
        needs=("a person",),
        plain="printed logged",
    ),
]

# C: driver, devices and hardware


def cuinit(code: int, *said: str, needs: tuple[str, ...] = ("reboot",), **changes: Any) -> WindowsCase:
    return WindowsCase(
        f"cuinit-{code}",
        "DriverUnusableError",
        (*said, f"cuInit returned {code}", "C:\\windows\\system32\\nvcuda.dll"),
        plain="printed",
        needs=needs,
        driver=(Cuda(init=code, devices=(RTX_4090,)), NVML(gpus=(RTX_4090,))),
        **changes,
    )


def hidden(name: str, value: str, **changes: Any) -> WindowsCase:
    return WindowsCase(
        f"hidden-by-{name}",
        "NoDeviceError",
        (f"CUDA_VISIBLE_DEVICES={value!r}", "set CUDA_VISIBLE_DEVICES= in cmd.exe", "in PowerShell"),
        driver=DRIVER,
        variables={"CUDA_VISIBLE_DEVICES": value},
        rows=("C02",),
        plain="printed",
        needs=("a person",),
        **changes,
    )


def generation(capability: tuple[int, int], index: str, after: str, *said: str) -> WindowsCase:
    gpu = replace(RTX_4090, name="a GPU", capability=capability)
    return WindowsCase(
        f"generation-{capability[0]}.{capability[1]}",
        "UnsupportedDeviceError",
        ("holds no code for a GPU", *said),
        driver=(Cuda(devices=(gpu,)), NVML(gpus=(gpu,))),
        rows=("C13",),
        plain="printed",
        index=(index,),
        after=after,
    )


def by_nvml(name: str, code: int, *said: str) -> WindowsCase:
    return WindowsCase(
        name,
        "DriverUnusableError",
        (*said, "restart Windows"),
        driver=(Cuda(init=999, devices=()), NVML(init=code, gpus=())),
        plain="printed",
        needs=("reboot",),
    )


THIRD = {"device": "cuda:3"}
_TAKEN = replace(RTX_4090, compute_mode=3, processes=((1, 1 << 30),))
_SECOND = replace(RTX_4090, uuid=RTX_4090.uuid.replace("1111", "2222"))
TWO = (Cuda(devices=(RTX_4090, _SECOND)), NVML(gpus=(RTX_4090, _SECOND)))
CRASHES, THIRTEEN = "*(volatile int *)0", "(*(int *)argument = 13000, 0)"  # what functions of a driver do
FORBIDDING_THE_CPU = (
    "import onnxruntime; options = onnxruntime.SessionOptions()\n"
    "options.add_session_config_entry('session.disable_cpu_ep_fallback', '1')"
)

DRIVERS = [
    WindowsCase(
        "no-driver",
        MENDED,
        (
            "the NVIDIA driver's library nvcuda.dll cannot be loaded",
            "install NVIDIA driver 580 or newer (needed for CUDA 13)",
        ),
        rows=("B24",),
        needs=("driver",),
        shown=True,
    ),
    WindowsCase(
        "no-nvcuda-and-working-nvml",
        MENDED,
        ("nvcuda.dll", "NVML works and sees 1 GPU"),
        rows=("B24", "G05"),
        needs=("driver",),
        **driver(*DRIVER, without=["nvcuda.dll"]),
    ),
    WindowsCase(
        "driver-file-empty",
        MENDED,
        ("nvcuda.dll",),
        writing(f"{SYSTEM32}\\nvcuda.dll"),
        needs=("driver",),
    ),
    WindowsCase(
        "driver-file-is-text",
        MENDED,
        ("nvcuda.dll",),
        writing(f"{SYSTEM32}\\nvcuda.dll", b"no driver\n" * 100),
        needs=("driver",),
    ),
    WindowsCase(
        "driver-too-old",
        "DriverTooOldError",
        ("supports CUDA up to 12.4", "driver 551.61", "needed: 580 or newer", "onnxruntime-gpu>=1.20,<1.27"),
        driver=(Cuda(version=12040, devices=(RTX_4090,)), NVML(gpus=(RTX_4090,), driver="551.61", cuda=12040)),
        rows=("C01",),
        silent_about=("580.65",),
        plain="printed",
        index=("onnxruntime-gpu==1.26.0",),
        after="ProviderFallbackError",
    ),
    WindowsCase(
        "driver-too-old-and-a-gpu-that-no-older-release-is-for",
        "DriverTooOldError",
        ("supports CUDA up to 12.4", "install NVIDIA driver 580 or newer (needed for CUDA 13)"),
        driver=(Cuda(version=12040, devices=(A100,)), NVML(gpus=(A100,), driver="551.61", cuda=12040)),
        rows=("C01",),
        silent_about=("onnxruntime-gpu>=",),
        plain="printed",
        needs=("driver",),
    ),
    WindowsCase(
        "older-nvcuda-beside-the-program",
        "DriverTooOldError",
        ("the nvcuda.dll that is loaded supports CUDA up to 12.4", "this machine's driver up to 13.0", "System32"),
        lambda machine: shutil.copy(machine.path(f"{SYSTEM32}\\nvcuda.dll"), machine.path("C:\\Python\\nvcuda.dll")),
        driver=(Cuda(version=12040, devices=(RTX_4090,)), NVML(gpus=(RTX_4090,))),
        plain="printed",
        needs=("a person",),
    ),
    WindowsCase(
        "driver-too-old-and-no-nvml",
        "DriverTooOldError",
        ("supports CUDA up to 12.4", "onnxruntime-gpu>=1.20,<1.27"),
        rows=("C01",),
        plain="printed",
        index=("onnxruntime-gpu==1.26.0",),
        after="ProviderFallbackError",
        **driver(Cuda(version=12040, devices=(RTX_4090,)), without=["nvml.dll"]),
    ),
    *(
        WindowsCase(
            f"{name}-that-ends-the-process-when-it-is-loaded",
            "DriverUnusableError",
            (doing, "0xC0000409"),
            making(f"{SYSTEM32}\\{name}.dll", **ENDING),
            driver=DRIVER,
            ask="probe",
            plain="printed" if name == "nvml" else "aborted",
            needs=("reboot",),
        )
        for name, doing in (("nvcuda", "initialising the NVIDIA driver"), ("nvml", "asking NVML"))
    ),
    WindowsCase(
        "no-device",
        "NoDeviceError",
        ("cuInit returned 100", "NVML sees 0 GPUs", "use a machine with an NVIDIA GPU"),
        rows=("C02",),
        driver=(Cuda(init=100), NVML(gpus=())),
        plain="printed",
        needs=("hardware", "reboot"),
    ),
    WindowsCase(
        "no-device-of-those-that-nvml-sees",
        "NoDeviceError",
        ("cuInit returned 100", "NVML sees 1 GPU", "restart Windows"),
        driver=(Cuda(init=100), NVML(gpus=(RTX_4090,))),
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "no-device-and-no-nvml",
        "NoDeviceError",
        ("cuInit returned 100",),
        plain="printed",
        needs=("hardware", "reboot"),
        **driver(Cuda(init=100), NVML(gpus=()), without=["nvml.dll"]),
    ),
    cuinit(3, "could not initialise in this process", "restart Windows"),
    cuinit(34, "the driver refuses to work", "restart Windows"),
    cuinit(102, "this virtual GPU has no license", needs=("root",)),
    cuinit(304, "the driver refuses to work", "restart Windows"),
    cuinit(500, "the driver refuses to work", "install the NVIDIA driver again"),
    cuinit(803, "the parts of the driver differ in version", "restart Windows", rows=("C08",)),
    cuinit(804, "the driver refuses to work", "restart Windows"),
    cuinit(123, "the driver refuses to work", "restart Windows"),
    cuinit(999, "the driver failed and gives no reason", "restart Windows", rows=("C10",)),
    WindowsCase(
        "mismatch-seen-by-nvml-too",
        "DriverUnusableError",
        ("cuInit returned 803", "restart Windows"),
        rows=("C08",),
        driver=(Cuda(init=803), NVML(init=18, gpus=())),
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "gpu-lost-since-it-was-counted",
        "DriverUnusableError",
        ("cuInit returned 100", "a GPU is lost", "restart Windows"),
        driver=(Cuda(init=100), NVML(error=15)),
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "one-gpu-of-two-lost",
        "DriverUnusableError",
        ("cuInit returned 999", "a GPU is lost", "restart Windows"),
        driver=(Cuda(init=999), NVML(gpus=(RTX_4090, replace(RTX_4090, uuid="", handle=15)))),
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "host-memory-limited",
        "DriverUnusableError",
        ("cuInit returned 2", "too little host memory", "paging file"),
        driver=(Cuda(init=2), NVML(gpus=(RTX_4090,))),
        plain="printed",
        needs=("host",),
    ),
    WindowsCase(
        "driver-that-crashes",
        "DriverUnusableError",
        ("initialising the NVIDIA driver", "0xC0000005"),
        making(f"{SYSTEM32}\\nvcuda.dll", exports={"cuInit": CRASHES, "cuDriverGetVersion": THIRTEEN}),
        ask="probe",
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "nvml-that-crashes",
        "DriverUnusableError",
        ("NVML: exception: access violation",),
        making(f"{SYSTEM32}\\nvml.dll", exports={"nvmlInitWithFlags": CRASHES, "nvmlInit_v2": CRASHES}),
        driver=DRIVER,
        ask="probe",
        plain="printed",
        needs=("reboot",),
    ),
    WindowsCase(
        "hidden-by-the-program-itself",
        "NoDeviceError",
        ("CUDA_VISIBLE_DEVICES='-1'", "if the program sets it itself"),
        driver=DRIVER,
        prelude="import os; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'",
        rows=("C02",),
        plain="printed",
        needs=("a person",),
    ),
    WindowsCase(
        "machine-code-passed-over",
        "UnsupportedDeviceError",
        ("CUDA_FORCE_PTX_JIT", RTX_4090.name, "8.9"),
        driver=DRIVER,
        variables={"CUDA_FORCE_PTX_JIT": "1"},
        silent_about=("pip install",),
        plain="printed",
        needs=("a person",),
    ),
    WindowsCase(
        "generation-6.1-and-no-nvcuda",
        "UnsupportedDeviceError",
        ("a GPU", "6.1", "driver-not-found"),
        others=(MENDED,),
        index=("onnxruntime-gpu==1.26.0",),
        after=MENDED,
        **driver(Cuda(), NVML(gpus=(OLD_GPU,)), without=["nvcuda.dll"]),
    ),
    by_nvml("driver-not-loaded", 9, "the NVIDIA driver is not loaded"),
    by_nvml("gpu-lost", 15, "a GPU is lost"),
    by_nvml("gpu-to-be-reset", 16, "has to be reset"),
    by_nvml("gpu-refused-by-the-system", 17, "the operating system refuses the GPU"),
    by_nvml("parts-of-the-driver-differ", 18, "differ in version"),
    hidden("-1", "-1"),
    hidden("an-unknown-uuid", "GPU-99999999"),
    hidden("the-word-all", "all"),
    hidden("an-ordinal-that-is-not-there", "7"),
    hidden("a-number-twice", "0,0"),
    hidden("a-uuid-with-a-typing-error", RTX_4090.uuid.replace("4444", "4445")),
    WindowsCase(
        "ordinal-too-high-in-the-options",
        "DeviceNotFoundError",
        ("3", RTX_4090.uuid),
        driver=DRIVER,
        arguments={"providers": [("CUDAExecutionProvider", {"device_id": 3})]},
        rows=("C03",),
        plain="printed logged",
        needs=("a person",),
    ),
    WindowsCase(
        "ordinal-hidden",
        "DeviceNotFoundError",
        ("cuda:1", "CUDA_VISIBLE_DEVICES"),
        driver=TWO,
        variables={"CUDA_VISIBLE_DEVICES": "0"},
        arguments={"device": "cuda:1"},
        rows=("C03",),
        plain="printed logged",
        needs=("a person",),
    ),
    WindowsCase(
        "shown-too-late",
        "DeviceNotFoundError",
        ("cuda:1", "CUDA_VISIBLE_DEVICES was '0' when this process initialised CUDA", "'0,1' now", "came too late"),
        driver=TWO,
        variables={"CUDA_VISIBLE_DEVICES": "0"},
        arguments={"device": "cuda:1"},
        prelude="import os; from ortgpu.environment.gpu.cuda import initialise\n"
        "initialise(); os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'",
        plain="printed logged",
        needs=("a person", "host"),
    ),
    WindowsCase(
        "ordinal-too-high-and-no-nvcuda",
        "DeviceNotFoundError",
        ("7", RTX_4090.uuid),
        arguments={"device": 7},
        rows=("C03",),
        others=(MENDED,),
        plain="printed logged",
        needs=("a person",),
        **driver(*DRIVER, without=["nvcuda.dll"]),
    ),
    WindowsCase(
        "ordinal-too-high",
        "DeviceNotFoundError",
        ("cuda:3", "cuda:0", RTX_4090.uuid),
        driver=DRIVER,
        arguments=THIRD,
        rows=("C03",),
        plain="printed logged",
        needs=("a person",),
    ),
    WindowsCase(
        "uuid-unknown",
        "DeviceNotFoundError",
        ("GPU-00000000", RTX_4090.uuid),
        driver=DRIVER,
        arguments={"device": "GPU-00000000"},
        plain="printed logged",
        plain_arguments={"providers": [("CUDAExecutionProvider", {"device_id": "GPU-00000000"})]},
        needs=("a person",),
    ),
    generation((6, 1), "onnxruntime-gpu==1.26.0", "ProviderFallbackError", "onnxruntime-gpu>=1.24,<1.27"),
    generation((12, 1), "onnxruntime-gpu==1.28.0", "DriverUnusableError"),
    WindowsCase(
        "taken-by-another-process",
        "DeviceBusyError",
        ("46", "process"),
        driver=(
            Cuda(init=46, devices=(RTX_4090,)),
            NVML(gpus=(replace(RTX_4090, compute_mode=3, processes=((1, 1 << 30),)),)),
        ),
        plain="printed",
        needs=("a person",),
    ),
    WindowsCase(
        "nvml-answers-errors-to-everything",
        "DriverUnusableError",
        ("999", "CUDA_ERROR_UNKNOWN"),
        driver=(Cuda(init=999), NVML(error=999)),
        plain="printed",
        needs=("reboot",),
    ),
    generation((10, 0), "onnxruntime-gpu==1.28.0", "DriverUnusableError", "onnxruntime-gpu==1.28.0"),
    WindowsCase(
        "gpu-that-accepts-no-process",
        "DriverUnusableError",
        ("cuInit returned 999",),
        driver=(Cuda(init=999), NVML(gpus=(replace(RTX_4090, compute_mode=2),))),
        others=("DeviceBusyError",),
        advice_of="DeviceBusyError",
        needs=("root",),
    ),
]

# D: what is asked of a session


def asked(name: str, error: str, *said: str, **changes: Any) -> WindowsCase:
    given = {"cpu": None, "needs": ("a person",), **changes}
    return WindowsCase(name, error, said, **given)


REQUESTS = [
    asked("provider-cuda", "ProviderRequestError", "'CUDAExecutionProvider'", arguments={"providers": ["cuda"]},
          rows=("D04",), plain="warned printed"),
    asked("provider-misspelt", "ProviderRequestError", "write 'CUDAExecutionProvider'",
          arguments={"providers": ["CUDAExecutionProvder"]}, rows=("D04",), plain="warned printed"),
    asked("provider-not-built-in", "ProviderRequestError", "ROCMExecutionProvider",
          arguments={"providers": ["ROCMExecutionProvider"]}, plain="warned printed"),
    asked("providers-a-string", "ProviderRequestError", "CUDAExecutionProvider",
          arguments={"providers": "CUDAExecutionProvider"}, plain="warned printed"),
    asked("providers-a-dict", "ProviderRequestError", "dict",
          arguments={"providers": {"CUDAExecutionProvider": {}}}, plain="printed"),
    asked("options-without-providers", "ProviderRequestError", "provider_options",
          arguments={"provider_options": [{}]}, plain_arguments={"provider_options": [{}]}, plain="silent"),
    asked("option-name", "ProviderOptionError", "devise_id",
          arguments={"providers": [("CUDAExecutionProvider", {"devise_id": 0})]}, rows=("D06",)),
    asked("option-value", "ProviderOptionError", "arena_extend_strategy",
          arguments={"providers": [("CUDAExecutionProvider", {"arena_extend_strategy": "often"})]}, rows=("D06",)),
    asked("option-value-enumerated", "ProviderOptionError", "arena_extend_strategy", "kNever", "kSameAsRequested",
          arguments={"providers": [("CUDAExecutionProvider", {"arena_extend_strategy": "kNever"})]}, rows=("D06",)),
    asked("provider-a-number", "ProviderRequestError", "1", arguments={"providers": ["CUDAExecutionProvider", 1]}),
    asked("provider-tuple-too-short", "ProviderRequestError", "CUDAExecutionProvider",
          arguments={"providers": [("CUDAExecutionProvider",)]}),
    asked("provider-options-a-list", "ProviderRequestError", "CUDAExecutionProvider",
          arguments={"providers": [("CUDAExecutionProvider", ["device_id"])]}),
    asked("options-too-many", "ProviderRequestError", "1 ", "2 ",
          arguments={"providers": ["CUDAExecutionProvider"], "provider_options": [{}, {}]}),
    asked("option-name-in-provider-options", "ProviderOptionError", "devise_id", "device_id", rows=("D06",),
          arguments={"providers": ["CUDAExecutionProvider"], "provider_options": [{"devise_id": 0}]}),
    asked("option-value-number", "ProviderOptionError", "gpu_mem_limit", "lots", rows=("D06",),
          arguments={"providers": [("CUDAExecutionProvider", {"gpu_mem_limit": "lots"})]}),
    asked("option-value-boolean", "ProviderOptionError", "use_tf32", "maybe", rows=("D06",),
          arguments={"providers": [("CUDAExecutionProvider", {"use_tf32": "maybe"})]}),
    asked("fallback-asked-for", "ProviderRequestError", "enable_fallback", arguments={"enable_fallback": 1}),
    asked("cuda-is-called-available", MENDED, "nvcuda.dll", rows=("D02", "D03"), cpu=True, needs=("driver",),
          prelude="import onnxruntime\nassert 'CUDAExecutionProvider' in onnxruntime.get_available_providers()\n"
                  "assert onnxruntime.get_device() == 'GPU'"),
    asked("fallback-forbidden-by-argument", MENDED, "nvcuda.dll", rows=("D08",), cpu=True, needs=("driver",),
          arguments={"enable_fallback": 0}, plain="raised"),
    asked("cpu-forbidden-and-listed", MENDED, "nvcuda.dll", rows=("D09",), prelude=FORBIDDING_THE_CPU,
          arguments={"sess_options": Code("options"),
                     "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]},
          plain="raised printed logged", needs=("driver",)),
    asked("cpu-forbidden", MENDED, "nvcuda.dll", rows=("D10",), prelude=FORBIDDING_THE_CPU,
          arguments={"sess_options": Code("options"), "providers": ["CUDAExecutionProvider"]},
          plain="raised printed logged", needs=("driver",)),
    asked("tensorrt-is-not-installed", "LibraryNotFoundError", "nvinfer_10.dll", "nvonnxparser_10.dll",
          arguments={"providers": ["TensorrtExecutionProvider"]}, driver=DRIVER, plain="printed logged"),
    asked("providers-not-named", MENDED, "nvcuda.dll", rows=("D01",), cpu=True, plain_arguments={}, plain="silent",
          needs=("driver",)),
    asked("only-tensorrt-named", MENDED, "nvcuda.dll", arguments={"providers": ["TensorrtExecutionProvider"]},
          rows=("B27",), plain="printed logged", needs=("driver",)),
]  # fmt: skip

# G: the process and what surrounds it

FROZEN: tuple[tuple[str, str, Literal["session", "probe"]], ...] = (
    ("frozen-program", "frozen = True", "session"),
    ("frozen-program-that-probes", "frozen = True", "probe"),
    ("interpreter-unknown", "executable = None", "probe"),
)

PROCESS = [
    WindowsCase("optimised-interpreter", MENDED, ("nvcuda.dll",), options=("-OO",), needs=("driver",)),
    WindowsCase(
        "program-without-standard-streams",  # as pythonw.exe starts one
        MENDED,
        ("nvcuda.dll",),
        prelude="import os, sys; os.close(0); os.close(1); sys.stdin = sys.stdout = None",
        plain="silent",
        needs=("driver",),
    ),
    WindowsCase(
        "locale-without-utf-8",
        MENDED,
        ("nvcuda.dll",),
        prelude="import locale; assert locale.getpreferredencoding(False) == 'cp1252'",
        variables={"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        needs=("driver",),
    ),
    WindowsCase(
        "search-path-with-nonsense",
        MENDED,
        ("nvcuda.dll",),
        prelude="import sys; sys.path[:0] = ['', 'C:\\\\not there', 'Q:\\\\x', '\\\\\\\\server\\\\share', 'a' * 300]",
        needs=("driver",),
    ),
    *(
        WindowsCase(name, MENDED, ("nvcuda.dll",), prelude=f"import sys; sys.{said}", ask=ask, needs=("driver",))
        for name, said, ask in FROZEN
    ),
    WindowsCase(
        "search-path-with-no-strings",
        MENDED,
        ("nvcuda.dll",),
        prelude="import pathlib, sys; sys.path[:0] = [None, b'/x', pathlib.Path('/y'), 3]",
        plain="raised",
        needs=("driver",),
    ),
    WindowsCase(
        "no-path-at-all",
        MENDED,
        ("nvcuda.dll",),
        prelude="import os; [os.environ.pop(name, None) for name in ('PATH', 'USERPROFILE', 'PROGRAMFILES', 'TEMP')]",
        needs=("driver",),
    ),
    WindowsCase(
        "working-directory-that-is-not-on-drive-c",
        MENDED,
        ("nvcuda.dll",),
        prelude="import os; os.chdir('R:\\\\')",
        needs=("driver",),
    ),
]

CASES: tuple[WindowsCase, ...] = tuple(
    replace(case, group=group)
    for group, cases in {"A": PACKAGES, "B": LIBRARIES, "C": DRIVERS, "D": REQUESTS, "G": PROCESS, "P": PLUGINS}.items()
    for case in cases
)
