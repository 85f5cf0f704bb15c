"""Explain why the driver, or a session, did not open: by CUDA's code, or by the words of ONNX Runtime.

A text that says nothing about the GPU is not translated: the exception stays ONNX Runtime's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...environment.libraries import loader_words
from ...environment.libraries.catalogue import BY_STEM
from ...environment.libraries.search import SYSTEM
from ...errors import (
    DeviceBusyError,
    DeviceNotFoundError,
    DriverUnusableError,
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
from ...provider.requests import CUDA
from ..facts import Facts
from ..messages import cuda_codes, runtime_words
from ..messages.runtime_words import LibraryStatus, telling_line
from ..remedies import fixes as remedies
from . import devices, driver
from .libraries import mixed
from .model import collective_ops_missing, custom_domains, not_loaded, unreadable

if TYPE_CHECKING:
    from ...environment.gpu.driver import GPU
    from ...provider.devices import Device


def unusable(facts: Facts) -> GPUError | None:
    """Check that ``cuInit`` succeeded."""
    code = facts.observed.cuda_code
    explained = (driver.device_files_closed, driver.of_linux_in_wsl, driver.not_ready)
    if not code or code == cuda_codes.NO_DEVICE or any(check(facts) for check in explained):
        return None  # devices.none_visible judges that code
    evidence = [cuda_codes.returned_by_cuinit(code)]
    return _lacks_host_memory(facts, evidence) if code == cuda_codes.OUT_OF_MEMORY else for_code(code, facts, evidence)


def _lacks_host_memory(facts: Facts, evidence: list[str]) -> DriverUnusableError:
    """Return the error for too little host memory: ``cuInit`` asks for no memory of the GPU."""
    if facts.environment.host.is_windows or remedies.limit_on_memory(facts.environment) is not None:
        fix = remedies.let_it_be_mapped(facts.environment, "")
    else:
        fix = manual(
            "raise what limits the memory of this process: ulimit -a, its container or job, and the kernel's "
            "vm.overcommit_memory=2, with which CUDA cannot reserve its address space",
            needs="host",
        )
    return DriverUnusableError(
        "the NVIDIA driver gets too little host memory or address space in this process (CUDA_ERROR_OUT_OF_MEMORY)",
        evidence=evidence,
        fixes=[fix],
        cuda_code=cuda_codes.OUT_OF_MEMORY,
    )


def for_code(code: int, facts: Facts, evidence: list[str]) -> GPUError:
    """Return the error for a CUDA code that was reported while a session was being opened."""
    opens_files = code in (cuda_codes.DEVICE_UNAVAILABLE, cuda_codes.OPERATING_SYSTEM, cuda_codes.UNKNOWN)
    if opens_files and (too_few := driver.too_few_descriptors(code, facts, evidence)) is not None:
        return too_few
    if code == cuda_codes.INSUFFICIENT_DRIVER:  # cudart says this without any driver, too
        better = driver.not_found(facts) or driver.too_old(facts)
        if better is not None:
            return better
        return driver.older_than_needed(
            facts,
            "the NVIDIA driver is older than the CUDA that the installed ONNX Runtime was built with",
            evidence,
            [remedies.update_driver(facts.environment)],
        )
    if code == cuda_codes.NO_DEVICE:
        elsewhere = manual("use a machine with an NVIDIA GPU", needs="hardware")
        return devices.none_visible(facts) or NoDeviceError("CUDA sees no GPU", evidence=evidence, fixes=[elsewhere])
    if code == cuda_codes.INVALID_DEVICE:
        return (
            devices.named_device(facts)
            or devices.none_visible(facts)
            or DeviceNotFoundError(
                "CUDA knows no GPU of this number",
                evidence=evidence,
                fixes=cuda_codes.meaning_of(code, facts.environment.host.is_windows).fixes,
                requested=facts.request.device,
            )
        )
    if code in cuda_codes.NO_CODE:
        return devices.unsupported(facts) or devices.kernel_without_code(devices.requested_gpu(facts), evidence)
    if code == cuda_codes.DEVICE_UNAVAILABLE:
        gpu = devices.requested_gpu(facts)
        return DeviceBusyError(
            "the GPU accepts no further process",
            evidence=evidence,
            fixes=[manual("stop the process that holds the GPU, or choose another one with device=")],
            uuid=gpu.uuid if gpu is not None else None,
        )
    if code == cuda_codes.OUT_OF_MEMORY:
        return devices.lacks_memory(facts, evidence)
    if (found := cuda_codes.of_process(code, evidence)) is not None:
        return found
    if code in cuda_codes.OF_ANOTHER_DRIVER and (other := driver.of_another_driver(code, facts, evidence)) is not None:
        return other
    meaning = cuda_codes.meaning_of(code, facts.environment.host.is_windows)
    evidence = [*evidence, *driver.versions(facts)]
    if (said := facts.environment.driver.nvml.error) is not None:
        evidence.append(f"NVML: {said}")
    if code in cuda_codes.OF_ANOTHER_LIBRARY:
        off = driver.off_the_path(facts)
        fixes = [off] if off is not None else list(meaning.fixes)
    elif code in cuda_codes.OF_A_DRIVER_TO_RESTART:
        fixes = remedies.restart_driver(facts.environment, meaning.fixes)
    else:
        fixes = remedies.on_the_host(facts.environment, meaning.fixes)
    return DriverUnusableError(
        f"{meaning.what} ({cuda_codes.name_of(code)})", evidence=evidence, fixes=fixes, cuda_code=code
    )


def session_failed(facts: Facts) -> GPUError | None:
    """Check that the probe's session of a model with one node opened."""
    step = facts.observed.failed("session")
    if step is None:
        return None
    lacks = loader_words.lacks_threads(step.detail)
    return of_construction(step.detail, facts) or ProviderFallbackError(
        "a session on the GPU could not be opened and run",
        evidence=[step.detail],
        fixes=[remedies.let_it_have_threads(facts.environment)] if lacks else [],
    )


