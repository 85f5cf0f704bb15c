"""A build backend on top of setuptools. It adds a start-up file of Python to the wheel.

``ortgpu_enforce.pth``, with two modules beside it, makes ORTGPU_ENFORCE=1 work in programs that never import ortgpu. If
the variable is not set, it does nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import zipfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - all hooks of a backend; two of them are replaced below

WAITING = "_ortgpu_waiting"
# Python continues after an error in this line. None blocks ONNX Runtime until the module has been imported. In a
# virtual environment Python reads the file twice, but executes the module only once. The module removes None.
LINE = (
    f'import os, sys; "ORTGPU_ENFORCE" in os.environ and "{WAITING}" not in sys.modules'
    f' and [sys.modules.setdefault("onnxruntime"), __import__("{WAITING}")]\n'
)


# All files in a wheel get this time, so that two builds of the same source are equal.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, the earliest time in a ZIP file


def build_wheel(folder: str, settings: Any = None, metadata_folder: str | None = None) -> str:
    return _add_start_files(folder, build_meta.build_wheel(folder, settings, metadata_folder))


def build_editable(folder: str, settings: Any = None, metadata_folder: str | None = None) -> str:
    return _add_start_files(folder, build_meta.build_editable(folder, settings, metadata_folder))


def _add_start_files(folder: str, name: str) -> str:
    """Add the start files to a wheel and to its RECORD, so that an uninstall removes them."""
    path = os.path.join(folder, name)
    new_files = {"ortgpu_enforce.pth": LINE.encode()}
    for module in (f"{WAITING}.py", "_ortgpu_hook.py"):
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), module), "rb") as file:
            new_files[module] = file.read()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".new", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                date_time = entry.date_time
                content += "".join(_recorded(file_name, data) for file_name, data in new_files.items()).encode()
            new.writestr(entry, content)
        for file_name, data in new_files.items():
            info = zipfile.ZipInfo(file_name, date_time)
            info.external_attr = (stat.S_IFREG | 0o644) << 16  # By default only the owner could read the file.
            new.writestr(info, data, zipfile.ZIP_DEFLATED)
    os.replace(path + ".new", path)
    return name


def _recorded(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(data)}\n"
