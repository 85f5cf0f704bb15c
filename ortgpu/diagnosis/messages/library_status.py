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
# cudnnStatus_t of cudnn_graph.h, for which some releases have no more words than "unrecognized error code"
# (triton-inference-server/server issue 7296); those of cuDNN 8 are below 1000
_CUDNN = {
    1001: "NOT_INITIALIZED",
    1002: "SUBLIBRARY_VERSION_MISMATCH",
    1008: "SUBLIBRARY_LOADING_FAILED",
    3000: "NOT_SUPPORTED",
    3007: "NOT_SUPPORTED_ARCH_MISMATCH",
    3009: "NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE",
    4000: "INTERNAL_ERROR",
    4003: "INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    4004: "INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    5000: "EXECUTION_FAILED",
}


@dataclass(frozen=True, slots=True)
class LibraryStatus:
    """``library`` as in the message, "CUBLAS"; ``status`` its name, "CUBLAS_STATUS_ALLOC_FAILED"."""

    library: str
    status: str
    says_memory: bool
    is_creation: bool = False  # no handle of the library could be made, whatever the model is
    is_vague: bool = False  # and the status says nothing more

    def lacks_memory(self, free: int | None) -> bool:
        """``free``: what the GPU has; None, unknown. A handle takes memory of the GPU, and where that is full either
        library gives a status that does not say so (faults C11, C12)."""
        if self.says_memory or not self.is_creation:
            return self.says_memory
        return self.is_vague if free is None else free < FOR_A_HANDLE

    @property
    def is_mixture(self) -> bool:
        """cuDNN's parts are of several releases."""
        return re.search("(?<!SERIALIZATION_)VERSION_MISMATCH", self.status) is not None

    @property
    def is_incomplete(self) -> bool:
        """A part of cuDNN cannot be loaded."""
        return re.search("SUBLIBRARY_(LOADING_FAILED|UNAVAILABLE)", self.status) is not None


def read_library_status(text: str) -> LibraryStatus | None:
    match = _FAILURE.search(text)
    if match is None:
        return None
    library, code, word = match[1], int(match[2]), match[3]
    name = {"CUBLAS": _CUBLAS, "CUDNN": {} if word.isupper() else _CUDNN}.get(library, {}).get(code)
    status = f"{library}_STATUS_{name}" if name else word if word.isupper() else f"status {code}"
    is_vague = "NOT_INITIALIZED" in status
    return LibraryStatus(library, status, _is_of_memory(status), bool(_CREATION.search(text)), is_vague)


def _is_of_memory(status: str) -> bool:
    """Of the GPU's: cuDNN 9 has a status of its own for the host's, CURAND_STATUS_ALLOCATION_FAILED is cuRAND's."""
    return re.search(r"(?<!HOST_)ALLOC(ATION)?_FAILED", status) is not None
