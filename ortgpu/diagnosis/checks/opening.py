"""Check that the driver and a session opened, in this process and in a probe."""

from __future__ import annotations

from ...environment.libraries import loader_words
from ...errors import DriverUnusableError, GPUError, ProviderFallbackError, manual
from ..facts import Facts
from ..messages import cuda_codes
from ..remedies import fixes as remedies
from . import driver
from .classifier import explain_opening, explain_opening_code
from .model import custom_domains, not_loaded, unreadable


def unusable(facts: Facts) -> GPUError | None:
    code = facts.observed.cuda_code
    explained = (driver.device_files_closed, driver.linux_driver_in_wsl, driver.not_ready)
    if not code or code == cuda_codes.NO_DEVICE or any(check(facts) for check in explained):
        return None  # The check devices.none_visible judges that code.
    evidence = [cuda_codes.returned_by_cuinit(code)]
    return (
        _lacks_host_memory(facts, evidence)
        if code == cuda_codes.OUT_OF_MEMORY
        else explain_opening_code(code, facts, evidence)
    )


def _lacks_host_memory(facts: Facts, evidence: list[str]) -> DriverUnusableError:
    """Return the error for too little host memory: ``cuInit`` asks for no memory of the GPU."""
    if facts.environment.host.is_windows or remedies.limit_on_memory(facts.environment) is not None:
        fix = remedies.fix_mapping_refusal(facts.environment, "")
    else:
        fix = manual(
            "raise the memory limits of this process (ulimit -a, its container or job); with the kernel's "
            "vm.overcommit_memory=2, CUDA cannot reserve its address space",
            needs="host",
        )
    return DriverUnusableError(
        "the NVIDIA driver gets too little host memory or address space in this process (CUDA_ERROR_OUT_OF_MEMORY)",
        evidence=evidence,
        fixes=[fix],
        cuda_code=cuda_codes.OUT_OF_MEMORY,
    )


def session_failed(facts: Facts) -> GPUError | None:
    step = facts.observed.failed("session")
    if step is None:
        return None
    lacks = loader_words.lacks_threads(step.detail)
    return explain_opening(step.detail, facts) or ProviderFallbackError(
        "a session on the GPU could not be opened and run",
        evidence=[step.detail],
        fixes=[remedies.raise_thread_limit(facts.environment)] if lacks else [],
    )


def model_failed(facts: Facts) -> GPUError | None:
    """Check that the caller's model opened in a session, or could be read if there was no session."""
    step, model = facts.observed.failed("load"), facts.request.model
    if step is not None:
        # Other checks report an unreadable file, and operators of a library to register.
        reported = unreadable(model) or ("not a registered function/op" in step.detail and custom_domains(model))
        return None if reported else explain_opening(step.detail, facts) or not_loaded(step.detail)
    step = facts.observed.failed("model")
    if step is None or facts.observed.failed("session") is not None:
        return None
    return explain_opening(step.detail, facts) or not_loaded(step.detail)
