"""The ONNX Runtime that the tests run with, and what is named after it.

pip has onnxruntime-gpu 1.23.2, for CUDA 12, as the last for Python 3.10, and a release for CUDA 13 for newer Pythons. A
test that takes its names from here is about whichever is installed. Where none is, the newest CUDA is assumed, so that
tests can be collected: the lab then says what is missing.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from ortgpu.environment.libraries.catalogue import BY_STEM, TOOLKIT_MAJORS

GPU_DISTRIBUTION = "onnxruntime-gpu"

#: The first release that opens cuDNN and cuFFT on demand; those before link them, so that no session does without.
OPENS_CUDNN_AT_NEED = (1, 28)
#: The first whose provider links libcuda.so.1, so that it cannot be loaded without one.
LINKS_DRIVER = (1, 27)
#: The first that can tell which node is placed where.
PLACES = (1, 24)


def _version() -> str | None:
    try:
        return metadata.version(GPU_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _built_for() -> int:
    for file in (metadata.files(GPU_DISTRIBUTION) or ()) if VERSION else ():
        if file.name == "build_and_package_info.py":
            text = Path(str(file.locate())).read_text(encoding="utf-8")
            if match := re.search(r"^cuda_version = '(\d+)", text, re.MULTILINE):
                return int(match[1])
    return TOOLKIT_MAJORS[-1]


VERSION = _version()
CUDA = _built_for()


def older_than(release: tuple[int, ...]) -> str | None:
    """Why a test of that release and newer ones is not about the installed one, or None where it is."""
    if VERSION is None or tuple(int(number) for number in re.findall(r"\d+", VERSION)) >= release:
        return None
    return f"of {GPU_DISTRIBUTION} {'.'.join(map(str, release))} and newer, and {VERSION} is installed"


LINKS_CUDNN = older_than(OPENS_CUDNN_AT_NEED) is not None


def soname(stem: str, cuda: int = CUDA) -> str:
    """``libcudart`` is libcudart.so.13 where ONNX Runtime is built for CUDA 13."""
    return BY_STEM[stem].sonames[cuda]


#: What the provider links of CUDA's toolkit.
LINKED = tuple(map(soname, ("libcublasLt", "libcublas", "libcurand", "libcudart", *(["libcufft"] * LINKS_CUDNN))))