def model_failed(facts: Facts) -> GPUError | None:
    """Check that the session of the caller's model opened, or without any session, that ONNX Runtime can read it."""
    step, model = facts.observed.failed("load"), facts.request.model
    if step is not None:
        # Reported by checks of their own: an unreadable file, operators of a library to register
        known = unreadable(model) or ("not a registered function/op" in step.detail and custom_domains(model))
        return None if known else of_construction(step.detail, facts) or not_loaded(step.detail)
    step = facts.observed.failed("model")
    if step is None or facts.observed.failed("session") is not None:
        return None
    return of_construction(step.detail, facts) or not_loaded(step.detail)


def of_construction(text: str, facts: Facts) -> GPUError | None:
    """Return the error behind the text of an exception that ONNX Runtime raised while a session was being opened."""
    if "is not a registered function/op" in text:
        return collective_ops_missing(facts)
    if runtime_words.is_of_the_model(text):
        return None
    words, evidence = runtime_words.without_given_names(text), [telling_line(text)]
    if (code := cuda_codes.code_in(words)) is not None:  # also within a failure to parse device_id
        locked = lacks_pinned_memory(code, text, facts.environment.host.is_windows)
        return locked or for_code(code, facts, evidence)
    if runtime_words.GRAPH_REFUSED.search(text):
        return _graph_refused(evidence)
    if (refused := _of_option(text, evidence)) is not None:
        return refused
    if match := runtime_words.LIMIT.search(words):
        return InsufficientDeviceMemoryError(
            "this session needs more GPU memory than its gpu_mem_limit leaves it",
            evidence=evidence,
            fixes=[manual("raise the provider option gpu_mem_limit, or leave it out")],
            requested=int(match[1]),
        )
    if match := runtime_words.ALLOCATION.search(words):
        return devices.lacks_memory(facts, evidence, int(match[1]))
    if failed := runtime_words.read_library_status(words):
        return _of_library(failed, evidence, facts)
    if runtime_words.TENSORRT.search(words):
        return tensorrt_failed(evidence)
    if runtime_words.WITHOUT_CUDNN.search(words):
        if facts.request.cudnn_disabled:
            return cudnn_disabled(facts.request.cudnn_operators, evidence)
        return _cudnn_unavailable(evidence, facts)
    gpu = devices.requested_gpu(facts)
    if (found := of_generation(words, evidence, gpu)) is not None:
        return found
    if match := runtime_words.NOT_LOADED.search(text):
        if match[1] == "tensorrt":
            return tensorrt_failed(evidence)
        return ProviderFallbackError("ONNX Runtime could not load its CUDA provider", evidence=evidence)
    if "cuda_execution_provider.cc" in text or re.search("CUDAExecutionProvider|CUDA EP", words):
        return ProviderFallbackError("ONNX Runtime could not set up its CUDA provider", evidence=evidence)
    return None


