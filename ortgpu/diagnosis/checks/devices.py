"""Check for visible GPUs, for the requested GPU among them, and for everything that a session needs of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ... import errors
from ...environment.gpu.cuda import CudaDevice
from ...environment.gpu.driver import GPU
from ...environment.inspection import Environment
from ...environment.libraries.catalogue import CUDNN_CODE
from ...environment.libraries.wheel import PASSED_OVER, coverage_by
from ...errors import Fix, GPUError, counted, manual, shell
from ...provider.devices import choose, describe, narrowed_by, not_found, ordinal_of
from ...provider.requests import CUDA, TENSORRT
from ..facts import Facts
from ..messages.cuda_codes import NO_DEVICE, RESTART_WINDOWS, returned_by_cuinit
from ..remedies import fixes as remedies
from ..remedies import releases
from . import surroundings

if TYPE_CHECKING:
    from ...provider.living import SessionRecord

_NAMED = 5


def sessions_on_gpu(sessions: Iterable[SessionRecord], uuid: str | None) -> list[SessionRecord]:
    """Return the sessions with memory on the GPU. A plain InferenceSession does not name its GPU, and counts too."""
    return [
        session
        for session in sessions
        if session.alive
        and {CUDA, *TENSORRT}.intersection(session.providers)
        and (uuid is None or session.device is None or session.device.uuid in (uuid, None))
    ]


def named_sessions(sessions: list[SessionRecord]) -> list[str]:
    lines = [
        f"open in this process: {session.model}" + (f", created by {session.created_by}" if session.created_by else "")
        for session in sessions[:_NAMED]
    ]
    if len(sessions) > _NAMED:
        lines.append(f"and {len(sessions) - _NAMED} more, which ortgpu.sessions() lists")
    return lines


CLOSE_SESSIONS = manual(
    "close() the sessions of this process that are done with: a variable, a notebook's Out or a traceback keeps them"
)


def named_device(facts: Facts) -> GPUError | None:
    """Check that the requested device exists in CUDA's list, or in NVML's list if CUDA was not asked."""
    requested, cuda = facts.request.device, facts.observed.cuda
    hidden = facts.environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    if requested is None or requested == "auto":
        return None
    if cuda is not None and cuda.devices:
        try:
            choose(requested, cuda.devices, lambda _: None, narrowed_by(hidden, cuda.hidden_by))
        except errors.DeviceNotFoundError as error:
            return error
        return None
    gpus = surroundings.visible_gpus(facts.environment)
    ordinal, prefix = ordinal_of(requested), str(requested).strip().lower()
    if ordinal is not None:
        exists = ordinal < len(gpus)
    else:
        exists = any((gpu.uuid or "").lower().startswith(prefix) or gpu.mig_uuids for gpu in gpus)
    if exists or not gpus:
        return None
    available = [describe(number, gpu.name, gpu.uuid) for number, gpu in enumerate(gpus)]
    return not_found(requested, available, narrowed=narrowed_by(hidden, hidden))


def none_visible(facts: Facts) -> GPUError | None:
    cuda, environment = facts.observed.cuda, facts.environment
    nvml, value = environment.driver.nvml, environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    hidden = surroundings.are_hidden(environment)
    empty = cuda is not None and (cuda.code == NO_DEVICE or (cuda.code == 0 and cuda.devices == ()))
    nothing = nvml.available and not nvml.gpus
    if facts.observed.devices or not (hidden or empty or nothing):
        return None
    if not hidden and not empty and environment.driver.libcuda is None:
        return None  # Without a driver there is no device: driver.not_found reports it.
    evidence, fixes = [], []
    if facts.observed.cuda_code:
        evidence.append(returned_by_cuinit(facts.observed.cuda_code))
    if nvml.available:
        names = "; ".join(f"{gpu.name} {gpu.uuid}" for gpu in nvml.gpus)
        evidence.append(f"NVML sees {counted(len(nvml.gpus), 'GPU')}" + (f": {names}" if names else ""))
    elif nvml.error:
        evidence.append(f"NVML: {nvml.error}")
    if value is not None:
        evidence.append(f"CUDA_VISIBLE_DEVICES={value!r}")
        fixes.append(remedies.unset(environment, ["CUDA_VISIBLE_DEVICES"]))
    if value == "NoDevFiles":  # Slurm sets it in a job without a GPU.
        ask = "ask the scheduler for a GPU, as with sbatch --gres=gpu:1: this job has none"
        fixes = [manual(ask, needs="host")]
    if environment.host.container:
        evidence.append(f"in a container ({environment.host.container})")
        evidence += surroundings.given_to_container(environment)
    if hidden:
        hides = "CUDA_VISIBLE_DEVICES hides every GPU from this process"
        return errors.NoDeviceError(hides, evidence=evidence, fixes=fixes)
    why, ways = _explain_no_device(environment)
    return errors.NoDeviceError("CUDA sees no GPU", evidence=[*evidence, *why], fixes=[*fixes, *ways])


def _explain_no_device(environment: Environment) -> tuple[list[str], list[Fix]]:
    host, nvml = environment.host, environment.driver.nvml
    other = manual("use a machine with an NVIDIA GPU", needs="hardware")
    if nvml.gpus and all(gpu.mig_enabled and not gpu.mig_uuids for gpu in nvml.gpus):
        make = manual("or make instances, as the administrator: nvidia-smi mig -cgi PROFILE -C", needs="root")
        off = remedies.administrator_command(environment, "nvidia-smi -mig 0")
        why = "MIG is enabled, and no GPU has an instance: CUDA then has no device"
        return [why], [off, *remedies.move_to_host(environment, [make])]
    if (rented := surroundings.service_advice(environment)) is not None:
        return [rented[0]], [rented[1]]
    if (none_given := surroundings.wsl_advice(environment)) is not None:
        return [], [none_given]
    if nvml.gpus:  # A GPU failed after its driver was loaded (can1357/oh-my-pi issue 4475).
        log = shell("sudo dmesg | grep -iE 'xid|nvrm'", needs="root")
        restart = manual("reboot; if that does not help, install the driver again", needs="reboot")
        again = [surroundings.give_the_gpu(environment, "start this container again")] if host.container else []
        return [], [*again, *remedies.restart_driver(environment, [log, restart])]
    if nvml.available and surroundings.has_nvidia(environment) and not (host.container or host.wsl):
        return ["an NVIDIA GPU is on the PCI bus, but the driver ignores it"], list(remedies.SERVE_THE_GPU)
    if host.is_windows:
        return [], [other, manual(f"or, if this has one: {RESTART_WINDOWS}", needs="reboot")]
    return [], [surroundings.give_the_gpu(environment), manual(f"or {other}", needs="hardware")]


def busy(facts: Facts) -> GPUError | None:
    gpus = _gpus_of_request(facts)
    if not gpus or any(gpu.compute_mode != "prohibited" for gpu in gpus):
        return None
    uuid, name = gpus[0].uuid, gpus[0].name or "the GPU"
    evidence = [f"{uuid}: compute mode prohibited"]
    fix = remedies.administrator_command(facts.environment, f"nvidia-smi -i {uuid} -c DEFAULT")
    summary = f"{name} accepts no CUDA process: its compute mode is prohibited"
    return errors.DeviceBusyError(summary, evidence=evidence, fixes=[fix], uuid=uuid)


def unsupported(facts: Facts) -> GPUError | None:
    """Check that the provider has code for the GPU. Without code the provider binds, and fails at the first kernel."""
    environment = facts.environment
    provider, variables = environment.provider, environment.variables.now
    if provider is None or not (capabilities := _capabilities(facts)):
        return None
    if any(provider.coverage(capability, variables) != "none" for _, capability in capabilities):
        return None
    held = tuple(map(str, provider.architectures or ()))
    # An environment variable makes CUDA pass over the code for these. Releases from 1.29 on hold no PTX.
    covered = [device for device in capabilities if provider.coverage(device[1]) != "none"]
    name, capability = (covered or capabilities)[0]
    if covered:
        guilty = {variable: code for variable, code in PASSED_OVER.items() if variables.get(variable) == "1"}
        evidence = [f"{variable}=1: no {code} is used" for variable, code in guilty.items()]
        evidence.append(f"held: {', '.join(held)}")
        what = "an environment variable makes CUDA ignore ONNX Runtime's code for"
        fix = remedies.unset(environment, guilty)
    else:
        installed, what = environment.packages.onnxruntime, "the installed ONNX Runtime holds no code for"
        build = f"{installed.build_name or 'onnxruntime-gpu'} {installed.version or ''}".rstrip()
        evidence = [f"{build} holds {', '.join(held)}", f"read from {provider.path}"]
        release = releases.newest_for_gpus(environment.host, environment.driver.supported_cuda, [capability])
        fix = manual("build ONNX Runtime for this GPU, or use another GPU", needs="hardware")
        if environment.driver.is_tegra:
            fix = remedies.JETSON_BUILD
        elif release is not None:
            fix = remedies.other_release(environment, release)
    fields: dict[str, Any] = {"device": name, "compute_capability": capability, "architectures": held}
    summary = f"{what} {described(name, capability)}"
    return errors.UnsupportedDeviceError(summary, evidence=evidence, fixes=[fix], **fields)


def cudnn_without_code(facts: Facts) -> GPUError | None:
    """Check that cuDNN has code for the GPU, if ONNX Runtime has (issue 25676: a V100)."""
    environment, request = facts.environment, facts.request
    provider, variables = environment.provider, environment.variables.now
    capabilities = _capabilities(facts)
    if not capabilities or request.cudnn_disabled:
        return None
    # If the provider has no code for any of the GPUs, unsupported() reports it.
    usable = [
        (name, capability)
        for name, capability in capabilities
        if provider is None or provider.coverage(capability, variables) != "none"
    ]
    if not usable or (architectures := environment.cudnn_architectures) is None:
        return None
    without = [device for device in usable if coverage_by(architectures, device[1], variables) == "none"]
    files = (library.chosen for library in environment.libraries if library.spec.stem in CUDNN_CODE)
    file = next(filter(None, files), None)
    if len(without) < len(usable) or file is None:
        return None
    (name, capability), held = without[0], tuple(map(str, architectures))
    wheels = [wheel for wheel in environment.packages.nvidia if wheel.name.startswith("nvidia-cudnn-cu")]
    evidence = [f"{os.path.basename(file.path)} holds {', '.join(held)}", f"read from {file.path}"]
    evidence += [f"{wheel.name} {wheel.version} in {wheel.location}" for wheel in wheels]
    evidence += [f"needed by {', '.join(request.cudnn_operators)}"] if request.cudnn_operators else []
    return errors.UnsupportedDeviceError(
        f"the installed cuDNN holds no code for {described(name, capability)}",
        evidence=evidence,
        fixes=[remedies.another_cudnn(environment, file.path, capability)],
        severity="fatal" if request.cudnn_operators else "warning",
        device=name,
        compute_capability=capability,
        architectures=held,
    )


def described(name: str | None, capability: tuple[int, int] | None) -> str:
    suffix = f" (compute capability {capability[0]}.{capability[1]})" if capability is not None else ""
    return (name or "this GPU") + suffix


def _capabilities(facts: Facts) -> list[tuple[str | None, tuple[int, int]]]:
    """Return name and compute capability of the possible devices; none if one is unknown, since it may be the one."""
    candidates = _chosen(facts) if facts.observed.devices else _gpus_of_request(facts)
    capabilities = [
        (device.name, device.compute_capability) for device in candidates if device.compute_capability is not None
    ]
    return capabilities if len(capabilities) == len(candidates) else []


def _chosen(facts: Facts) -> list[CudaDevice]:
    if facts.request.device == "auto":
        return list(facts.observed.devices)
    try:
        return [choose(facts.request.device, facts.observed.devices, lambda _: None)]
    except errors.DeviceNotFoundError:
        return []


def _gpus_of_request(facts: Facts) -> list[GPU]:
    gpus, requested = surroundings.visible_gpus(facts.environment), facts.request.device
    if not gpus:
        return gpus
    ordinal = ordinal_of(requested)
    if ordinal is not None and len({(gpu.name, gpu.compute_capability) for gpu in gpus}) == 1:
        return gpus[ordinal : ordinal + 1]
    if ordinal is None and requested != "auto":
        prefix = str(requested).strip().lower()
        return [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(prefix)]
    return gpus


def lacks_memory(
    facts: Facts, evidence: list[str], requested: int | None = None
) -> errors.InsufficientDeviceMemoryError:
    """Return the error for too little GPU memory. ``requested``: bytes, or None if ONNX Runtime names none."""
    gpu = requested_gpu(facts)
    free, total = (gpu.memory_free, gpu.memory_total) if gpu is not None else (None, None)
    if gpu is not None and free is not None and total is not None:
        evidence = [*evidence, f"{gpu.name or 'GPU'} ({gpu.uuid}): {free >> 20} of {total >> 20} MiB free"]
    open_sessions = sessions_on_gpu(facts.observed.list_sessions(), gpu.uuid if gpu is not None else None)
    stop = "stop other processes on the GPU, choose another one with device=, or raise gpu_mem_limit if you set it"
    return errors.InsufficientDeviceMemoryError(
        "the GPU has too little free memory to open this session"
        + (f": {requested} bytes were asked for" if requested else ""),
        evidence=[*evidence, *named_sessions(open_sessions)],
        fixes=[*([CLOSE_SESSIONS] if open_sessions else []), manual(stop)],
        requested=requested,
        free=free,
        total=total,
    )


def requested_gpu(facts: Facts) -> GPU | None:
    """Return NVML's facts about the requested GPU; None if several GPUs fit the request, or no GPU does."""
    candidates = _chosen(facts) if facts.observed.devices else _gpus_of_request(facts)
    if len(candidates) != 1:
        return None
    uuid = candidates[0].uuid
    return next((gpu for gpu in facts.environment.driver.nvml.gpus if gpu.uuid is not None and gpu.uuid == uuid), None)
