"""The CUDA runtime for the child process of a preflight: the same library that ONNX Runtime would use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..diagnosis.checks import opening
from ..diagnosis.facts import Facts
from ..diagnosis.remedies import commands as remedies
from ..environment.inspection import inspect_environment
from ..environment.libraries.catalogue import BY_STEM
from ..environment.packages.installed import locate_packages
from ..errors import LibraryNotFoundError, manual
from ..provider.preloading import open_library, plan
from ..running.cudart import CudaCallError, CudaRuntime

_RUNTIME = "libcudart"


def open_gpu(ordinal: int) -> CudaRuntime:
    """Create a CUDA context on this GPU, as the current device of this thread.

    Raises:
        LibraryNotFoundError: there is no CUDA runtime for the installed ONNX Runtime.
        CudaCallError: CUDA refused; see :func:`typed_cuda_errors`.
    """
    runtime = CudaRuntime(_load_library(), ordinal)
    runtime.use_device()
    runtime.free(0)  # before CUDA 12, to choose the device alone creates no context
    return runtime


@contextlib.contextmanager
def typed_cuda_errors() -> Iterator[None]:
    """Raise the GPUError for a failed CUDA call."""
    try:
        yield
    except CudaCallError as failure:
        raise opening.for_code(failure.code, Facts(inspect_environment()), [str(failure)]) from failure


def _load_library() -> str:
    found = plan(locate_packages()).resolutions
    candidates = [each for one in found if one.spec.stem == _RUNTIME for each in one.candidates]
    refused = []
    for candidate in candidates:
        error = open_library(candidate.path)
        if error is None:
            return candidate.path
        refused.append(f"{candidate.path}: {error}")
    environment = inspect_environment()
    wheel = remedies.wheel_of(f"{_RUNTIME}.so", environment.cuda_major)
    raise LibraryNotFoundError(
        "the CUDA runtime, which the collective operations need, was not found",
        evidence=refused or ["there is no file of it in any place where libraries are looked for"],
        fixes=[
            remedies.install_libraries(environment, [wheel])
            if wheel is not None
            else manual("install an ONNX Runtime that is built with CUDA")
        ],
        missing=(BY_STEM[_RUNTIME].sonames.get(environment.cuda_major or 0, f"{_RUNTIME}.so"),),
    )
