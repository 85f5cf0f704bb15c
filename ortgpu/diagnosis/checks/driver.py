"""Is the driver new enough, does it work?"""

from __future__ import annotations

from ...errors import DeviceBusyError, DriverTooOldError, DriverUnusableError, GPUError, manual
from ..facts import Facts
from ..messages.cuda_codes import (
    CAPTURING,
    DEVICE_UNAVAILABLE,
    INSUFFICIENT_DRIVER,
    INVALID_DEVICE,
    NO_CODE,
    NO_DEVICE,
    OF_A_DRIVER_TO_RESTART,
    OF_ANOTHER_DRIVER,
    OF_ANOTHER_LIBRARY,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    STICKY,
    UNKNOWN,
    captured_meanwhile,
    meaning_of,
    name_of,
    poisoned,
    returned_by_cuinit,
)
from ..remedies import commands as remedies
from ..remedies import system as system_remedies
from ..remedies.releases import FOR_CUDA_12, runs_with_cuda_12
from . import descriptors, device_files, driver_absent, driver_library, kernel_module
from .devices import (
    gpu_asked_for,
    kernel_without_code,
    lacks_memory,
    named_device,
    none_visible,
    unsupported,
    visible_gpus,
)


def too_old(facts: Facts) -> GPUError | None:
    environment = facts.environment
    driver, provider = environment.driver, environment.provider
    major, supported = environment.cuda_major, driver.supported_cuda
    if major is None or supported is None or supported[0] >= major:
        return None
    if (other := driver_library.older(facts, major)) is not None:
        return other
    if driver.cuda_version is None and driver_library.is_enough(driver.version, major):
        return None  # what NVML says was said by a libcuda.so.1 that only NVML found
    fixes = [system_remedies.update_driver(environment)]
    older = FOR_CUDA_12.why_not_for(environment.host) is None and all(
        runs_with_cuda_12(environment.host, gpu.compute_capability) for gpu in visible_gpus(environment)
    )
    if supported[0] == FOR_CUDA_12.cuda_major and older:
        either = manual(f"{fixes[0]}; or else, for the driver that is there:", needs="driver")
        fixes = [either, remedies.other_release(environment, FOR_CUDA_12)]
    return DriverTooOldError(
        f"the NVIDIA driver supports CUDA up to {supported[0]}.{supported[1]}, "
        f"the installed ONNX Runtime needs CUDA {major}",
        evidence=[
            f"driver {driver.version or 'of unknown version'}",
            f"needed: {system_remedies.LOWEST_DRIVER.get(major, 'a newer one')} or newer",
            f"provider: {provider.path if provider else ''}",
        ],
        fixes=fixes,
        driver_version=driver.version,
        driver_cuda=supported,
        needed_cuda=(major, 0),
    )


def unusable(facts: Facts) -> GPUError | None:
    """``cuInit`` was called and failed."""
    cuda = facts.observed.cuda
    explained = (device_files.not_accessible, driver_library.of_linux_in_wsl, kernel_module.not_ready)
    if cuda is None or not cuda.code or cuda.code == NO_DEVICE or any(check(facts) for check in explained):
        return None  # devices.none_visible judges that code
    evidence = [returned_by_cuinit(cuda.code), *_printed_by_it(facts)]
    return _lacks_host_memory(facts, evidence) if cuda.code == OUT_OF_MEMORY else for_code(cuda.code, facts, evidence)


def _printed_by_it(facts: Facts) -> list[str]:
    """What the driver says for itself, as that of a Jetson does: "NvRmMemInitNvmap failed with Permission denied"."""
    return [f"it printed: {line}" for line in facts.observed.printed("driver")[-5:]]


def _lacks_host_memory(facts: Facts, evidence: list[str]) -> DriverUnusableError:
    """``cuInit`` makes no context and asks for no memory of the GPU."""
    if system_remedies.limit_on_memory(facts.environment) is not None:
        fix = system_remedies.let_it_be_mapped(facts.environment, "")
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
        cuda_code=OUT_OF_MEMORY,
    )


def for_code(code: int, facts: Facts, evidence: list[str]) -> GPUError:
    """The error that a CUDA code stands for, whoever reported it while a session was being opened."""
    driver = facts.environment.driver
    opens_files = code in (DEVICE_UNAVAILABLE, OPERATING_SYSTEM, UNKNOWN)
    if opens_files and (too_few := descriptors.too_few_for(code, facts, evidence)) is not None:
        return too_few
    if code == INSUFFICIENT_DRIVER:  # what the CUDA runtime also says where there is no driver at all
        better = driver_absent.not_found(facts) or too_old(facts)
        if better is not None:
            return better
        major = facts.environment.cuda_major
        return DriverTooOldError(
            "the NVIDIA driver is older than the CUDA that the installed ONNX Runtime was built with",
            evidence=evidence,
            fixes=[system_remedies.update_driver(facts.environment)],
            driver_version=driver.version,
            driver_cuda=driver.cuda_version,
            needed_cuda=(major, 0) if major else None,
        )
    if code == INVALID_DEVICE and (better := named_device(facts) or none_visible(facts)) is not None:
        return better
    if code in NO_CODE:
        return unsupported(facts) or kernel_without_code(gpu_asked_for(facts), evidence)
    if code == DEVICE_UNAVAILABLE:
        gpu = gpu_asked_for(facts)
        return DeviceBusyError(
            "the GPU accepts no further process",
            evidence=evidence,
            fixes=[manual("stop the process that holds the GPU, or choose another one with device=")],
            uuid=gpu.uuid if gpu is not None else None,
        )
    if code == OUT_OF_MEMORY:
        return lacks_memory(facts, evidence)
    if code in STICKY:
        return poisoned(code, evidence)
    if code in CAPTURING:
        return captured_meanwhile(code, evidence)
    if code in OF_ANOTHER_DRIVER and (other := driver_library.of_another_driver(code, facts, evidence)) is not None:
        return other
    meaning = meaning_of(code)
    evidence = [*evidence, f"driver {driver.version or 'of unknown version'}"]
    if driver.libcuda:
        evidence.append(f"libcuda: {driver.libcuda}")
    if driver.nvml.error:
        evidence.append(f"NVML: {driver.nvml.error}")
    fixes = list(meaning.fixes)
    if code in OF_ANOTHER_LIBRARY and (off := driver_library.off_the_path(facts)) is not None:
        fixes = [off]
    elif code in OF_A_DRIVER_TO_RESTART:
        fixes = system_remedies.restart_driver(facts.environment, fixes)
    return DriverUnusableError(f"{meaning.what} ({name_of(code)})", evidence=evidence, fixes=fixes, cuda_code=code)