def _of_option(text: str, evidence: list[str]) -> ProviderOptionError | None:
    if match := runtime_words.OPTION_NAME.search(text):
        return ProviderOptionError(
            f"the CUDA provider knows no option {match[1]!r}",
            evidence=evidence,
            fixes=[manual(f"remove {match[1]!r} from the provider options")],
            provider=CUDA,
            option=match[1],
        )
    if match := runtime_words.OPTION_VALUE.search(text):
        option = match[1] or match[2]
        return ProviderOptionError(
            f"the CUDA provider refuses the value of its option {option!r}",
            evidence=evidence,
            fixes=[manual(f"correct the value of {option!r}")],
            provider=CUDA,
            option=option,
        )
    return None


def _of_library(failed: LibraryStatus, evidence: list[str], facts: Facts) -> GPUError:
    gpu = devices.requested_gpu(facts)
    if failed.lacks_memory(gpu.memory_free if gpu is not None else None):
        return devices.lacks_memory(facts, evidence)
    if failed.is_mixture:
        return mixed(evidence)
    if failed.is_incomplete:
        return _cudnn_unavailable(evidence, facts)
    if failed.is_creation:
        return not_created(failed, evidence)
    return ProviderFailureError(
        f"{failed.library} failed while the session was being opened: {failed.status}",
        evidence=evidence,
        library=failed.library,
        status=failed.status,
    )


def of_generation(text: str, evidence: list[str], gpu: GPU | Device | None) -> UnsupportedDeviceError | None:
    """Return the error for an operator that reports that its kernels are for other generations of GPUs."""
    if runtime_words.GENERATION.search(text) is None:
        return None
    shown = devices.described(gpu.name, gpu.compute_capability) if gpu is not None else "this GPU"
    return devices.without_code(
        gpu,
        f"an operator of this model has no kernel for {shown} in the installed ONNX Runtime",
        evidence,
        [
            manual("use another GPU, or this model in another data type or quantization"),
            manual("or export it without that operator, which may be one that an optimizer made of several"),
        ],
    )


def lacks_pinned_memory(code: int, text: str, windows: bool) -> ProviderFailureError | None:
    """Return the error if what CUDA lacks is page-locked memory of the host."""
    if code != cuda_codes.OUT_OF_MEMORY or runtime_words.PINNED.search(text) is None:
        return None
    return ProviderFailureError(
        "CUDA gets no page-locked memory of the host, through which arrays are copied to the GPU and back",
        evidence=[telling_line(text)],
        fixes=[
            manual(
                "free memory of this machine"
                if windows
                else "free memory of the host, or give its container or job more; in WSL, see memory= in .wslconfig"
            ),
            manual("or use a smaller batch"),
        ],
        library="CUDA",
        status="cudaErrorMemoryAllocation",
    )


def not_created(failed: LibraryStatus, evidence: list[str]) -> ProviderFailureError:
    return ProviderFailureError(
        f"{failed.library} could not be set up for this session: {failed.status}"
        + (", though the GPU has free memory" if failed.is_vague else ""),
        evidence=evidence,
        fixes=[
            # issue 26322 and pykeio/ort issue 467: of another CUDA; issue 15718: after a change of the driver
            manual(
                "look with `ortgpu doctor` whether this library is of another CUDA than ONNX Runtime or the driver is "
                "too old; else whether this process reaches its limit of open files, or is capturing a CUDA graph"
            )
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


def _graph_refused(evidence: list[str]) -> ProviderOptionError:
    return ProviderOptionError(
        "this model cannot be captured as a CUDA graph",
        evidence=evidence,
        fixes=[manual("leave enable_cuda_graph out: every node has to be on the GPU, without copies and control flow")],
        provider=CUDA,
        option="enable_cuda_graph",
        value="1",
    )


def _cudnn_unavailable(evidence: list[str], facts: Facts) -> GPUError:
    name = SYSTEM.name(BY_STEM["libcudnn"], 9)
    wheel = remedies.wheel_of(name, facts.environment.cuda_major)
    return LibraryNotFoundError(
        "this model needs cuDNN, which cannot be loaded",
        evidence=evidence,
        fixes=[remedies.install_libraries(facts.environment, [wheel])] if wheel else [],
        missing=(name,),
    )


def tensorrt_failed(evidence: list[str]) -> ProviderFailureError:
    return ProviderFailureError("TensorRT failed", evidence=evidence, library="TensorRT")
