"""Explain why a session on the GPU failed while it ran, by the words of ONNX Runtime.

The texts are those of 1.31.1 on an H200: out of memory is a plain Fail of the arena, a CUDA error a Fail or a
RuntimeError with "CUDA failure N" in it, from any method. Those of CUDA's memory pools, of thrust and of TensorRT were
read from the sources of ONNX Runtime 1.26 (cuda_mempool_arena.cc) and of thrust (system_error.h).
"""

from __future__ import annotations

import os
import re
import sys

from ..environment.libraries.catalogue import BY_STEM, CUDNN_CODE
from ..environment.libraries.loader import read_mapped_libraries
from ..environment.libraries.search import SYSTEM
from ..environment.libraries.wheel import coverage_by, read_architectures_of_cudnn
from ..environment.ranks import current_rank
from ..errors import (
    DriverTooOldError,
    GPUError,
    GPUOutOfMemoryError,
    LauncherConflictError,
    LibraryNotFoundError,
    ProviderFailureError,
    UnsupportedDeviceError,
    manual,
)
from ..provider import lifetime
from ..provider.devices import Device
from ..provider.preloading import is_of_cudnn
from .checks import devices, opening
from .checks.libraries import by_folder, mixed
from .messages import cuda_codes, runtime_words
from .messages.runtime_words import LibraryStatus, telling_line

_MIB = 1 << 20
_CUDNN, _CUFFT = SYSTEM.name(BY_STEM["libcudnn"], 9), SYSTEM.name(BY_STEM["libcufft"], 12)
_ON_WINDOWS = sys.platform == "win32"

# Texts of ONNX Runtime 1.18 to 1.31 that quote names, which may say anything: of inputs and outputs, with the prefix of
# its bindings, and of nodes whose inputs do not fit together.
_QUOTES_WHAT_WAS_GIVEN = re.compile(
    r"(?:Error [a-z ]+: )?(?:\[ONNXRuntimeError\] : 2 : |Invalid (?:input|output|feed) name|Failed to find NodeArg "
    r"with name|Failed to find (?:input|output) name in the mapping)|.*: (?:left|right) operand cannot broadcast on",
    re.DOTALL,
)

_POOL = re.compile(r"cudaMallocFromPoolAsync failed.* \((\d+)\), size=(\d+)")


def of_run(text: str, exception: str | None, device: Device | None) -> GPUError | None:
    """Return the typed error for an exception's text and class name, or None if it says nothing about the GPU.

    ``exception`` None: the class is not known. A text can quote anything: the driver has to confirm an error that would
    end the process's use of the GPU.
    """
    if exception == "InvalidArgument" or _QUOTES_WHAT_WAS_GIVEN.match(text):
        return None
    is_ep_fail = exception == "EPFail" or ": EP_FAIL :" in text
    text = text.rpartition("Status Message: ")[2]  # before it is the name of the node, which may say anything
    if match := runtime_words.ALLOCATION.search(text):
        return out_of_memory(int(match[1]), text, device)
    if match := _POOL.search(text):
        if int(match[1]) == cuda_codes.OUT_OF_MEMORY:
            return out_of_memory(int(match[2]), text, device)
        return of_code(int(match[1]), text, device)
    if (number := cuda_codes.code_in(text)) is not None:
        return of_code(number, text, device)
    if failed := runtime_words.read_library_status(text):
        return _of_library(failed, text, device)
    if runtime_words.WITHOUT_CUDNN.search(text):
        return _not_opened("cuDNN", _CUDNN, text)
    if "cuFFT is unavailable" in text:
        return _not_opened("cuFFT", _CUFFT, text)
    if runtime_words.TENSORRT.search(text):
        return opening.tensorrt_failed([telling_line(text)])
    if (found := opening.of_generation(text, [telling_line(text)], device)) is not None:
        return found
    if is_ep_fail:
        return ProviderFailureError("the execution provider failed", evidence=[telling_line(text)], status="EP_FAIL")
    return None


def _of_library(failed: LibraryStatus, text: str, device: Device | None) -> GPUError:
    if failed.lacks_memory(_free_memory_of(device) if failed.is_creation else None):
        return out_of_memory(None, text, device)
    if failed.is_mixture:
        return _mixed_cudnn(text)
    if failed.is_incomplete:
        return _not_opened("cuDNN", _CUDNN, text)
    if failed.is_creation:
        return opening.not_created(failed, [telling_line(text)])
    if failed.library == "CUDNN" and (error := _cudnn_without_code(text, device)) is not None:
        return error
    if "ARCH_MISMATCH" in failed.status:
        return devices.without_code(
            device,
            f"{failed.library} has no code for {device or 'this GPU'} in what this model asks: {failed.status}",
            [telling_line(text)],
            [manual("use another GPU, this model in another data type, or a release of that library for it")],
        )
    return ProviderFailureError(
        f"{failed.library} failed: {failed.status}",
        evidence=[telling_line(text)],
        library=failed.library,
        status=failed.status,
    )


def _free_memory_of(device: Device | None) -> int | None:
    if device is None or device.uuid is None:
        return None
    from ..environment.gpu.driver import read_gpu_memory

    known = read_gpu_memory(device.uuid)
    return known[0] if known is not None else None


