"""Prepared trees of Windows: DLLs in the folders where wheels, installers and programs put them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortgpu.environment.libraries.places import WINDOWS, SearchPlaces
from ortgpu.environment.libraries.search import Resolution, resolve
from tests.library_search.trees import Place, chosen, conda_environment, variable
from tests.support.made_dlls import put

TOOLKIT = ("cublasLt64_13.dll", "cublas64_13.dll")
LAZY = ("cudart64_13.dll", "cufft64_12.dll", "nvrtc64_130_0.dll", "nvJitLink_130_0.dll")
CUDNN = tuple(f"cudnn{part}64_9.dll" for part in ("", "_graph", "_ops", "_cnn", "_adv", "_engines_tensor_ir"))
NEEDED = (*TOOLKIT, "onnxruntime_providers_shared.dll", "KERNEL32.dll", "MSVCP140.dll")  # of 1.28 and newer
NEEDED_12 = (
    "cublasLt64_12.dll",
    "cublas64_12.dll",
    "cufft64_11.dll",
    "cudart64_12.dll",
    "cudnn64_9.dll",
)  # 1.20 to 1.26
ALL = (*TOOLKIT, *LAZY, *CUDNN)


def places(tmp_path: Path, **changes: Any) -> SearchPlaces:
    """Nothing anywhere, but for the changes: ``variables`` are added to those that Windows sets."""
    variables = {"SYSTEMROOT": str(tmp_path / "Windows"), "PROGRAMFILES": str(tmp_path / "Program Files")}
    nothing: dict[str, Any] = {
        "sys_path": (),
        "start_library_path": "",
        "python_prefix": str(tmp_path / "python"),
        "machine": "AMD64",
        "mapped": (),
        "system": WINDOWS,
    }
    return SearchPlaces(**{**nothing, **changes, "variables": {**variables, **changes.get("variables", {})}})


def search(where: SearchPlaces, needed: Sequence[str] = NEEDED, cuda_major: int = 13) -> dict[str, Resolution]:
    return {found.soname: found for found in resolve(where, needed, cuda_major)}


def folders_chosen(found: Mapping[str, Resolution], names: Sequence[str] = TOOLKIT) -> set[str]:
    return {os.path.dirname(chosen(found, name)) for name in names}


TOOLKITS = "Program Files/NVIDIA GPU Computing Toolkit/CUDA"

ORDER = (
    Place("already loaded", "loaded", lambda tmp: {"mapped": tuple(str(tmp / "loaded" / name) for name in ALL)}),
    Place("directory", "given", lambda tmp: {"directory": str(tmp / "given")}),
    Place("torch", "torch/lib", lambda tmp: {"torch_folder": str(tmp / "torch")}),
    Place("nvidia wheels", "site/nvidia/cu13/bin/x86_64", lambda tmp: {"sys_path": (str(tmp / "site"),)}),
    Place("conda", "conda/Library/bin", variable("CONDA_PREFIX", "conda")),
    Place("conda", "python/Library/bin/x64", conda_environment),
    Place("environment variable", "home/bin", variable("CUDA_HOME", "home")),
    Place("environment variable", "path/bin/x64", variable("CUDA_PATH", "path")),
    Place("environment variable", "cudnn/bin/13.0", variable("CUDNN_HOME", "cudnn")),
    Place("environment variable", "cudnn_path", variable("CUDNN_PATH", "cudnn_path")),
    Place("environment variable", "v13.10/bin/x64", variable("CUDA_PATH_V13_10", "v13.10")),
    Place("environment variable", "v13.9/bin/x64", variable("CUDA_PATH_V13_9", "v13.9")),
    Place("toolkit", f"{TOOLKITS}/v13.10/bin/x64", lambda tmp: {}),
    Place("toolkit", f"{TOOLKITS}/v13.2/bin", lambda tmp: {}),
    Place("toolkit", "Program Files/NVIDIA/CUDNN/v9.14/bin/13.0/x64", lambda tmp: {}),
    Place("toolkit", "Program Files/NVIDIA/CUDNN/v9.3/bin/13.0", lambda tmp: {}),
    Place("system loader", "Windows/System32", lambda tmp: {}),
    Place("system loader", "Windows", lambda tmp: {}),
    Place("system loader", "on path", lambda tmp: {"variables": {"PATH": f';absent;"{tmp / "on path"}";'}}),
)


def prepare(tmp_path: Path, *chosen_places: Place, names: Sequence[str] = ALL) -> SearchPlaces:
    changes: dict[str, Any] = {"variables": {}}
    for place in chosen_places:
        put(tmp_path / place.folder, *names)
        new = place.changes(tmp_path)
        changes |= {**new, "variables": {**changes["variables"], **new.get("variables", {})}}
    return places(tmp_path, **changes)
