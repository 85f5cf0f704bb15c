"""Check that the TensorRT provider of ONNX Runtime can be opened."""

from __future__ import annotations

import glob
import os
import re

from ..environment.libraries.catalogue import is_dll
from ..environment.libraries.library_file import read_library, this_machine, wrong_machine
from ..environment.libraries.loader import Loader
from ..environment.libraries.places import path_of
from ..environment.libraries.wheel import provider_beside
from ..environment.packages.metadata import search_path
from ..errors import BrokenPackageError, LibraryNotFoundError, ProviderRequestError, manual
from .preloading import open_library
from .requests import CUDA


def check_loadable(beside: str, *, in_wheels: bool = True, loader: Loader | None = None) -> None:
    """Open the libraries that the TensorRT provider links, so that they are found later.

    Args:
        beside: the path of another provider library of ONNX Runtime, in the same folder.
        in_wheels: look in TensorRT's wheels, too.
        loader: None means that of this process.

    Raises:
        ProviderRequestError: this build has no TensorRT provider library.
        BrokenPackageError: it has one that is damaged.
        LibraryNotFoundError: libraries of TensorRT that it links are missing.
    """
    path = provider_beside(beside, "tensorrt")
    if not os.path.isfile(path):
        raise ProviderRequestError(
            "TensorRT was asked for and its provider library is not part of the installed ONNX Runtime",
            evidence=[f"not there: {path}"],
            fixes=[manual("leave TensorrtExecutionProvider out")],
        )
    provider = read_library(path)
    if provider.problem is not None:  # it would kill the process (SIGBUS) that opens it
        raise BrokenPackageError(
            "TensorRT was asked for and its provider library is damaged",
            evidence=[f"{path}: {provider.problem}"],
            fixes=[manual("install ONNX Runtime again, or leave TensorrtExecutionProvider out")],
            files=(path,),
        )
    # NVIDIA/TensorRT, python/packaging/libs_wheel: a folder of libraries that no loader looks into
    folders = [os.path.join(entry, "tensorrt_libs") for entry in search_path()] if in_wheels else []
    if is_dll(path):
        folders += path_of(os.environ)  # where ONNX Runtime has Windows look for them, and nothing else does
    needed = [name for name in provider.needed if re.match(r"(lib)?(nvinfer|nvonnxparser)", name, re.IGNORECASE)]
    errors = {name: error for name in sorted(needed) if (error := _open(name, folders, loader)) is not None}
    if errors:
        names = ("libnvinfer.so*", "nvinfer_[0-9]*.dll")  # in these folders, of another release than the needed one
        patterns = [os.path.join(glob.escape(folder), name) for folder in folders for name in names]
        others = [path for pattern in patterns for path in glob.glob(pattern)]
        majors = sorted({name.removesuffix(".dll").rpartition("_" if is_dll(name) else ".")[2] for name in errors})
        raise LibraryNotFoundError(
            f"TensorRT was asked for and its libraries are missing: {', '.join(errors)}",
            evidence=[*errors.values(), *(f"found: {name}" for name in sorted(others))],
            fixes=[
                manual(
                    f"install TensorRT in a release {' and '.join(majors)}.*, or leave TensorrtExecutionProvider out"
                )
            ],
            missing=tuple(errors),
        )


def by_device_only(name: str) -> ProviderRequestError:
    """Return the error for a plugin of TensorRT that is asked for by its name."""
    return ProviderRequestError(
        f"a session takes the plugin of {name} by its device only",
        evidence=["it takes no device_id, and ONNX Runtime 1.31 does not open it by its name"],
        fixes=[
            manual(f"leave providers out: SessionOptions.add_provider_for_devices takes those of {name} and {CUDA}")
        ],
        requested=(name,),
    )


def _open(soname: str, folders: list[str], loader: Loader | None) -> str | None:
    """Open a library. Return None, or the loader's words. A parser finds the library that was opened before it."""
    error = open_library(soname, loader=loader)
    for path in (os.path.join(folder, soname) for folder in folders):
        if error is not None and os.path.isfile(path):
            file = read_library(path)
            problem = file.problem or wrong_machine(file.machine, this_machine())
            error = open_library(path, loader=loader) if problem is None else f"{path}: {problem}"
    return error
