"""Site-packages folders as installers leave them, and what is read of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from ortgpu.environment.packages.installed import Distribution, OnnxRuntime, Packages, read_packages

BUILD_INFO = "package_name = 'onnxruntime-gpu'\n__version__ = '1.31.1'\ncuda_version = '13.0'\n"
ENGINE = {
    "onnxruntime/__init__.py": "__version__ = '1.31.1'\n",
    "onnxruntime/capi/__init__.py": "",
    "onnxruntime/capi/build_and_package_info.py": BUILD_INFO,
    "onnxruntime/capi/onnxruntime_pybind11_state.so": "ELF",
    "onnxruntime/capi/libonnxruntime_providers_cuda.so": "ELF, and longer",
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so": "ELF",
}


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content)}\n"


def install(site: Path, name: str, version: str, files: Mapping[str, str], *, record: str | None = "") -> Path:
    """What an installer does: files, METADATA, and a RECORD unless ``record`` is None. Returns the dist-info."""
    info = site / f"{name}-{version}.dist-info"
    contents = {path: text.encode() for path, text in files.items()}
    contents[f"{info.name}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    lines = record or ""
    for path, content in contents.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        lines += record_line(path, content)
    if record is not None:
        (info / "RECORD").write_text(lines + f"{info.name}/RECORD,,\n")
    return info


def read(*places: Path | str) -> Packages:
    return read_packages([str(place) for place in places])


def engine(*places: Path | str) -> OnnxRuntime:
    return read(*places).onnxruntime


def names(distributions: tuple[Distribution, ...]) -> list[str]:
    return [one.name for one in distributions]