def _not_opened(library: str, name: str, text: str) -> LibraryNotFoundError:
    """Return the error for a library that releases from 1.28 on, for CUDA 13, open when a node needs it."""
    return LibraryNotFoundError(
        f"the model reached an operator that needs {library}, which is not available to this session",
        evidence=[telling_line(text)],
        fixes=[manual("do what `ortgpu doctor` says of it, and restart this process")],
        missing=(name,),
    )


def _mixed_cudnn(text: str) -> GPUError:
    mapped = [path for path in read_mapped_libraries() if is_of_cudnn(path)]
    return mixed(
        [telling_line(text), *by_folder(mapped)],
        fixes=[
            manual("install cuDNN again"),
            manual("or make its first GPUSession before this process loads cuDNN by other ways"),
        ],
        libraries=tuple(mapped),
    )


def _cudnn_without_code(text: str, device: Device | None) -> GPUError | None:
    """Return the error of a cuDNN without code: a V100 with 9.11 gets CUDNN_STATUS_EXECUTION_FAILED (issue 25676)."""
    paths = [path for path in read_mapped_libraries() if os.path.basename(path).startswith(CUDNN_CODE)]
    held = read_architectures_of_cudnn(paths)
    capability = device.compute_capability if device is not None else None
    if device is None or capability is None or coverage_by(held, capability, os.environ) != "none":
        return None
    return UnsupportedDeviceError(
        f"the cuDNN of this process holds no code for {devices.described(str(device), capability)}",
        evidence=[telling_line(text), f"{paths[0]} holds {', '.join(map(str, held or ()))}"],
        fixes=[manual(f"install {'cuDNN 9.10' if capability < (7, 5) else 'a newer cuDNN'}, and restart this process")],
        device=device.name,
        compute_capability=capability,
        architectures=tuple(map(str, held or ())),
    )


def of_code(code: int, text: str, device: Device | None) -> GPUError:
    """Return the error for a code of CUDA that came up as ``text`` says."""
    evidence = [telling_line(text)]
    if code == cuda_codes.OUT_OF_MEMORY:
        return opening.lacks_pinned_memory(code, text, _ON_WINDOWS) or out_of_memory(None, text, device)
    if (found := cuda_codes.of_process(code, evidence)) is not None:
        return found
    if code == lifetime.CONTEXT_IS_DESTROYED:
        return lifetime.context_destroyed(evidence)
    if code in cuda_codes.NO_CODE:
        return devices.kernel_without_code(device, evidence)
    meaning = cuda_codes.meaning_of(code, _ON_WINDOWS)
    if code in (cuda_codes.CALL_REQUIRES_NEWER_DRIVER, cuda_codes.UNSUPPORTED_PTX_VERSION):
        version = device.driver_version if device is not None else None
        return DriverTooOldError(
            f"{meaning.what} ({cuda_codes.name_of(code)})",
            evidence=[*evidence, f"driver {version or 'of unknown version'}"],
            fixes=meaning.fixes,
            driver_version=version,
            driver_cuda=None,
            needed_cuda=None,
        )
    return ProviderFailureError(
        f"CUDA failed: {cuda_codes.name_of(code)}",
        evidence=evidence,
        fixes=meaning.fixes
        if code in (cuda_codes.ECC_UNCORRECTABLE, cuda_codes.UNKNOWN)
        else (),  # nothing more is known of others
        library="CUDA",
        status=cuda_codes.name_of(code),
    )


def _own_rank() -> list[str]:
    """Return this rank as a line of evidence, in a job of several ranks."""
    try:
        rank = current_rank()
    except LauncherConflictError:
        return []
    return [f"on rank {rank.rank} of {rank.world_size}"] if rank.world_size > 1 else []


def out_of_memory(requested: int | None, text: str, device: Device | None) -> GPUOutOfMemoryError:
    from ..provider.living import sessions

    free, total, evidence = None, None, [*_own_rank(), telling_line(text)]
    if device is not None and device.uuid is not None:
        from ..environment.gpu.driver import processes_on, read_gpu_memory

        known = read_gpu_memory(device.uuid)
        if known is not None:
            free, total = known
            evidence.append(f"{device}: {free // _MIB} of {total // _MIB} MiB free")
        others = {pid: used for pid, used in processes_on(device.uuid).items() if pid != os.getpid()}
        evidence += [
            f"process {pid} holds {used // _MIB if used is not None else 'unknown'} MiB" for pid, used in others.items()
        ]
    own = devices.sessions_on_gpu(sessions(), device.uuid if device is not None else None)
    if len(own) > 1:  # the running one is among them
        evidence += devices.named_sessions(own)
    summary, fixes = _lack(requested, text)
    return GPUOutOfMemoryError(
        summary,
        evidence=evidence,
        fixes=[
            manual("use a smaller batch; the session works on"),
            *map(manual, fixes),
            *([devices.close_those_that_are_done_with()] if len(own) > 1 else []),
        ],
        requested=requested,
        free=free,
        total=total,
    )


def _lack(requested: int | None, text: str) -> tuple[str, list[str]]:
    """Return what was too little, and what helps beside a smaller batch."""
    size = f": {requested // _MIB} MiB were asked for" if requested is not None else ""
    if runtime_words.LIMIT.search(text):
        return f"the session's gpu_mem_limit is reached{size}", ["or raise that provider option"]
    return f"the GPU ran out of memory{size}", [
        'or pass the provider option arena_extend_strategy="kSameAsRequested"; raise gpu_mem_limit if it is set',
        "or stop other processes on the GPU",
    ]
