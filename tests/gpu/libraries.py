"""Where this host has its CUDA libraries. What a test needs and is not here skips it, and says what was looked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.common import child_environment, loader_finds, nvidia_folders, site_folders, without_cuda_variables


def cuda_major() -> str:
    """The CUDA that the installed ONNX Runtime was built for, from its own build record."""
    for site in site_folders():
        record = site / "onnxruntime" / "capi" / "build_and_package_info.py"
        if record.is_file():
            match = re.search(r"cuda_version\s*=\s*['\"](\d+)", record.read_text())
            if match:
                return match[1]
            pytest.skip(f"{record} names no CUDA version")
    pytest.skip("no onnxruntime package is installed")


def toolkit() -> tuple[Path, Path]:
    """Home and library folder of a CUDA toolkit of the right major that is complete enough; skips without one."""
    major = cuda_major()
    needed = [f"libcudart.so.{major}", f"libcublas.so.{major}", f"libcublasLt.so.{major}", "libcurand.so.10"]
    seen = []
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", f"/usr/local/cuda-{major}")
    for home in filter(None, homes):
        for name in ("lib64", "lib", "targets/x86_64-linux/lib"):
            folder = Path(home, name)
            missing = [soname for soname in needed if not (folder / soname).exists()]
            if not missing:
                return Path(home), folder
            if folder.is_dir():
                seen.append(f"{folder} lacks {', '.join(missing)}")
    pytest.skip("needs a CUDA toolkit with its libraries: " + ("; ".join(seen) or "none is installed"))


def cudnn_home() -> Path | None:
    """A folder for CUDNN_HOME where cuDNN is a wheel; None: the system loader finds it. Skips where there is none."""
    if loader_finds("libcudnn.so.9", child_environment(without_cuda_variables())):
        return None
    for folder in nvidia_folders():
        if (folder / "cudnn" / "lib" / "libcudnn.so.9").is_file():
            return folder / "cudnn"
    pytest.skip("needs cuDNN 9, in the system or as a wheel")
