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
    probe = facts.observed.probe
    # After "start" nothing is known: the interpreter did not start. The profile for training judges "training".
    if probe is None or probe.died_in in (None, "start", "training"):
        return None
    how = f"did not return within {probe.seconds:.0f} s" if probe.timed_out else f"ended the process ({ending(probe)})"
    summary = f"{_DOING.get(probe.died_in, _DOING['session'])} {how}"
    first: list[Fix] = []
    if probe.timed_out:  # The child reads gigabytes, and a GPU takes seconds to start.
        enough = min(max(120, 4 * round(probe.seconds)), 3600)
        first = [manual(f"if this machine is only slow, give it more time: ortgpu doctor --timeout {enough}")]
    evidence = [f"{step.name}: {'ok' if step.ok else 'failed'}, {step.detail}" for step in probe.steps]
    evidence += [line for line in probe.output.splitlines()[-3:] if line.strip()]
    if probe.signal in _FROM_OUTSIDE:
        return _ended_from_outside(probe, evidence, facts)
    if probe.died_in == "driver":
        evidence += driver.versions(facts)
        evidence += [f"loaded before it: {path}" for path in facts.environment.driver.interposed]
        first += [
            remedies.drop_from_variable(facts.environment, "LD_PRELOAD", path)
            or manual(f"remove {path} from /etc/ld.so.preload", needs="host")
            for path in facts.environment.driver.interposed
        ]
        again = UNUSABLE[MISMATCH].fixes
        return DriverUnusableError(
            f"asking NVML {how}" if probe.opening == NVML else summary,
            evidence=evidence,
            fixes=[*first, *remedies.restart_driver(facts.environment, again)],
        )
    if probe.died_in == "load":
        return ProviderError(summary, evidence=evidence, fixes=first)
    if probe.died_in not in ("libraries", "import", "provider"):
        return ProviderFallbackError(summary, evidence=evidence, fixes=first)
    package, reinstall = _owner_of(probe.opening, facts)
    if not probe.timed_out and remedies.limit_on_memory(facts.environment) is not None:
        # Under a limit, the loader or a library touches memory that could not be mapped.
        first = [remedies.fix_mapping_refusal(facts.environment, "")]
    return BrokenPackageError(
        summary,
        evidence=[*evidence, *([f"it was opening {probe.opening}"] if probe.opening else [])],
        fixes=[*first, reinstall],
        package=package,
        files=(probe.opening,) if probe.opening else (),
    )


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


def _ended_from_outside(probe: ProbeResult, evidence: list[str], facts: Facts) -> GPUError:
    memory = facts.environment.host.memory_total
    if memory is not None:
        evidence.append(f"memory of this machine or container: {memory >> 20} MiB")
    if probe.opening:
        evidence.append(f"it was opening {probe.opening}")
    sender, fix = _FROM_OUTSIDE[probe.signal or ""]
    summary = f"{_DOING[probe.died_in or 'session']} was ended by {sender}: {probe.signal}"
    if probe.died_in == "driver":
        return DriverUnusableError(summary, evidence=evidence, fixes=[fix])
    return ProviderFallbackError(summary, evidence=evidence, fixes=[fix])


def _owner_of(path: str | None, facts: Facts) -> tuple[str | None, Fix]:
    """Return the package of a file, and the fix: install the wheel of a CUDA library, else ONNX Runtime.

    The package of a library from the system or conda is not known. The search finds the wheel before such a library.
    """
    environment = facts.environment
    requirement = remedies.wheel_of(os.path.basename(path or ""), environment.cuda_major)
    if path is not None and requirement is not None:
        wheels = (wheel for wheel in environment.packages.nvidia if path.startswith(wheel.location + os.sep))
        owner = next((wheel.name for wheel in wheels if wheel.name == wheel_name(requirement)), None)
        return owner, remedies.install_libraries(environment, [requirement])
    installed = environment.packages.onnxruntime
    return installed.build_name, _another_release(environment) or remedies.reinstall_onnxruntime(environment)


def _another_release(environment: Environment) -> Fix | None:
    """Return another release for a package with intact files; None for damaged files, or if no release is known."""
    installed = environment.packages.onnxruntime
    owners = [owner for owner in installed.owners if not (owner.missing_files or owner.altered_files)]
    releases = {release.cuda_major: release for release in (FOR_CUDA_12, FOR_CUDA_13)}
    release = releases.get(environment.cuda_major or 0)
    if len(owners) != 1 or owners != list(installed.owners) or release is None or release.why_not_for(environment.host):
        return None
    return remedies.install(environment, [f"{release.requirement},!={owners[0].version}"])


def ending(probe: ProbeResult) -> str:
    if probe.returncode is None:
        return "how is not known, since this program ignores SIGCHLD or waits for all of its children"
    return probe.signal or f"exit status {probe.returncode}"
