"""Which GPUs CUDA_VISIBLE_DEVICES, and what starts a container, leave to this process."""

from __future__ import annotations

import re

from ...environment.gpu.driver import GPU
from ...environment.inspection import Environment


def are_hidden(environment: Environment) -> bool:
    """Whether it is CUDA_VISIBLE_DEVICES that keeps every GPU from this process."""
    return hides_everything(environment) or _names_nothing(environment)


def hides_everything(environment: Environment) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is there and means no GPU, whatever GPUs there are."""
    value = environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    return value is not None and not _visible_names(value)


def _names_nothing(environment: Environment) -> bool:
    """Whether CUDA_VISIBLE_DEVICES names none of the GPUs that NVML sees. A MIG instance may be unknown to it."""
    value = environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    gpus = environment.driver.nvml.gpus if environment.driver.nvml.available else ()
    if value is None or not gpus:
        return False
    mig_is_off = all(gpu.mig_enabled is False for gpu in gpus)
    may_be_known = mig_is_off or not value.strip().upper().startswith("MIG-")
    return may_be_known and not visible_gpus(environment)


def visible_gpus(environment: Environment) -> list[GPU]:
    """NVML's GPUs as CUDA_VISIBLE_DEVICES leaves and orders them.

    Exact where all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID; else CUDA may number them fastest first.
    """
    gpus = list(environment.driver.nvml.gpus)
    value = environment.variables.now.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return gpus
    chosen: list[GPU] = []
    for name in _visible_names(value):
        match = _match(name, gpus)
        if match is None:
            break  # so does CUDA: CUDA C++ Programming Guide, "CUDA Environment Variables"
        chosen.append(match)
    return chosen


def _visible_names(value: str) -> list[str]:
    """The ordinals and UUIDs of CUDA_VISIBLE_DEVICES that count.

    The first name that means nothing ends the list, and one that is there twice empties it; a number ends where its
    digits end, so "1gpu" is 1: torch.cuda._parse_visible_devices, which was made to count as CUDA does.
    """
    names: list[str] = []
    for part in map(str.strip, value.split(",")):
        number = re.match(r"\+?([0-9]{1,9})(?![0-9])", part)
        name = str(int(number[1])) if number else part
        if not number and not part.upper().startswith(("GPU-", "MIG-")):
            break
        if name in names:
            return []
        names.append(name)
    return names


def _match(name: str, gpus: list[GPU]) -> GPU | None:
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    found = [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(name.lower()) or name in gpu.mig_uuids]
    return found[0] if len(found) == 1 else None  # the beginning of several UUIDs names none of them


def given_to_container(environment: Environment) -> list[str]:
    """As evidence: which GPUs its runtime was told to give to a container, where the variable for that says it."""
    value = environment.variables.now.get("NVIDIA_VISIBLE_DEVICES")
    if value is None:
        return []
    return [f"NVIDIA_VISIBLE_DEVICES={value!r}" + (": no GPU" if value in ("", "void", "none") else "")]
