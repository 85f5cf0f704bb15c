"""Builds the package with setuptools, and adds what setuptools cannot: a file that Python reads when it starts.

``ortgpu_enforce.pth`` makes ORTGPU_ENFORCE=1 hold in programs that never import ortgpu, with the help of a module
beside it. Without the variable it looks it up and does nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import zipfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

WAITING = "_ortgpu_waiting"
LINE = (
    'import os; os.environ.get("ORTGPU_ENFORCE", "").lower() not in ("", "0", "false", "no", "off") '
    f'and __import__("{WAITING}")\n'
)


# Of all files in a wheel, unless the variable says so: two builds of the same source are the same bytes.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, where the time of ZIP files begins


def build_wheel(folder: str, settings: Any = None, metadata_folder: str | None = None) -> str:
    return _with_start_files(folder, build_meta.build_wheel(folder, settings, metadata_folder))


def build_editable(folder: str, settings: Any = None, metadata_folder: str | None = None) -> str:
    return _with_start_files(folder, build_meta.build_editable(folder, settings, metadata_folder))


def _with_start_files(folder: str, name: str) -> str:
    """Add them to a wheel, and to its RECORD, without which an uninstall would leave them behind."""
    path = os.path.join(folder, name)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{WAITING}.py"), "rb") as file:
        added = {"ortgpu_enforce.pth": LINE.encode(), f"{WAITING}.py": file.read()}
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".new", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                date_time = entry.date_time
                content += "".join(_recorded(each, data) for each, data in added.items()).encode()
            new.writestr(entry, content)
        for each, data in added.items():
            info = zipfile.ZipInfo(each, date_time)
            info.external_attr = (stat.S_IFREG | 0o644) << 16  # by its name alone it would be for its owner only
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
    os.replace(path + ".new", path)
    return name


def _recorded(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"


__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
