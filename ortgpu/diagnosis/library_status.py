"""Failures of cuBLAS, cuDNN, cuFFT and cuRAND as ONNX Runtime words them.

``CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED`` in older releases; 1.31.1 asks cublasGetStatusString instead, which
says ``the resource allocation failed``. The number is the same, so the status of cuBLAS is named by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FAILURE = re.compile(r"(CUBLAS|CUDNN|CUFFT|CURAND)(?:_FE)? (?:failure|error) (\d+): (\w+)")
OF_WHEELS = frozenset({"CUBLAS", "CUDNN", "CUFFT", "CURAND"})
FOR_A_HANDLE = 1 << 30  # bytes: surely more than a handle of cuBLAS or cuDNN takes, with the kernels that it loads
_CREATION = re.compile(r"\b(?:cublas|cublasLt|cudnn)Create\(")

# cublasStatus_t of cublas_api.h, CUDA 13.1; the numbers have been the same since CUDA 6
_CUBLAS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """``library`` as in the message, "CUBLAS"; ``status`` its name, "CUBLAS_STATUS_ALLOC_FAILED"."""

    library: str
    status: str
    lacks_memory: bool
    is_guess: bool = False  # that it lacks memory: it is by far the most frequent reason
    is_creation: bool = False  # no handle of the library could be made, whatever the model is

    @property
    def is_mixture(self) -> bool:
        """cuDNN's parts are of several releases."""
        return "SUBLIBRARY_VERSION_MISMATCH" in self.status


def read_library_status(text: str) -> LibraryStatus | None:
    match = _FAILURE.search(text)
    if match is None:
        return None
    library, code, word = match[1], int(match[2]), match[3]
    name = _CUBLAS.get(code) if library == "CUBLAS" else None
    status = f"CUBLAS_STATUS_{name}" if name else word if word.isupper() else f"status {code}"
    # cublasCreate and cudnnCreate take GPU memory, and a full GPU makes them give either status (faults C11, C12)
    is_creation = bool(_CREATION.search(text))
    is_guess = "NOT_INITIALIZED" in status and is_creation
    return LibraryStatus(library, status, _is_of_memory(status) or is_guess, is_guess, is_creation)


def _is_of_memory(status: str) -> bool:
    """Of the GPU's: cuDNN 9 has a status of its own for the host's, CURAND_STATUS_ALLOCATION_FAILED is cuRAND's."""
    return re.search(r"(?<!HOST_)ALLOC(ATION)?_FAILED", status) is not None
