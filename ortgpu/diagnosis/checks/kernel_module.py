"""Does the driver's kernel module serve this process? NVML says why not, where CUDA's number says nothing."""

from __future__ import annotations

from ...errors import DriverUnusableError, Fix, manual, shell
from ..facts import Facts
from ..messages.cuda_codes import UNUSABLE, Meaning, name_of, returned_by_cuinit
from . import driver_library
from .devices import hides_everything
from .surroundings import of_wsl

# What cuInit returns for a kernel module that is not there, or that does not answer.
_VAGUE = frozenset({1, 3, 100, 101, 304, 801, 999})

_NOT_LOADED, _LOST, _MISMATCH = 9, 15, 18  # nvmlReturn_t, nvml.h

_IN_WSL = manual("in WSL: update it (wsl --update) and the NVIDIA driver of Windows, and restart it", needs="host")

_SAID_BY_NVML: dict[int, Meaning] = {
    8: Meaning(
        "the GPU lacks the power of its external cables",
        (manual("connect the power cables of the GPU", needs="hardware"),),
    ),
    _LOST: Meaning(  # Xid 79
        "a GPU is lost: it does not answer on its bus any more",
        (
            manual("reboot; a GPU that is lost again has to be taken out of service", needs="reboot"),
            manual("or leave it out, by naming the others in CUDA_VISIBLE_DEVICES"),
        ),
    ),
    16: Meaning(
        "the GPU has to be reset before it computes again",
        (shell("sudo nvidia-smi --gpu-reset", needs="root"), manual("or reboot", needs="reboot")),
    ),
    17: Meaning(  # microsoft/WSL issue 9962
        "the operating system refuses the GPU to this process",
        (_IN_WSL,),
    ),
}


def not_ready(facts: Facts) -> DriverUnusableError | None:
    """``cuInit`` failed with a code that says nothing, and NVML says why."""
    environment, cuda = facts.environment, facts.observed.cuda
    nvml = environment.driver.nvml
    if cuda is None or cuda.code not in _VAGUE or hides_everything(environment):
        return None
    evidence = [returned_by_cuinit(cuda.code), f"NVML: {nvml.error}"]
    if nvml.code == _MISMATCH:
        found = driver_library.of_another_driver(cuda.code, facts, evidence)
        if found is not None:
            return found
        meaning = UNUSABLE[803]
    elif nvml.code == _NOT_LOADED and environment.driver.version is None and not environment.driver.is_tegra:
        meaning = _not_loaded(facts)
    elif nvml.code in _SAID_BY_NVML:
        meaning = _SAID_BY_NVML[nvml.code]
    else:
        return None
    return DriverUnusableError(
        f"{meaning.what} ({name_of(cuda.code)})", evidence=evidence, fixes=meaning.fixes, cuda_code=cuda.code
    )


def _not_loaded(facts: Facts) -> Meaning:
    host = facts.environment.host
    if host.wsl and not host.container:  # which has no module of NVIDIA's: microsoft/WSL issue 9134
        return Meaning("WSL does not reach the NVIDIA driver of Windows", (of_wsl(facts.environment) or _IN_WSL,))
    return Meaning("the NVIDIA kernel module is not loaded", _ways_to_load_it(facts))


def _ways_to_load_it(facts: Facts) -> tuple[Fix, ...]:
    if facts.environment.host.container:
        return (
            manual("start the NVIDIA driver on the host of this container (nvidia-smi there says more)", needs="host"),
        )
    return (
        shell("sudo modprobe nvidia", needs="root"),
        manual(
            "if that fails, install the driver again for this kernel (uname -r): a kernel that was upgraded has no "
            "module of it, Secure Boot refuses one that is not signed, nouveau may hold the GPU, and drivers from 590 "
            "on leave out GPUs before the RTX 20 series (sudo dmesg | grep -i nvrm)",
            needs="driver",
        ),
    )
