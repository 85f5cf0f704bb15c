"""Judge what was tried: the driver and a session, in this process and in a probe, and the end of the probe."""

from __future__ import annotations

import os

from ... import errors
from ...environment.inspection import Environment
from ...environment.libraries import loader_words
from ...environment.libraries.catalogue import wheel_name
from ...errors import Fix, GPUError, manual
from ..facts import Facts
from ..messages import cuda_codes
from ..probe.result import NVML, ProbeResult
from ..remedies import fixes as remedies
from ..remedies.releases import FOR_CUDA_12, FOR_CUDA_13
from . import driver
from .classifier import explain_opening, explain_opening_code
from .model import custom_domains, not_loaded, unreadable

_DOING = {
    "driver": "initialising the NVIDIA driver",
    "libraries": "loading the CUDA libraries",
    "import": "import onnxruntime",
    "provider": "opening the provider",
    "session": "opening a session on the GPU",
    "model": "opening a session on the GPU with this model",
    "load": "reading this model",
}


def died(facts: Facts) -> GPUError | None:
    """Check that no signal killed the child, and that it returned. The last step points to the code at fault."""
    probe, environment = facts.observed.probe, facts.environment
    # After "start" nothing is known: the interpreter did not start. The profile for training judges "training".
    if probe is None or probe.died_in in (None, "start", "training"):
        return None
    doing, in_driver = _DOING.get(probe.died_in, _DOING["session"]), probe.died_in == "driver"
    how = f"did not return within {probe.seconds:.0f} s" if probe.timed_out else f"ended the process ({ending(probe)})"
    summary, fixes = f"{doing} {how}", list[Fix]()
    evidence = [f"{step.name}: {'ok' if step.ok else 'failed'}, {step.detail}" for step in probe.steps]
    evidence += [line for line in probe.output.splitlines()[-3:] if line.strip()]
    if probe.opening and not in_driver:
        evidence.append(f"it was opening {probe.opening}")
    if probe.timed_out:  # The child reads gigabytes, and a GPU takes seconds to start.
        enough = min(max(120, 4 * round(probe.seconds)), 3600)
        fixes = [manual(f"if this machine is only slow, give it more time: ortgpu doctor --timeout {enough}")]
    if probe.signal in _FROM_OUTSIDE:
        sender, fix = _FROM_OUTSIDE[probe.signal]
        if (memory := environment.host.memory_total) is not None:
            evidence.append(f"memory of this machine or container: {memory >> 20} MiB")
        summary, fixes = f"{doing} was ended by {sender}: {probe.signal}", [fix]
    elif in_driver:
        summary = f"asking NVML {how}" if probe.opening == NVML else summary
        evidence += driver.versions(facts)
        evidence += [f"loaded before it: {path}" for path in environment.driver.interposed]
        fixes += [
            remedies.drop_from_variable(environment, "LD_PRELOAD", path)
            or manual(f"remove {path} from /etc/ld.so.preload", needs="host")
            for path in environment.driver.interposed
        ]
        fixes += remedies.restart_driver(environment, cuda_codes.UNUSABLE[cuda_codes.MISMATCH].fixes)
    elif probe.died_in in ("libraries", "import", "provider"):
        package, reinstall = _owner_of(probe.opening, environment)
        if not probe.timed_out and remedies.limit_on_memory(environment) is not None:
            # Under a limit, the loader or a library touches memory that could not be mapped.
            fixes = [remedies.fix_mapping_refusal(environment, "")]
        files, fixes = (probe.opening,) if probe.opening else (), [*fixes, reinstall]
        return errors.BrokenPackageError(summary, evidence=evidence, fixes=fixes, package=package, files=files)
    elif probe.died_in == "load":
        return errors.ProviderError(summary, evidence=evidence, fixes=fixes)
    error: type[GPUError] = errors.DriverUnusableError if in_driver else errors.ProviderFallbackError
    return error(summary, evidence=evidence, fixes=fixes)


