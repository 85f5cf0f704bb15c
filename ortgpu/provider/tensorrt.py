"""Check that the requested TensorRT provider can be opened. It is built into ONNX Runtime or comes from a plugin."""

from __future__ import annotations

import glob
import os
import re
from typing import TYPE_CHECKING, Any

from ..environment.gpu.cuda import CudaDevice
from ..environment.libraries.catalogue import is_dll
from ..environment.libraries.library_file import read_library, this_machine, wrong_machine
from ..environment.libraries.loader_windows import path_of
from ..environment.libraries.wheel import provider_beside
from ..environment.packages.metadata import search_path
from ..environment.packages.plugins import takes_ordinal
from ..errors import BrokenPackageError, LibraryNotFoundError, ProviderRequestError, manual
from ..process.late import late
from .preloading import open_library
from .requests import CUDA, TENSORRT

if TYPE_CHECKING:
    from onnxruntime.capi import onnxruntime_inference_collection as collection
else:
    collection = late("onnxruntime.capi.onnxruntime_inference_collection")


def check_loadable(beside: str, *, in_wheels: bool = True) -> None:
    """Open the libraries that the TensorRT provider links, so that they are found later.

    Args:
        beside: the path of another provider library of ONNX Runtime, in the same folder.
        in_wheels: look in TensorRT's wheels, too.

    Raises:
        ProviderRequestError: this build has no TensorRT provider library.
        BrokenPackageError: the provider library is damaged.
        LibraryNotFoundError: libraries of TensorRT that the provider links are missing.
    """
    path = provider_beside(beside, "tensorrt")
    if not os.path.isfile(path):
        raise ProviderRequestError(
            "TensorRT was asked for and its provider library is not part of the installed ONNX Runtime",
            evidence=[f"not there: {path}"],
            fixes=[manual("leave TensorrtExecutionProvider out")],
        )
    provider = read_library(path)
    if provider.problem is not None:  # Opening a damaged file would kill the process (SIGBUS).
        raise BrokenPackageError(
            "TensorRT was asked for and its provider library is damaged",
            evidence=[f"{path}: {provider.problem}"],
            fixes=[manual("install ONNX Runtime again, or leave TensorrtExecutionProvider out")],
            files=(path,),
        )
    # No loader looks into this folder of TensorRT's wheels (NVIDIA/TensorRT, python/packaging/libs_wheel).
    folders = [os.path.join(entry, "tensorrt_libs") for entry in search_path()] if in_wheels else []
    if is_dll(path):
        folders += path_of(os.environ)  # ONNX Runtime lets Windows search PATH for them.
    needed = [name for name in provider.needed if re.match(r"(lib)?(nvinfer|nvonnxparser)", name, re.IGNORECASE)]
    errors = {name: error for name in sorted(needed) if (error := _open(name, folders)) is not None}
    if errors:
        names = ("libnvinfer.so*", "nvinfer_[0-9]*.dll")  # any release
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


# ONNX Runtime's Python part calls these functions of its extension for a session that names the provider. The
# extension has them only with TensorRT built in. 1.32 has dropped the second.
_REGISTRATIONS = {
    TENSORRT[0]: "register_tensorrt_plugins_as_custom_ops",
    TENSORRT[1]: "register_nv_tensorrt_rtx_plugins_as_custom_ops",
}


def check_plugin(name: str, gpu: CudaDevice | None = None) -> None:
    """Check that ONNX Runtime opens a registered plugin of TensorRT by its name, on this GPU, by default the first.

    Raises:
        ProviderRequestError: this release opens the plugin by device only, or the plugin takes no ``device_id``.
    """
    registration = _REGISTRATIONS[name]
    caller: Any = getattr(collection.InferenceSession, "_register_ep_custom_ops", None)
    is_called = registration in getattr(getattr(caller, "__code__", None), "co_names", ())
    by_device = manual(
        f"choose devices of {name} and {CUDA} in SessionOptions.add_provider_for_devices, and leave providers out"
    )
    if is_called and not hasattr(collection.C, registration):
        raise ProviderRequestError(
            f"this release of ONNX Runtime opens the plugin of {name} by its device only",
            evidence=[f"for its name it calls {registration}, which it does not have"],
            fixes=[by_device],
            requested=(name,),
        )
    if gpu is not None and gpu.ordinal != 0 and not takes_ordinal(name):
        alone = f"CUDA_VISIBLE_DEVICES={gpu.uuid}" if gpu.uuid else "this GPU alone in CUDA_VISIBLE_DEVICES"
        raise ProviderRequestError(
            f"the plugin of {name} takes no device_id, and cuda:{gpu.ordinal} was asked for",
            evidence=["by its name, ONNX Runtime opens it on the first GPU"],
            fixes=[by_device, manual(f"or start this process with {alone}, and ask for cuda:0")],
            requested=(name,),
        )


def _open(soname: str, folders: list[str]) -> str | None:
    """Open a library. Return None, or the loader's message. A parser finds the library that was opened before it."""
    error = open_library(soname)
    for path in (os.path.join(folder, soname) for folder in folders):
        if error is not None and os.path.isfile(path):
            file = read_library(path)
            problem = file.problem or wrong_machine(file.machine, this_machine())
            error = open_library(path) if problem is None else f"{path}: {problem}"
    return error
