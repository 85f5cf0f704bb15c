"""ONNX Runtime's own words: find the words, and the line, with the reason why a session does not open.

Its provider reports by text; the texts here come from releases 1.18.1 to 1.31.1. A failure of a library is
``CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED`` in older releases, a sentence in 1.31.1, with the same number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LIBRARY = re.compile(r"(CUBLAS|CUDNN|CUFFT|CURAND)(?:_FE)? (?:failure|error) (\d+): (\w+)")
OF_WHEELS = frozenset({"CUBLAS", "CUDNN", "CUFFT", "CURAND"})
FOR_A_HANDLE = 1 << 30  # A handle of cuBLAS or cuDNN needs fewer bytes, even with its kernels.
_CREATION = re.compile(r"\b(?:cublas|cublasLt|cudnn)Create\(")

# These are values of cublasStatus_t in cublas_api.h, CUDA 13.1; they have been the same since CUDA 6.
_CUBLAS = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 8: "ARCH_MISMATCH", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR"}
# These are values of cudnnStatus_t in cudnn_graph.h. Some releases call them only "unrecognized error code"
# (triton-inference-server/server issue 7296). In cuDNN 8 the values are below 1000.
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
    """The status of a failed call. ``library`` is "CUBLAS", ``status`` is "CUBLAS_STATUS_ALLOC_FAILED"."""

    library: str
    status: str
    says_memory: bool
    is_creation: bool = False  # The library created no handle: the model does not matter.
    is_vague: bool = False  # The status names no cause.

    def lacks_memory(self, free: int | None) -> bool:
        """Return True if the GPU had too little memory: for a handle the status says otherwise (faults C11, C12)."""
        if self.says_memory or not self.is_creation:
            return self.says_memory
        return self.is_vague if free is None else free < FOR_A_HANDLE

    @property
    def is_mixture(self) -> bool:
        return re.search("(?<!SERIALIZATION_)VERSION_MISMATCH", self.status) is not None

    @property
    def is_incomplete(self) -> bool:
        return re.search("SUBLIBRARY_(LOADING_FAILED|UNAVAILABLE)", self.status) is not None


def read_library_status(match: re.Match[str]) -> LibraryStatus:
    library, code, word = match[1], int(match[2]), match[3]
    name = {"CUBLAS": _CUBLAS, "CUDNN": {} if word.isupper() else _CUDNN}.get(library, {}).get(code)
    status = f"{library}_STATUS_{name}" if name else word if word.isupper() else f"status {code}"
    # cuDNN 9 has another status for host memory. cuRAND has CURAND_STATUS_ALLOCATION_FAILED.
    says_memory = re.search(r"(?<!HOST_)ALLOC(ATION)?_FAILED", status) is not None
    is_vague = "NOT_INITIALIZED" in status
    return LibraryStatus(library, status, says_memory, bool(_CREATION.search(match.string)), is_vague)


PINNED = re.compile(r"expr=cuda(?:MallocHost|HostAlloc)\(")
LIMIT = re.compile(r"Available memory of \d+ is smaller than requested bytes of (?P<size>\d+)")

# ONNX Runtime reports these before it asks a provider. The texts quote paths and node names: they may say anything.
OF_THE_MODEL = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : (?:NO_SUCHFILE|NO_MODEL|INVALID_PROTOBUF|INVALID_GRAPH"
    r"|\w+ : (?:Load model|This is an invalid model|Invalid model|External data path|Type Error|Node(?= \()"
    r"|Error: Duplicate definition-site|\S+[/\\]core[/\\]graph))\b"
)
# The author of a model may name folders and nodes after a provider. A path is looked for from its beginning only: a
# search from every letter of a long word would take for ever.
GIVEN_NAMES = re.compile(r"\"[^\"]*\"|'[^']*'|(?<![^\s\"'])\S*[/\\]\S*")


_TELLING = re.compile(
    r"(?:CUDA|CUDNN|CUDNN_FE|CUBLAS|CUFFT|CURAND) failure \d+|CUDA error cudaError|Unknown provider option"
    r"|Failed to allocate memory for requested|Available memory of|cudaMallocFromPoolAsync failed|TensorRT EP "
    r"|Please install TensorRT libraries"
)


def telling_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    telling = [match.start() for match in _TELLING.finditer(line)]
    line = line[telling[-1] :] if telling else re.sub(r"^/\S+\.(cc|h):\d+ ", "", line)
    return line if len(line) <= 300 else line[:297] + "..."