_NO_INSTRUCTION = (
    "the processor, which has no such instruction",
    manual(
        "use a newer processor, or pass the host's through to the virtual machine (QEMU: -cpu host)", needs="hardware"
    ),
)
# These signals say nothing about the running library. The values are the sender and the fix.
_FROM_OUTSIDE = {
    "SIGKILL": (
        "the system, as it does when memory runs out (OOM)",
        manual("give this process more host memory (docker run --memory, the limit of its pod or job)", needs="host"),
    ),
    "SIGSYS": (
        "a sandbox (seccomp), for a system call that it forbids",
        manual("let it allow CUDA's system calls (docker run --security-opt seccomp=unconfined)", needs="host"),
    ),
    "SIGILL": _NO_INSTRUCTION,
    "exception 0xC000001D": _NO_INSTRUCTION,  # Of Windows.
}


def _owner_of(path: str | None, environment: Environment) -> tuple[str | None, Fix]:
    """Return the package of a file, if known, and the fix: the wheel of a CUDA library, else another ONNX Runtime."""
    requirement = remedies.wheel_of(os.path.basename(path or ""), environment.cuda_major)
    if path is not None and requirement is not None:
        wheels = (wheel for wheel in environment.packages.nvidia if path.startswith(wheel.location + os.sep))
        owner = next((wheel.name for wheel in wheels if wheel.name == wheel_name(requirement)), None)
        return owner, remedies.install_libraries(environment, [requirement])
    installed = environment.packages.onnxruntime
    whole = [owner for owner in installed.owners if not (owner.missing_files or owner.altered_files)]
    release = {release.cuda_major: release for release in (FOR_CUDA_12, FOR_CUDA_13)}.get(environment.cuda_major or 0)
    if release is None or len(whole) != 1 or len(installed.owners) != 1 or release.why_not_for(environment.host):
        return installed.build_name, remedies.reinstall_onnxruntime(environment)
    another = f"{release.requirement},!={whole[0].version}"
    return installed.build_name, remedies.install(environment, [another])


def ending(probe: ProbeResult) -> str:
    if probe.returncode is None:
        return "how is not known, since this program ignores SIGCHLD or waits for all of its children"
    return probe.signal or f"exit status {probe.returncode}"


def unusable(facts: Facts) -> GPUError | None:
    code, environment = facts.observed.cuda_code, facts.environment
    explained = (driver.device_files_closed, driver.linux_driver_in_wsl, driver.not_ready)
    if not code or code == cuda_codes.NO_DEVICE or any(check(facts) for check in explained):
        return None  # The check devices.none_visible judges that code.
    evidence = [cuda_codes.returned_by_cuinit(code)]
    if code != cuda_codes.OUT_OF_MEMORY:
        return explain_opening_code(code, facts, evidence)
    lack = "too little host memory or address space in this process"  # cuInit asks for no memory of the GPU.
    reserve = "with the kernel's vm.overcommit_memory=2, CUDA cannot reserve its address space"
    fix = manual(f"raise the memory limits of this process (ulimit -a, its container or job); {reserve}", needs="host")
    if environment.host.is_windows or remedies.limit_on_memory(environment) is not None:
        fix = remedies.fix_mapping_refusal(environment, "")
    summary = f"the NVIDIA driver gets {lack} (CUDA_ERROR_OUT_OF_MEMORY)"
    return errors.DriverUnusableError(summary, evidence=evidence, fixes=[fix], cuda_code=code)


def session_failed(facts: Facts) -> GPUError | None:
    step = facts.observed.failed("session")
    if step is None or (error := explain_opening(step.detail, facts)) is not None:
        return None if step is None else error
    fixes = [remedies.raise_thread_limit(facts.environment)] if loader_words.lacks_threads(step.detail) else []
    summary = "a session on the GPU could not be opened and run"
    return errors.ProviderFallbackError(summary, evidence=[step.detail], fixes=fixes)


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
