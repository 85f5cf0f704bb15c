"""One table from the messages of ONNX Runtime and CUDA to errors of ortgpu, while a session opens and while it runs.

A row has a pattern and a function. The first matching row decides if its function returns an error. A text that says
nothing about the GPU is not translated: the exception stays ONNX Runtime's own.

The texts come from releases 1.17 to 1.31, the texts of a run from 1.31.1 on an H200, those of CUDA's memory pools,
thrust and TensorRT from sources (cuda_mempool_arena.cc, system_error.h). A CUDA error has "CUDA failure N" in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ... import errors
from ...environment.gpu import driver as nvml
from ...environment.gpu.driver import GPU
from ...environment.libraries.catalogue import BY_STEM, CUDNN_CODE
from ...environment.libraries.loader import read_mapped_libraries
from ...environment.libraries.search import SYSTEM
from ...environment.libraries.wheel import coverage_by, read_architectures_of_cudnn
from ...environment.ranks import current_rank
from ...errors import Fix, GPUError, manual
from ...provider import lifetime
from ...provider.devices import Device
from ...provider.living import sessions
from ...provider.preloading import is_of_cudnn
from ...provider.requests import CUDA
from ..facts import Facts
from ..messages import cuda_codes, runtime_words
from ..remedies import fixes as remedies
from . import devices, driver
from .libraries import lacks_cudnn, list_by_folder, mixed
from .model import collective_ops_missing

Match = re.Match[str]

_MIB = 1 << 20
_CUDNN, _CUFFT = SYSTEM.name(BY_STEM["libcudnn"], 9), SYSTEM.name(BY_STEM["libcufft"], 12)


@dataclass(frozen=True, slots=True)
class Failed:
    """The text of an exception, in a run without the name of the node, and what is known around it."""

    text: str
    evidence: list[str]
    facts: Facts | None = None  # Of this machine while a session opens; None while it runs.
    gpu: GPU | Device | None = None

    @property
    def here(self) -> Facts:
        assert self.facts is not None, "a row of a run asks for the facts of an opening"
        return self.facts

    def meaning(self, code: int) -> cuda_codes.Meaning:
        is_windows = sys.platform == "win32" if self.facts is None else self.facts.environment.host.is_windows
        return cuda_codes.meaning_of(code, is_windows)

    def becomes(self, error: type[GPUError], summary: str, *fixes: str, **fields: Any) -> GPUError:
        """Return an error with the words as evidence; a fix that is a plain text is a sentence."""
        advice = [fix if isinstance(fix, Fix) else manual(fix) for fix in fixes]
        return error(summary, evidence=self.evidence, fixes=advice, **fields)


def plain(error: type[GPUError], summary: str, *fixes: str, **details: str | type) -> Callable[..., GPUError]:
    """Return a function for an error with a fixed text. The first group of its pattern stands at {}, and for a type."""

    def explain(failed: Failed, match: Match | int | None = None) -> GPUError:
        name = next(filter(None, match.groups()), "") if isinstance(match, re.Match) else ""
        fields = {field: value(name) if isinstance(value, type) else value for field, value in details.items()}
        advice = [fix if isinstance(fix, Fix) else fix.format(repr(name)) for fix in fixes]
        return failed.becomes(error, summary.format(repr(name)), *advice, **fields)

    return explain


# Codes of CUDA


def _old_driver(failed: Failed) -> GPUError:
    facts = failed.here
    words = "the NVIDIA driver is older than the CUDA that the installed ONNX Runtime was built with"
    cause = driver.not_found(facts) or driver.too_old(facts)  # cudart reports 35 without any driver, too.
    return cause or driver.older_than_needed(facts, words, failed.evidence, [remedies.update_driver(facts.environment)])


def _driver_older_than_a_library(failed: Failed, code: int) -> errors.DriverTooOldError:
    meaning = failed.meaning(code)
    summary = f"{meaning.what} ({cuda_codes.name_of(code)})"
    if failed.facts is not None:
        evidence = [*failed.evidence, *driver.versions(failed.facts)]
        return driver.older_than_needed(failed.facts, summary, evidence, list(meaning.fixes))
    version = failed.gpu.driver_version if isinstance(failed.gpu, Device) else None
    evidence = [*failed.evidence, f"driver {version or 'of unknown version'}"]
    return errors.DriverTooOldError(summary, evidence=evidence, fixes=meaning.fixes, driver_version=version)


def _unknown_device(failed: Failed, code: int) -> GPUError:
    device_error = devices.named_device(failed.here) or devices.none_visible(failed.here)
    what, fixes = "CUDA knows no GPU of this number", failed.meaning(code).fixes
    requested = failed.here.request.device
    return device_error or failed.becomes(errors.DeviceNotFoundError, what, *fixes, requested=requested)


def _no_kernel(failed: Failed, summary: str, *fixes: str) -> GPUError:
    name, capability = (failed.gpu.name, failed.gpu.compute_capability) if failed.gpu is not None else (None, None)
    summary = summary.replace("{}", devices.described(name, capability))
    return failed.becomes(errors.UnsupportedDeviceError, summary, *fixes, device=name, compute_capability=capability)


def _explain_missing_kernel(failed: Failed) -> GPUError:
    device_error = devices.unsupported(failed.facts) if failed.facts is not None else None
    # Without an error here, the file has code for the GPU in other kernels.
    return device_error or _no_kernel(
        failed,
        "the installed ONNX Runtime holds no code for this GPU in one of the kernels of this model",
        "use another release of ONNX Runtime, or another GPU",
    )


def _busy(failed: Failed) -> GPUError:
    uuid = failed.gpu.uuid if failed.gpu is not None else None
    stop = "stop the process that holds the GPU, or choose another one with device="
    return failed.becomes(errors.DeviceBusyError, "the GPU accepts no further process", stop, uuid=uuid)


def _unusable_driver(failed: Failed, code: int) -> GPUError:
    name, meaning, facts = cuda_codes.name_of(code), failed.meaning(code), failed.facts
    if facts is None:
        is_known = code in (cuda_codes.ECC_UNCORRECTABLE, cuda_codes.UNKNOWN)  # Other codes have no known fix.
        known, summary = meaning.fixes if is_known else (), f"CUDA failed: {name}"
        return failed.becomes(errors.ProviderFailureError, summary, *known, library="CUDA", status=name)
    evidence = [*failed.evidence, *driver.versions(facts)]
    if (nvml_error := facts.environment.driver.nvml.error) is not None:
        evidence.append(f"NVML: {nvml_error}")
    if code in cuda_codes.OF_ANOTHER_LIBRARY:
        off = driver.drop_libcuda(facts)
        fixes = [off] if off is not None else list(meaning.fixes)
    elif code in cuda_codes.OF_A_DRIVER_TO_RESTART:
        fixes = remedies.restart_driver(facts.environment, meaning.fixes)
    else:
        fixes = remedies.move_to_host(facts.environment, meaning.fixes)
    return errors.DriverUnusableError(f"{meaning.what} ({name})", evidence=evidence, fixes=fixes, cuda_code=code)


class Code(NamedTuple):
    """CUDA error codes, and a function from a code to an error or None. ``opening_only`` is the same as in Row."""

    codes: Collection[int]
    explain: Callable[[Failed, int], GPUError | None]
    opening_only: bool = False


_NO_GPU = plain(errors.NoDeviceError, "CUDA sees no GPU", manual("use a machine with an NVIDIA GPU", needs="hardware"))

_NOT_PINNED = plain(
    errors.ProviderFailureError,
    "CUDA gets no page-locked host memory, which copies to and from the GPU need",
    "free host memory, or give this container or job more; in WSL, see memory= in .wslconfig",
    "or use a smaller batch",
    library="CUDA",
    status="cudaErrorMemoryAllocation",
)

CODES = (
    Code({46, 304, 999}, lambda failed, code: driver.too_few_descriptors(code, failed.here, failed.evidence), True),
    Code({2}, lambda failed, _: (_NOT_PINNED if runtime_words.PINNED.search(failed.text) else _lacks_memory)(failed)),
    Code({35}, lambda failed, _: _old_driver(failed), True),
    Code({36, 222}, _driver_older_than_a_library),
    Code({100}, lambda failed, _: devices.none_visible(failed.here) or _NO_GPU(failed), True),
    Code({101}, _unknown_device, True),
    Code(cuda_codes.NO_CODE, lambda failed, _: _explain_missing_kernel(failed)),
    Code({46}, lambda failed, _: _busy(failed), True),
    Code(
        cuda_codes.STICKY | cuda_codes.CAPTURING, lambda failed, code: cuda_codes.process_error(code, failed.evidence)
    ),
    Code({709}, lambda failed, _: lifetime.context_destroyed(failed.evidence) if failed.facts is None else None),
    Code({803, 804}, lambda failed, code: driver.mismatched_libcuda(code, failed.here, failed.evidence), True),
)


def _explain_code(failed: Failed, code: int) -> GPUError:
    for row in CODES:
        is_fitting = code in row.codes and not (row.opening_only and failed.facts is None)
        if is_fitting and (error := row.explain(failed, code)) is not None:
            return error
    return _unusable_driver(failed, code)


# Words


def _lacks_memory(failed: Failed, match: Match | None = None) -> GPUError:
    requested = int(match["size"]) if match is not None else None
    if failed.facts is not None:
        return devices.lacks_memory(failed.facts, failed.evidence, requested)
    device, free, total = failed.gpu, None, None
    evidence = failed.evidence[:]
    with contextlib.suppress(errors.LauncherConflictError):
        rank = current_rank()
        if rank.world_size > 1:
            evidence.insert(0, f"on rank {rank.rank} of {rank.world_size}")
    if device is not None and device.uuid is not None:
        if (memory := nvml.read_gpu_memory(device.uuid)) is not None:
            free, total = memory
            evidence.append(f"{device}: {free // _MIB} of {total // _MIB} MiB free")
        others = {pid: used for pid, used in nvml.processes_on(device.uuid).items() if pid != os.getpid()}
        evidence += [
            f"process {pid} holds {used // _MIB if used is not None else 'unknown'} MiB" for pid, used in others.items()
        ]
    open_sessions = devices.sessions_on_gpu(sessions(), device.uuid if device is not None else None)
    lack, fixes = "the GPU ran out of memory", ["use a smaller batch; the session keeps working"]
    if runtime_words.LIMIT.search(failed.text):
        lack = "the session's gpu_mem_limit is reached"
        fixes.append("or raise that provider option")
    else:
        extend = 'or pass the provider option arena_extend_strategy="kSameAsRequested"'
        fixes += [f"{extend}; raise gpu_mem_limit if it is set", "or stop other processes on the GPU"]
    if len(open_sessions) > 1:  # The running session is in the list, too.
        evidence += devices.named_sessions(open_sessions)
        fixes.append(devices.CLOSE_SESSIONS)
    return errors.GPUOutOfMemoryError(
        f"{lack}: {requested // _MIB} MiB were asked for" if requested is not None else lack,
        evidence=evidence,
        fixes=map(manual, fixes),
        requested=requested,
        free=free,
        total=total,
    )


def _explain_library(failed: Failed, match: Match) -> GPUError:
    status, evidence, in_run = runtime_words.read_library_status(match), failed.evidence, failed.facts is None
    free, device = None, failed.gpu
    if status.is_creation and isinstance(device, GPU) and not in_run:
        free = device.memory_free
    elif status.is_creation and in_run and device is not None and device.uuid is not None:
        free, _ = nvml.read_gpu_memory(device.uuid) or (None, None)
    if status.lacks_memory(free):
        return _lacks_memory(failed)
    if status.is_mixture and not in_run:
        return mixed(evidence)
    if status.is_mixture:
        mapped = tuple(path for path in read_mapped_libraries() if is_of_cudnn(path))
        fixes = ("install cuDNN again", "or make its first GPUSession before this process loads cuDNN by other ways")
        return mixed([*evidence, *list_by_folder(mapped)], fixes=map(manual, fixes), libraries=mapped)
    if status.is_incomplete:
        return _explain_missing_cudnn(failed, match, is_disabled=False)
    fields = {"library": status.library, "status": status.status}
    if status.is_creation:
        # The library is for another CUDA (issue 26322, pykeio/ort issue 467), or the driver changed (issue 15718).
        return failed.becomes(
            errors.ProviderFailureError,
            f"{status.library} could not be set up for this session: {status.status}"
            + (", though the GPU has free memory" if status.is_vague else ""),
            "check with `ortgpu doctor` whether this library and the driver fit ONNX Runtime's CUDA; if they do, check "
            "whether this process reaches its limit of open files, or captures a CUDA graph",
            **fields,
        )
    if in_run and status.library == "CUDNN" and (error := _cudnn_without_code(failed)) is not None:
        return error
    if in_run and "ARCH_MISMATCH" in status.status:
        return _no_kernel(
            failed,
            f"{status.library} has no code for {device or 'this GPU'} in what this model asks: {status.status}",
            "use another GPU, another data type for this model, or a release of that library for this GPU",
        )
    when = "failed" if in_run else "failed while the session was being opened"
    return failed.becomes(errors.ProviderFailureError, f"{status.library} {when}: {status.status}", **fields)


def cudnn_disabled(operators: tuple[str, ...], evidence: list[str]) -> GPUError:
    names = f": {', '.join(operators)}" if operators else ""
    summary = f"the provider option enable_cudnn is 0, and this model has operators that run on cuDNN{names}"
    fields = {"provider": CUDA, "option": "enable_cudnn", "value": "0"}
    return Failed("", evidence).becomes(errors.ProviderOptionError, summary, "leave enable_cudnn at 1", **fields)


def _explain_missing_cudnn(failed: Failed, _: Match, *, is_disabled: bool | None = None) -> GPUError:
    if (facts := failed.facts) is None:
        return _not_opened("cuDNN", _CUDNN, failed)
    if facts.request.cudnn_disabled if is_disabled is None else is_disabled:
        return cudnn_disabled(facts.request.cudnn_operators, failed.evidence)
    wheel = remedies.wheel_of(_CUDNN, facts.environment.cuda_major)
    fixes = [remedies.install_libraries(facts.environment, [wheel])] if wheel else []
    summary = "this model needs cuDNN, which cannot be loaded"
    return failed.becomes(errors.LibraryNotFoundError, summary, *fixes, missing=(_CUDNN,))


def _not_opened(library: str, name: str, failed: Failed) -> GPUError:
    """Return the error for a lazily opened library: releases from 1.28 on, for CUDA 13, wait until a node needs it."""
    summary = f"the model reached an operator that needs {library}, which is not available to this session"
    follow = "follow the fix that `ortgpu doctor` prints, and restart this process"
    return failed.becomes(errors.LibraryNotFoundError, summary, follow, missing=(name,))


def _cudnn_without_code(failed: Failed) -> GPUError | None:
    """Return the error for a cuDNN without code: a V100 with 9.11 gets CUDNN_STATUS_EXECUTION_FAILED (issue 25676)."""
    paths = [path for path in read_mapped_libraries() if os.path.basename(path).startswith(CUDNN_CODE)]
    architectures = read_architectures_of_cudnn(paths)
    device = failed.gpu
    capability = device.compute_capability if device is not None else None
    if device is None or capability is None or coverage_by(architectures, capability, os.environ) != "none":
        return None
    held = tuple(map(str, architectures or ()))
    return errors.UnsupportedDeviceError(
        f"the cuDNN of this process holds no code for {devices.described(str(device), capability)}",
        evidence=[*failed.evidence, f"{paths[0]} holds {', '.join(held)}"],
        fixes=[manual(f"install {'cuDNN 9.10' if capability < (7, 5) else 'a newer cuDNN'}, and restart this process")],
        device=device.name,
        compute_capability=capability,
        architectures=held,
    )


def _explain_generation(failed: Failed, _: Match) -> GPUError:
    return _no_kernel(
        failed,
        "an operator of this model has no kernel for {} in the installed ONNX Runtime",
        "use another GPU, or this model in another data type or quantization",
        "or export it without that operator; an optimizer may have fused it from several",
    )


class Row(NamedTuple):
    """A pattern, and a function from a matching text to an error or None.

    ``elsewhere`` is the error for a text from another machine, without any other facts. ``opening_only``: no run
    reports the text, and the search includes names from the author of a model, unless the row is ``without_names``.
    """

    pattern: re.Pattern[str] | str
    explain: Callable[[Failed, Match], GPUError | None] | None = None
    elsewhere: type[GPUError] | None = None
    opening_only: bool = False
    without_names: bool = False


_ABOVE_ITS_LIMIT = plain(
    errors.InsufficientDeviceMemoryError,
    "this session needs more GPU memory than its gpu_mem_limit leaves it",
    "raise the provider option gpu_mem_limit, or leave it out",
    requested=int,
)
_FAILED_TENSORRT = plain(errors.ProviderFailureError, "TensorRT failed", library="TensorRT")
_MISSING_TENSORRT = plain(
    errors.LibraryNotFoundError,
    "libraries of TensorRT that its provider links cannot be loaded",
    "install the TensorRT that this ONNX Runtime was built with, or ask for CUDA without TensorRT",
)
_NOT_LOADED = plain(errors.ProviderFallbackError, "ONNX Runtime could not load its CUDA provider")
_NOT_SET_UP = plain(errors.ProviderFallbackError, "ONNX Runtime could not set up its CUDA provider")
_option = partial(plain, errors.ProviderOptionError, provider=CUDA)
_REFUSED_GRAPH = _option(
    "this model cannot be captured as a CUDA graph",
    "leave enable_cuda_graph out: every node has to be on the GPU, without copies and control flow",
    option="enable_cuda_graph",
    value="1",
)
_UNKNOWN_OPTION = _option("the CUDA provider knows no option {}", "remove {} from the provider options", option=str)
_REFUSED_VALUE = _option("the CUDA provider refuses the value of its option {}", "correct the value of {}", option=str)

_REFUSED = "(?:Failed to load library|LoadLibrary failed|Error loading)"

# This table has the messages of ONNX Runtime, and of programs and libraries around it.
TABLE = (
    Row(runtime_words.LIMIT, _ABOVE_ITS_LIMIT, opening_only=True),
    Row(rf"cudaMallocFromPoolAsync failed.* \({cuda_codes.OUT_OF_MEMORY}\), size=(?P<size>\d+)", _lacks_memory),
    Row(r"cudaMallocFromPoolAsync failed.* \((\d+)\)", lambda failed, match: _explain_code(failed, int(match[1]))),
    Row(r"requested (?:buffer of size|bytes of) (?P<size>\d+)", _lacks_memory),
    # A failure to parse device_id has such a code, too.
    Row(cuda_codes.REPORTED, lambda failed, match: _explain_code(failed, cuda_codes.code_in(match))),
    Row("cannot use the (?:graph capture|CUDA Graph) feature", _REFUSED_GRAPH, opening_only=True),
    Row(r'Unknown provider option: "([^"]*)"', _UNKNOWN_OPTION, opening_only=True),
    Row(r'Failed to (?:parse|map).*?(?:provider option|option) "([^"]*)"', _REFUSED_VALUE, opening_only=True),
    Row(runtime_words.LIBRARY, _explain_library),
    Row("Please install TensorRT libraries", _MISSING_TENSORRT, opening_only=True),
    # The second text comes from the registration of plugins (onnxruntime_pybind_state.cc), before there is a provider.
    Row(r"\bTensorRT EP\b|RegisterTensorRTPluginsAsCustomOps", _FAILED_TENSORRT),
    Row("cuDNN (?:handle is required|is unavailable|is not available)", _explain_missing_cudnn),
    Row(  # The constructor of LRN asks cuDNN for a descriptor.
        r"norm_desc_\.Set\(",
        lambda failed, _: _explain_missing_cudnn(failed, _) if failed.facts and lacks_cudnn(failed.facts) else None,
    ),
    Row("cuFFT is unavailable", lambda failed, _: None if failed.facts else _not_opened("cuFFT", _CUFFT, failed)),
    Row(  # Some kernels ask for a generation of GPUs (issue 19259).
        r"(?i)Was the plugin compiled on a compatible CUDA and SM version|compute capability (?:<|>=) ?\d"
        r"|requires Ampere|requires SM ?\d|requires sm ?>= ?\d|need sm\d|only supported on Ampere",
        _explain_generation,
    ),
    # provider_bridge_ort.cc raises this, or only logs it. On Windows it gives the provider up with an exception if
    # CUDA_PATH is set. Error 126 means a missing library, error 127 a missing function in a library.
    Row(
        r"(?:LoadLibrary failed with error|Error) 126\b.*onnxruntime_providers_tensorrt",
        _MISSING_TENSORRT,
        opening_only=True,
    ),
    Row(rf"{_REFUSED}\b.*onnxruntime_providers_tensorrt\b", _FAILED_TENSORRT, opening_only=True),
    Row(
        "LoadLibrary failed with error 126\\b.*onnxruntime_providers_cuda|CUDA_PATH is set but CUDA"
        "|nvrtc: error: failed to open",
        elsewhere=errors.LibraryNotFoundError,
    ),
    Row(r"LoadLibrary failed with error 127\b.*onnxruntime_providers_", elsewhere=errors.LibraryVersionError),
    Row(rf"{_REFUSED}\b.*onnxruntime_providers_cuda\b|CUDA_PATH is set but CUDA", _NOT_LOADED, opening_only=True),
    Row(r"cuda_execution_provider\.cc", _NOT_SET_UP, opening_only=True),
    Row("CUDAExecutionProvider|CUDA EP", _NOT_SET_UP, opening_only=True, without_names=True),
    # The package optimum says the second text.
    Row(
        "'CUDAExecutionProvider' is not in available provider names|`onnxruntime-gpu` package was not found",
        elsewhere=errors.CPUOnlyPackageError,
    ),
    # ONNX Runtime has two warnings about a session on the GPU, and ortgpu has one.
    Row(
        "Memcpy nodes are added to the graph|not assigned to the preferred execution|CPUNodesWarning:",
        elsewhere=errors.PlacementError,
    ),
    Row("No module named '?onnxruntime'?$", elsewhere=errors.OnnxRuntimeNotInstalledError),
    Row(  # Every release has these attributes and this module.
        r"module 'onnxruntime' has no attribute '(?:InferenceSession|SessionOptions|get_available_providers"
        r"|__version__)'|No module named 'onnxruntime\.capi",
        elsewhere=errors.BrokenPackageError,
    ),
)

# These texts of ONNX Runtime 1.18 to 1.31 quote names, and a name may say anything. Some are about inputs and outputs
# (the bindings put a prefix before them), some about nodes with inputs that do not fit together.
_QUOTES_WHAT_WAS_GIVEN = re.compile(
    r"(?:Error [a-z ]+: )?(?:\[ONNXRuntimeError\] : 2 : |Invalid (?:input|output|feed) name|Failed to find NodeArg "
    r"with name|Failed to find (?:input|output) name in the mapping)|.*: (?:left|right) operand cannot broadcast on",
    re.DOTALL,
)


def explain_opening_code(code: int, facts: Facts, evidence: list[str]) -> GPUError:
    return _explain_code(Failed("", evidence, facts, devices.requested_gpu(facts)), code)


def explain_run_code(code: int, text: str, device: Device | None) -> GPUError:
    return _explain_code(Failed(text, [runtime_words.telling_line(text)], gpu=device), code)


def explain_opening(text: str, facts: Facts) -> GPUError | None:
    if "is not a registered function/op" in text:
        return collective_ops_missing(facts)
    if runtime_words.OF_THE_MODEL.match(text):
        return None
    failed = Failed(text, [runtime_words.telling_line(text)], facts, devices.requested_gpu(facts))
    return _classify(failed, TABLE, runtime_words.GIVEN_NAMES.sub("", text))


def explain_run(text: str, exception: str | None, device: Device | None) -> GPUError | None:
    """Return the typed error for an exception's text and class name, or None if it says nothing about the GPU.

    ``exception`` None: the class is not known. A text can quote anything: the driver has to confirm an error that would
    end the process's use of the GPU.
    """
    if exception == "InvalidArgument" or _QUOTES_WHAT_WAS_GIVEN.match(text):
        return None
    words = text.rpartition("Status Message: ")[2]  # The name of the node comes before it, and may say anything.
    failed = Failed(words, [runtime_words.telling_line(words)], gpu=device)
    error = _classify(failed, (row for row in TABLE if not row.opening_only), words)
    if error is None and (exception == "EPFail" or ": EP_FAIL :" in text):
        return errors.ProviderFailureError("the execution provider failed", evidence=failed.evidence, status="EP_FAIL")
    return error


def _classify(failed: Failed, rows: Iterable[Row], words: str) -> GPUError | None:
    for row in rows:
        if row.explain is None:
            continue
        match = re.search(row.pattern, failed.text if row.opening_only and not row.without_names else words)
        if match is not None and (error := row.explain(failed, match)) is not None:
            return error
    return None


def explain_line(line: str) -> GPUError | None:
    """Return the error for a line of any machine's log; None if the judgement needs facts of that machine."""
    return next(
        (row.elsewhere(line) for row in TABLE if row.elsewhere is not None and re.search(row.pattern, line)), None
    )
