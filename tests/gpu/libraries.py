"""Where this host has its CUDA libraries. What a test needs and is not here skips it, and says what was looked for."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.lab.mounts import with_mounts
from tests.support.children import child_environment, run_child
from tests.support.this_machine import loader_finds, nvidia_folders, site_folders, without_cuda_variables


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


def hidden_from_the_loader(soname: str, env: Mapping[str, str]) -> list[str]:
    """What starts a process with ``env`` whose system loader does not find the library; skips where that is refused.

    Its folders are covered in a mount namespace of that process, by an overlay in which the library's files are gone.
    """
    pattern = soname.partition(".so")[0] + "[._]*"
    before: list[str] = []
    folders: list[Path] = []
    while found := loader_finds(soname, env, before):
        folder = Path(found).parent
        if folder in folders:
            pytest.skip(f"{soname} cannot be hidden here: the system loader still finds {found}")
        folders.append(folder)
        before = _covering(folders, pattern)
        tried = run_child([*before, sys.executable, "-S", "-c", ""], env=env, deadline=30)
        if tried.returncode:
            pytest.skip(f"{soname} cannot be hidden here: the system loader finds {found}; {tried.stderr.strip()}")
    return before


def with_little_shared_memory(env: Mapping[str, str]) -> list[str]:
    """What starts a process for which /dev/shm has 64 KiB, as in a container it has 64 MiB; skips where that is
    refused."""
    before = with_mounts(["mount -t tmpfs -o size=64k tmpfs /dev/shm"])
    tried = run_child([*before, sys.executable, "-S", "-c", ""], env=env, deadline=30)
    if tried.returncode:
        pytest.skip(f"/dev/shm cannot be made small here: {tried.stderr.strip()}")
    return before


def _covering(folders: Iterable[Path], pattern: str) -> list[str]:
    lines = ["cover=$(mktemp -d)", 'mount -t tmpfs tmpfs "$cover"']
    for number, folder in enumerate(folders):
        upper, work, place = f'"$cover"/upper{number}', f'"$cover"/work{number}', shlex.quote(str(folder))
        options = f"lowerdir={place},upperdir={upper},workdir={work}"
        lines += [f"mkdir {upper} {work}", f"mount -t overlay overlay -o {options} {place}", f"rm {place}/{pattern}"]
    return with_mounts([*lines, 'umount --lazy "$cover"', 'rmdir "$cover"'])
