"""What ONNX Runtime's words mean when a session could not be opened.

Its provider reports by text; the texts here were taken from releases 1.18.1 to 1.31.1. A text that says nothing of the
GPU is not translated: the exception stays ONNX Runtime's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...environment.libraries.catalogue import BY_STEM
from ...environment.libraries.search import SYSTEM
from ...errors import (
    DeviceNotFoundError,
    GPUError,
    InsufficientDeviceMemoryError,
    LibraryNotFoundError,
    NoDeviceError,
    ProviderFailureError,
    ProviderFallbackError,
    ProviderOptionError,
    UnsupportedDeviceError,
    manual,
)
from ...provider.devices import not_found
from ...provider.requests import CUDA
from ..checks import driver, libraries
from ..checks.devices import described, gpu_asked_for, lacks_memory, named_device, none_visible, without_code
from ..checks.model import collective_ops_missing
from ..facts import Facts
from ..remedies import commands as remedies
from .cuda_codes import INVALID_DEVICE, NO_DEVICE, OUT_OF_MEMORY, meaning_of
from .library_status import LibraryStatus, read_library_status
from .runtime_errors import code_in

if TYPE_CHECKING:
    from ...environment.gpu.driver import GPU
    from ...provider.devices import Device

_OPTION_NAME = re.compile(r'Unknown provider option: "([^"]*)"')
_OPTION_VALUE = re.compile(
    r'Failed to (?:parse|map).*?(?:provider option|option) "([^"]*)"|Failed to parse provider option "([^"]*)"'
)
ALLOCATION = re.compile(r"requested (?:buffer of size|bytes of) (\d+)")
# Kernels that ask for a generation of GPUs, in the words of releases 1.17 (issue 19259) to 1.31
_GENERATION = re.compile(
    r"Was the plugin compiled on a compatible CUDA and SM version|compute capability (?:<|>=) ?\d|requires Ampere"
    r"|requires SM ?\d|requires sm ?>= ?\d|need sm\d|only supported on Ampere",
    re.IGNORECASE,
)
_PINNED = re.compile(r"expr=cuda(?:MallocHost|HostAlloc)\(")
LIMIT = re.compile(r"Available memory of \d+ is smaller than requested bytes of (\d+)")
# The second is said where its plugins are registered (onnxruntime_pybind_state.cc), before the provider itself is made
TENSORRT = re.compile(r"\bTensorRT EP\b|RegisterTensorRTPluginsAsCustomOps")
# provider_bridge_ort.cc, where it does not log this only; on Windows the provider is given up with an exception where
# CUDA_PATH is set.
_NOT_LOADED = re.compile(
    r"(?:Failed to load library|LoadLibrary failed|Error loading)\b.*onnxruntime_providers_(cuda|tensorrt)\b"
    r"|CUDA_PATH is set but CUDA"
)

# Found before a provider is asked. These texts quote the path, and nodes by their names, which may say anything.
_OF_THE_MODEL = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : (?:NO_SUCHFILE|NO_MODEL|INVALID_PROTOBUF|INVALID_GRAPH"
    r"|\w+ : (?:Load model|This is an invalid model|Invalid model|External data path|Type Error|Node(?= \()"
    r"|Error: Duplicate definition-site|\S+[/\\]core[/\\]graph))\b"
)
# Folders and nodes are named by those who made the model: for a provider, for instance
_GIVEN_NAMES = re.compile(r"\"[^\"]*\"|'[^']*'|\S*[/\\]\S*")


def of_construction(text: str, facts: Facts) -> GPUError | None:
    """The error behind the text of an exception that ONNX Runtime raised while a session was being opened."""
    if "is not a registered function/op" in text:
        return collective_ops_missing(facts)
    if _OF_THE_MODEL.match(text):
        return None
    words = _GIVEN_NAMES.sub("", text)
    if (code := code_in(words)) is not None:  # also inside of a failure to parse device_id
        return _of_code(code, text, facts)
    if "cannot use the graph capture feature" in text or "cannot use the CUDA Graph feature" in text:
        return _graph_refused(text)
    if (refused := _of_option(text)) is not None:
        return refused
    if match := LIMIT.search(words):
        return InsufficientDeviceMemoryError(
            "this session needs more GPU memory than its gpu_mem_limit leaves it",
            evidence=[telling_line(text)],
            fixes=[manual("raise the provider option gpu_mem_limit, or leave it out")],
            requested=int(match[1]),
        )
    if match := ALLOCATION.search(words):
        return lacks_memory(facts, [telling_line(text)], int(match[1]))
    if failed := read_library_status(words):
        return _of_library(failed, text, facts)
    if TENSORRT.search(words):
        return tensorrt_failed(text)
    if facts.request.cudnn_disabled and ("cuDNN is unavailable" in words or "cuDNN handle is required" in words):
        return cudnn_disabled(facts.request.cudnn_operators, [telling_line(text)])
    if re.search("cuDNN handle is required|cuDNN is unavailable|cuDNN is not available", words):
        return _cudnn_unavailable(text, facts)
    gpu = gpu_asked_for(facts)
    if (found := of_generation(words, telling_line(text), gpu)) is not None:
        return found
    if match := _NOT_LOADED.search(text):
        if match[1] == "tensorrt":
            return tensorrt_failed(text)
        return ProviderFallbackError("ONNX Runtime could not load its CUDA provider", evidence=[telling_line(text)])
    if "cuda_execution_provider.cc" in text or re.search("CUDAExecutionProvider|CUDA EP", words):
        return ProviderFallbackError("ONNX Runtime could not set up its CUDA provider", evidence=[telling_line(text)])
    return None


def _of_code(code: int, text: str, facts: Facts) -> GPUError:
    evidence = [telling_line(text)]
    if code == NO_DEVICE:
        found = none_visible(facts)
        if found is not None:
            return found
        return NoDeviceError(
            "CUDA sees no GPU", evidence=evidence, fixes=[manual("use a machine with an NVIDIA GPU", needs="hardware")]
        )
    if code == OUT_OF_MEMORY and (locked := lacks_pinned_memory(text)) is not None:
        return locked
    if code == INVALID_DEVICE:
        found = named_device(facts)
        if found is not None:
            return found
        if facts.request.device is not None:
            return not_found(facts.request.device, (), evidence=evidence)
        return DeviceNotFoundError(
            "CUDA knows no GPU of the number that ONNX Runtime gave it",
            evidence=evidence,
            fixes=meaning_of(code).fixes,
            requested=None,
            available=(),
        )
    return driver.for_code(code, facts, evidence)


def _of_option(text: str) -> ProviderOptionError | None:
    if match := _OPTION_NAME.search(text):
        return ProviderOptionError(
            f"the CUDA provider knows no option {match[1]!r}",
            evidence=[telling_line(text)],
            fixes=[manual(f"remove {match[1]!r} from the provider options")],
            provider=CUDA,
            option=match[1],
        )
    if match := _OPTION_VALUE.search(text):
        option = match[1] or match[2]
        return ProviderOptionError(
            f"the CUDA provider refuses the value of its option {option!r}",
            evidence=[telling_line(text)],
            fixes=[manual(f"correct the value of {option!r}")],
            provider=CUDA,
            option=option,
        )
    return None


def _of_library(failed: LibraryStatus, text: str, facts: Facts) -> GPUError:
    gpu = gpu_asked_for(facts)
    if failed.lacks_memory(gpu.memory_free if gpu is not None else None):
        return lacks_memory(facts, [telling_line(text)])
    if failed.is_mixture:
        return libraries.mixed([telling_line(text)])
    if failed.is_incomplete:
        return _cudnn_unavailable(text, facts)
    if failed.is_creation:
        return not_created(failed, text)
    return ProviderFailureError(
        f"{failed.library} failed while the session was being opened: {failed.status}",
        evidence=[telling_line(text)],
        library=failed.library,
        status=failed.status,
    )


def of_generation(text: str, line: str, gpu: GPU | Device | None) -> UnsupportedDeviceError | None:
    """The error for an operator whose kernels are for other generations of GPUs, which says so itself."""
    if _GENERATION.search(text) is None:
        return None
    shown = described(gpu.name, gpu.compute_capability) if gpu is not None else "this GPU"
    return without_code(
        gpu,
        f"an operator of this model has no kernel for {shown} in the installed ONNX Runtime",
        [line],
        [
            manual("use another GPU, or this model in another data type or quantization"),
            manual("or export it without that operator, which may be one that an optimizer made of several"),
        ],
    )


def lacks_pinned_memory(text: str) -> ProviderFailureError | None:
    """The error for a CUDA that is out of memory, and means the memory of the host that it locks for copies."""
    if _PINNED.search(text) is None:
        return None
    return ProviderFailureError(
        "CUDA gets no page-locked memory of the host, through which arrays are copied to the GPU and back",
        evidence=[telling_line(text)],
        fixes=[
            manual("free memory of the host, or give its container or job more; in WSL, see memory= in .wslconfig"),
            manual("or use a smaller batch"),
        ],
        library="CUDA",
        status="cudaErrorMemoryAllocation",
    )


def not_created(failed: LibraryStatus, text: str) -> ProviderFailureError:
    return ProviderFailureError(
        f"{failed.library} could not be set up for this session: {failed.status}"
        + (", though the GPU has free memory" if failed.is_vague else ""),
        evidence=[telling_line(text)],
        fixes=[
            # issue 26322 and pykeio/ort issue 467: of another CUDA; issue 15718: after a change of the driver
            manual(
                "look with `ortgpu doctor` whether this library is of another CUDA than ONNX Runtime, or the driver "
                "is too old"
            ),
            manual("or whether another part of this process is capturing a CUDA graph: use the session before it"),
            manual("or whether this process has reached its limit of open files (ulimit -n)"),
        ],
        library=failed.library,
        status=failed.status,
    )


def cudnn_disabled(operators: tuple[str, ...], evidence: list[str]) -> ProviderOptionError:
    return ProviderOptionError(
        "the provider option enable_cudnn is 0, and this model has operators that run on cuDNN"
        + (f": {', '.join(operators)}" if operators else ""),
        evidence=evidence,
        fixes=[manual("leave enable_cudnn at 1")],
        provider=CUDA,
        option="enable_cudnn",
        value="0",
    )


def _graph_refused(text: str) -> ProviderOptionError:
    return ProviderOptionError(
        "this model cannot be captured as a CUDA graph",
        evidence=[telling_line(text)],
        fixes=[manual("leave enable_cuda_graph out: every node has to be on the GPU, without copies and control flow")],
        provider=CUDA,
        option="enable_cuda_graph",
        value="1",
    )


def _cudnn_unavailable(text: str, facts: Facts) -> GPUError:
    name = SYSTEM.name(BY_STEM["libcudnn"], 9)
    wheel = remedies.wheel_of(name, facts.environment.cuda_major)
    return LibraryNotFoundError(
        "this model needs cuDNN, which cannot be loaded",
        evidence=[telling_line(text)],
        fixes=[remedies.install_libraries(facts.environment, [wheel])] if wheel else [],
        missing=(name,),
    )


def tensorrt_failed(text: str) -> ProviderFailureError:
    return ProviderFailureError("TensorRT failed", evidence=[telling_line(text)], library="TensorRT")


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
