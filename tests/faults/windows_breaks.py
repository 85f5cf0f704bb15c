"""What the cases of Windows have in common: a driver, and what is done to a machine to break it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from typing import Any

from tests.faults.on_windows import RTX_4090, SITE_PACKAGES, Break
from tests.lab.stubs import NVML, Cuda
from tests.lab.windows import SYSTEM32, WHEELS, Windows

CUDA, CUDNN = f"{SITE_PACKAGES}\\nvidia\\cu13\\bin\\x86_64", f"{SITE_PACKAGES}\\nvidia\\cudnn\\bin"
CUBLAS_LT, CUBLAS = "cublasLt64_13.dll", "cublas64_13.dll"
CAPI = f"{SITE_PACKAGES}\\onnxruntime\\capi"
INFO = "onnxruntime_gpu-1.31.1.dist-info"
DRIVER = (Cuda(devices=(RTX_4090,)), NVML(gpus=(RTX_4090,)))

CLEAR = (
    "nvidia", *(f"{wheel.replace('-', '_').replace('==', '-')}.dist-info" for wheel in WHEELS)
)  # fmt: skip


def removing(*names: str) -> Break:
    """Remove files and folders of site-packages."""
    return lambda machine: machine.remove(*names)


def deleting(path: str) -> Break:
    return lambda machine: machine.path(path).unlink()


def truncating(path: str, size: int) -> Break:
    return lambda machine: machine.write(path, machine.path(path).read_bytes()[:size])


def writing(path: str, content: bytes = b"") -> Break:
    return lambda machine: machine.write(path, content)


def making(path: str, **properties: Any) -> Break:
    return lambda machine: machine.make(path, **properties)


def all_of(*breaks: Break) -> Break:
    def change(machine: Windows) -> None:
        for one in breaks:
            one(machine)

    return change


def driver(cuda: Cuda, nvml: NVML | None = None, *, without: Iterable[str] = ()) -> dict[str, Any]:
    """The driver of a case. Without files of it: System32 has the rest."""
    breaks = all_of(*(deleting(f"{SYSTEM32}\\{name}") for name in without))
    return {"driver": (cuda, nvml or NVML(gpus=cuda.devices)), "breaks": breaks}


def only_the_cpu_package(machine: Windows) -> None:
    machine.remove("onnxruntime", INFO)
    machine.install_cpu_package()


def unpacking(stem: str) -> Break:
    """Write a wheel of drive W: over what is installed, as an installer does that was not told of the other."""

    def breaks(machine: Windows) -> None:
        (wheel,) = (machine.folder / "dosdevices/w:").glob(f"{stem}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                machine.write(f"{SITE_PACKAGES}/{name}".replace("/", "\\"), archive.read(name))

    return breaks


def first_on_the_path(machine: Windows, *folders: str) -> None:
    path = "Python\\python311._pth"
    lines = machine.path(path).read_text(encoding="utf-8")
    machine.write(path, "".join(f"{folder}\n" for folder in folders).encode() + lines.encode())
