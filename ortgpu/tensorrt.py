"""Whether the TensorRT provider that was asked for can be loaded."""

from __future__ import annotations

import os

from .environment.elf import read_elf
from .errors import LibraryNotFoundError, ProviderRequestError, manual
from .preloading import open_library


def check_loadable(cuda_provider: str) -> None:
    """Open what the TensorRT provider links, which also makes it found later.

    Raises:
        ProviderRequestError: this build has no TensorRT provider library.
        LibraryNotFoundError: libraries of TensorRT that it links are not there.
    """
    path = os.path.join(os.path.dirname(cuda_provider), "libonnxruntime_providers_tensorrt.so")
    if not os.path.isfile(path):
        raise ProviderRequestError(
            "TensorRT was asked for and its provider library is not part of the installed ONNX Runtime",
            evidence=[f"not there: {path}"],
            fixes=[manual("leave TensorrtExecutionProvider out")],
        )
    needed = [soname for soname in read_elf(path).needed if soname.startswith(("libnvinfer", "libnvonnxparser"))]
    errors = {soname: error for soname in needed if (error := open_library(soname)) is not None}
    if errors:
        raise LibraryNotFoundError(
            f"TensorRT was asked for and its libraries are missing: {', '.join(errors)}",
            evidence=list(errors.values()),
            fixes=[
                manual("install the TensorRT release that has these libraries, or leave TensorrtExecutionProvider out")
            ],
            missing=tuple(errors),
        )
