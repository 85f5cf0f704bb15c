"""The machine that tests and benchmarks run on: its packages and CUDA libraries, its GPUs, and a record of it all.

Only the standard library is imported here, so that a child pays for nothing but what it measures or tests.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.support.children import ROOT, report, run_child

# Packages that bring CUDA libraries of their own, or go looking for them.
CUDA_CARRIERS = (
    "torch",
    "torchvision",
    "torchaudio",
    "functorch",
    "triton",
    "cupy",
    "cupy_backends",
    "cupyx",
    "jax",
    "jaxlib",
)
CUDA_FILES = (
    "libcudart.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcurand.so",
    "libcufft.so",
    "libnvrtc.so",
    "libcudnn.so",
)


# Packages and libraries


def without_cuda_variables() -> dict[str, str | None]:
    """Changes that leave no variable pointing at CUDA or cuDNN; the driver's folder stays on the loader's path."""
    entries = [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
    driver = [entry for entry in entries if not any(any(Path(entry).glob(f"{name}*")) for name in CUDA_FILES)]
    names = ("CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "CUDNN_PATH", "CONDA_PREFIX")
    return {**dict.fromkeys(names), "LD_LIBRARY_PATH": os.pathsep.join(driver) or None}


def site_folders() -> list[Path]:
    """Folders of this process's sys.path that hold installed packages, in order."""
    folders = (Path(entry) for entry in sys.path if entry)
    installed = (path.resolve() for path in folders if path.is_dir() and any(path.glob("*.dist-info")))
    return [path for path in dict.fromkeys(installed) if path != ROOT]


def nvidia_folders() -> list[Path]:
    """Each `nvidia` folder that NVIDIA's wheels were installed into."""
    return [path / "nvidia" for path in site_folders() if (path / "nvidia").is_dir()]


def overlay(folder: Path, *, nvidia: Literal["all", "none", "all but cudnn"]) -> Path:
    """Fill `folder` with links to the installed packages, without those that carry CUDA; NVIDIA's wheels as asked.

    With ``python -S`` and this folder on PYTHONPATH, an interpreter sees these packages and no others.
    """
    folder.mkdir(parents=True)
    for site in site_folders():
        shadowed = (folder / "onnxruntime").exists()  # its metadata would make two owners of one folder
        for entry in site.iterdir():
            top = re.split(r"[-.]", entry.name)[0]
            carrier = top in CUDA_CARRIERS or top.startswith(("nvidia", "cupy_cuda", "jax_cuda", "tensorrt"))
            if top.startswith("nvidia_ml_py"):
                carrier = False
            if nvidia != "none" and top.startswith("nvidia_"):
                carrier = nvidia == "all but cudnn" and top.startswith("nvidia_cudnn")
            skipped = entry.name == "__pycache__" or entry.suffix == ".pth"
            skipped = skipped or (shadowed and top.startswith("onnxruntime"))
            link = folder / entry.name
            if not (carrier or skipped or link.is_symlink() or link.exists()):
                link.symlink_to(entry)
    if nvidia != "none":
        (folder / "nvidia").mkdir()
        for source in nvidia_folders():
            for entry in source.iterdir():
                link = folder / "nvidia" / entry.name
                if not link.exists() and not (nvidia == "all but cudnn" and entry.name == "cudnn"):
                    link.symlink_to(entry)
    return folder


def loader_finds(soname: str, env: Mapping[str, str], before: Sequence[str] = ()) -> str | None:
    """Path at which the system loader of a child with `env`, started by `before`, finds `soname`; None: it does not."""
    code = (
        "import ctypes, sys\n"
        "from tests.support.children import report\n"
        "from tests.support.this_machine import mapped_files\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "stem = sys.argv[1].partition('.so')[0] + '.so'\n"
        "paths = [path for path in mapped_files() if path.rpartition('/')[2].startswith(stem)]\n"
        "report('path', paths[0] if paths else sys.argv[1])\n"
    )
    found = run_child([*before, sys.executable, "-S", "-c", code, soname], env=env, deadline=60).reports.get("path")
    return None if found is None else str(found)


def mapped_files() -> list[str]:
    """Files that are mapped into this process, each once."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
        paths = (line.split(maxsplit=5)[5].rstrip("\n") for line in stream if "/" in line)
        return list(dict.fromkeys(path.removesuffix(" (deleted)") for path in paths))


# GPUs


@dataclass(frozen=True, slots=True)
class VisibleGPU:
    ordinal: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class GPUs:
    """What the CUDA driver shows a fresh process. ``reason``: why nothing, when it shows nothing."""

    visible: tuple[VisibleGPU, ...]
    reason: str | None


def find_gpus() -> GPUs:
    """Ask the driver, in a child: a process that has called cuInit can no longer fork."""
    command = [sys.executable, "-S", "-c", "from tests.support.this_machine import ask_driver; ask_driver()"]
    child = run_child(command, deadline=60)
    visible = tuple(VisibleGPU(**entry) for entry in child.reports.get("gpus", ()))
    reason = child.reports.get("reason") or (None if visible else f"the driver shows no GPU ({child.ended})")
    return GPUs(visible, reason)


def ask_driver() -> None:
    """In a child: report the GPUs of the CUDA driver. Makes no context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        nodes = "there" if os.path.exists("/dev/nvidia0") else "not there"
        report("reason", f"the CUDA driver cannot be loaded ({error}); /dev/nvidia0 is {nodes}")
        return
    status = cuda.cuInit(0)
    if status:
        report("reason", f"the CUDA driver refuses to start: cuInit returned {status}")
        return
    count, device = ctypes.c_int(), ctypes.c_int()
    name, identity = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = []
    for ordinal in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetUuid(identity, device)
        gpus.append({"ordinal": ordinal, "uuid": f"GPU-{uuid.UUID(bytes=identity.raw)}", "name": name.value.decode()})
    report("gpus", gpus)


# The record of a machine


def environment_record(gpus: GPUs) -> dict[str, Any]:
    """Machine, versions, date and commit: what a figure means nothing without."""
    return {
        "machine": {
            "gpus": [gpu.name for gpu in gpus.visible],
            "driver": _driver_version(),
            "cpu": _first_match(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **_installed_versions()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("ORTGPU_COMMIT") or commit_of(ROOT),
    }


def _driver_version() -> str | None:
    return _first_match(r"^NVRM version:.*?\b(\d{3,}\.\d+(?:\.\d+)*)", "/proc/driver/nvidia/version")


def _first_match(pattern: str, path: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None


def _installed_versions() -> dict[str, str]:
    wanted = re.compile(
        r"onnxruntime.*|numpy|onnx|torch|torchvision|optimum.*|nvidia[-_](cublas|cudnn|cuda[-_]runtime).*"
    )
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if wanted.fullmatch(name):
            versions.setdefault(name, distribution.version)  # the first on sys.path is the one that is imported
    return dict(sorted(versions.items()))


def commit_of(checkout: Path) -> str | None:
    """Without git, which the machine that is measured may not have."""
    try:
        git = checkout / ".git"
        if git.is_file():  # a worktree, whose branches are those of the checkout that it belongs to
            git = checkout / git.read_text().partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        reference = head.removeprefix("ref:").strip()
        if (git / "commondir").is_file():
            git = git / (git / "commondir").read_text().strip()
        if (git / reference).is_file():
            return (git / reference).read_text().strip()
        return _first_match(rf"^([0-9a-f]{{40}}) {re.escape(reference)}$", str(git / "packed-refs"))
    except OSError:
        return None
