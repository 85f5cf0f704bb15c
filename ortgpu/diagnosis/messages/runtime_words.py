"""ONNX Runtime's own words: which of them say why a session does not open, and the line among them that does.

Its provider reports by text; the texts here were taken from releases 1.18.1 to 1.31.1.
"""

from __future__ import annotations

import re

from .library_status import read_library_status
from .runtime_errors import code_in

OPTION_NAME = re.compile(r'Unknown provider option: "([^"]*)"')
OPTION_VALUE = re.compile(
    r'Failed to (?:parse|map).*?(?:provider option|option) "([^"]*)"|Failed to parse provider option "([^"]*)"'
)
ALLOCATION = re.compile(r"requested (?:buffer of size|bytes of) (\d+)")
# Kernels that ask for a generation of GPUs, in the words of releases 1.17 (issue 19259) to 1.31
GENERATION = re.compile(
    r"Was the plugin compiled on a compatible CUDA and SM version|compute capability (?:<|>=) ?\d|requires Ampere"
    r"|requires SM ?\d|requires sm ?>= ?\d|need sm\d|only supported on Ampere",
    re.IGNORECASE,
)
PINNED = re.compile(r"expr=cuda(?:MallocHost|HostAlloc)\(")
LIMIT = re.compile(r"Available memory of \d+ is smaller than requested bytes of (\d+)")
# The second is said where its plugins are registered (onnxruntime_pybind_state.cc), before the provider itself is made
TENSORRT = re.compile(r"\bTensorRT EP\b|RegisterTensorRTPluginsAsCustomOps")
# provider_bridge_ort.cc, where it does not log this only; on Windows the provider is given up with an exception where
# CUDA_PATH is set.
NOT_LOADED = re.compile(
    r"(?:Failed to load library|LoadLibrary failed|Error loading)\b.*onnxruntime_providers_(cuda|tensorrt)\b"
    r"|CUDA_PATH is set but CUDA"
)
GRAPH_REFUSED = re.compile("cannot use the (?:graph capture|CUDA Graph) feature")
WITHOUT_CUDNN = re.compile("cuDNN (?:handle is required|is unavailable|is not available)")

# Found before a provider is asked. These texts quote the path, and nodes by their names, which may say anything.
_OF_THE_MODEL = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : (?:NO_SUCHFILE|NO_MODEL|INVALID_PROTOBUF|INVALID_GRAPH"
    r"|\w+ : (?:Load model|This is an invalid model|Invalid model|External data path|Type Error|Node(?= \()"
    r"|Error: Duplicate definition-site|\S+[/\\]core[/\\]graph))\b"
)
# Folders and nodes are named by those who made the model: for a provider, for instance
_GIVEN_NAMES = re.compile(r"\"[^\"]*\"|'[^']*'|\S*[/\\]\S*")


def is_of_the_model(text: str) -> bool:
    """Whether a text is about the model's file, and says nothing of the GPU."""
    return _OF_THE_MODEL.match(text) is not None


def without_given_names(text: str) -> str:
    return _GIVEN_NAMES.sub("", text)


def says_why(text: str) -> bool:
    """Whether a text names a cause for which a session does not open, and not only that the provider could not be set
    up, or what the model lacks."""
    if "is not a registered function/op" in text or is_of_the_model(text):
        return False
    words = without_given_names(text)
    not_loaded = NOT_LOADED.search(text)
    return (
        code_in(words) is not None
        or read_library_status(words) is not None
        or any(known.search(text) for known in (GRAPH_REFUSED, OPTION_NAME, OPTION_VALUE))
        or any(known.search(words) for known in (LIMIT, ALLOCATION, TENSORRT, WITHOUT_CUDNN, GENERATION))
        or (not_loaded is not None and not_loaded[1] == "tensorrt")
    )


_TELLING = re.compile(
    r"(?:CUDA|CUDNN|CUDNN_FE|CUBLAS|CUFFT|CURAND) failure \d+|CUDA error cudaError|Unknown provider option"
    r"|Failed to allocate memory for requested|Available memory of|cudaMallocFromPoolAsync failed|TensorRT EP "
    r"|Please install TensorRT libraries"
)


def telling_line(text: str) -> str:
    """The part of ONNX Runtime's text that says something, without the C++ signatures before it."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    telling = [match.start() for match in _TELLING.finditer(line)]
    line = line[telling[-1] :] if telling else re.sub(r"^/\S+\.(cc|h):\d+ ", "", line)
    return line if len(line) <= 300 else line[:297] + "..."
