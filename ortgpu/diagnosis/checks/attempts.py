"""Judge the steps of the probe's child process."""

from __future__ import annotations

import os

from ...environment.inspection import Environment
from ...environment.libraries.catalogue import wheel_name
from ...errors import (
    BrokenPackageError,
    DriverUnusableError,
    Fix,
    GPUError,
    ProviderError,
    ProviderFallbackError,
    manual,
)
from ..facts import Facts
from ..messages.cuda_codes import MISMATCH, UNUSABLE
from ..probe.result import NVML, ProbeResult
from ..remedies import fixes as remedies
from ..remedies.releases import FOR_CUDA_12, FOR_CUDA_13
from . import driver

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
        fixes += remedies.restart_driver(environment, UNUSABLE[MISMATCH].fixes)
    elif probe.died_in in ("libraries", "import", "provider"):
        package, reinstall = _owner_of(probe.opening, environment)
        if not probe.timed_out and remedies.limit_on_memory(environment) is not None:
            # Under a limit, the loader or a library touches memory that could not be mapped.
            fixes = [remedies.fix_mapping_refusal(environment, "")]
        files, fixes = (probe.opening,) if probe.opening else (), [*fixes, reinstall]
        return BrokenPackageError(summary, evidence=evidence, fixes=fixes, package=package, files=files)
    elif probe.died_in == "load":
        return ProviderError(summary, evidence=evidence, fixes=fixes)
    error: type[GPUError] = DriverUnusableError if in_driver else ProviderFallbackError
    return error(summary, evidence=evidence, fixes=fixes)


# These signals say nothing about the running library. The values are the sender and the fix.
_FROM_OUTSIDE = {
    "SIGKILL": (
        "the system, as it does when memory runs out (OOM)",
        manual(
            "give this process more host memory (docker run --memory, the limit of its pod or job)",
            needs="host",
        ),
    ),
    "SIGSYS": (
        "a sandbox (seccomp), for a system call that it forbids",
        manual(
            "let the sandbox allow CUDA's system calls (docker run --security-opt seccomp=unconfined)", needs="host"
        ),
    ),
    **dict.fromkeys(
        ("SIGILL", "exception 0xC000001D"),  # Windows has the exception.
        (
            "the processor, which has no such instruction",
            manual(
                "use a newer processor, or pass the host's processor through to the virtual machine (QEMU: -cpu host)",
                needs="hardware",
            ),
        ),
    ),
}


def _owner_of(path: str | None, environment: Environment) -> tuple[str | None, Fix]:
    """Return the package of a file, and the fix: install the wheel of a CUDA library, else another ONNX Runtime.

    The package of a library from the system or conda is not known. The search finds the wheel before such a library.
    Damaged files of ONNX Runtime are replaced by the same release.
    """
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
