"""The published wheels for Windows, unpacked on any system: their DLLs, which are looked at and never opened."""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from tests.lab.environments import call, kept_environment, packages_of

_BLOCK = 1 << 20
_FOR_WINDOWS = ["--only-binary=:all:", "--platform=win_amd64", "--python-version=3.12", "--implementation=cp"]


def unpacked(name: str, requirements: Iterable[str]) -> Path:
    """A kept site-packages with what these wheels have of DLLs and metadata. Wheels are deleted one by one."""
    wanted = list(requirements)

    def fill(python: Path) -> None:
        site = packages_of(python)
        for requirement in wanted:
            with tempfile.TemporaryDirectory(dir=site) as folder:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps"]
                call([*command, *_FOR_WINDOWS, "--dest", folder, requirement])
                for wheel in Path(folder).glob("*.whl"):
                    _unpack(wheel, site)

    return packages_of(kept_environment(name, "\n".join(["for Windows", *wanted]), fill))


def _unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = site / member.filename
            if not member.filename.endswith((".dll", ".pyd", "/METADATA", "/RECORD", "onnxruntime/__init__.py")):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as file:
                if member.filename.startswith("nvidia/"):
                    _copy_without_code(source, file, member.file_size)
                else:
                    shutil.copyfileobj(source, file, _BLOCK)


def _copy_without_code(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """As large as it is, and with holes for the sections of code: 5 GB of CUDA take 300 MB of disk."""
    block = source.read(_BLOCK)
    (at,) = struct.unpack_from("<I", block, 60)
    count, options = struct.unpack_from("<H12xH", block, at + 6)
    sections = (struct.unpack_from("<8s8xII", block, at + 24 + options + 40 * number) for number in range(count))
    kept = [(offset, offset + length) for name, length, offset in sections if name.startswith(b".rdata")]
    offset = 0
    while block:
        if offset == 0 or any(start < offset + len(block) and offset < end for start, end in kept):
            target.seek(offset)
            target.write(block)
        offset += len(block)
        block = source.read(_BLOCK)
    target.truncate(size)
