"""Is the driver new enough, do its library and its kernel module go together, and do they serve this process?

In the place of the library, libcuda.so.1, others are found: one of the package cuda-compat; one that a container's
image holds, though the container runtime brings that of the host; that of a driver for Linux inside WSL; that of a
driver that is installed and was not started yet. Why the kernel module does not serve, NVML says, where CUDA's number
says nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from ...environment.packages.metadata import numbers_of
from ...errors import DriverTooOldError, DriverUnusableError, Fix, GPUError, manual, on_linux, shell
from ..facts import Facts
from ..messages.cuda_codes import UNUSABLE, Meaning, name_of, returned_by_cuinit
from ..remedies import commands as remedies
from ..remedies import system as system_remedies
from ..remedies.releases import FOR_CUDA_12, runs_with_cuda_12
from .surroundings import of_wsl
from .visible import hides_everything, visible_gpus


def too_old(facts: Facts) -> GPUError | None:
    environment = facts.environment
    driver, provider = environment.driver, environment.provider
    major, supported = environment.cuda_major, driver.supported_cuda
    if major is None or supported is None or supported[0] >= major:
        return None
    if (other := _older(facts, major)) is not None:
        return other
    if driver.cuda_version is None and system_remedies.is_enough(driver.version, major):
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


_MISMATCH = 803


def _older(facts: Facts, cuda_major: int) -> DriverTooOldError | None:
    """The driver is new enough for a CUDA major, and what is loaded in its place is not."""
    driver = facts.environment.driver
    loaded, by_nvml = driver.cuda_version, driver.nvml.cuda_version
    if loaded is None or loaded[0] >= cuda_major:
        return None
    if by_nvml is not None and by_nvml[0] >= cuda_major:
        own = f"this machine's driver up to {by_nvml[0]}.{by_nvml[1]}"
    elif system_remedies.is_enough(driver.version, cuda_major):  # NVML's answer may be that of the loaded libcuda, too
        own = f"this machine's driver, {driver.version}, is new enough for CUDA {cuda_major}"
    else:
        return None
    return DriverTooOldError(
        f"the libcuda.so.1 that is loaded supports CUDA up to {loaded[0]}.{loaded[1]}, {own}, "
        f"and the installed ONNX Runtime needs CUDA {cuda_major}",
        evidence=_versions(facts),
        fixes=[off] if (off := off_the_path(facts)) is not None else _ways_to_the_drivers_own(facts),
        driver_version=driver.version,
        driver_cuda=loaded,
        needed_cuda=(cuda_major, 0),
    )


def of_another_driver(code: int, facts: Facts, evidence: list[str]) -> DriverUnusableError | None:
    """For what CUDA says of a libcuda that it does not go with: 803, or 804 where it was taken for cuda-compat's."""
    driver = facts.environment.driver
    differs = None not in (driver.libcuda_version, driver.version) and driver.libcuda_version != driver.version
    if _is_compat(facts):
        what = "a forward-compatibility libcuda (package cuda-compat) is loaded, which " + (
            "does not go with the driver in the kernel" if code == _MISMATCH else "this GPU does not support"
        )
    elif differs and facts.environment.host.container:
        what = "this container has loaded the libcuda.so.1 of another driver than the one of its host"
    elif differs:
        what = UNUSABLE[_MISMATCH].what
    else:
        return None
    return DriverUnusableError(
        f"{what} ({name_of(code)})",
        evidence=[*evidence, *_versions(facts)],
        fixes=_ways_to_the_drivers_own(facts),
        cuda_code=code,
    )


def of_linux_in_wsl(facts: Facts) -> DriverUnusableError | None:
    """A driver package inside WSL hides the driver of Windows, which is the only one there (faults C15).

    Its file is named after a driver, and that of Windows is libcuda.so.1.1, which a container has in the folder of the
    others: NVIDIA/nvidia-container-toolkit issue 289.
    """
    environment, cuda = facts.environment, facts.observed.cuda
    path, supported = environment.driver.libcuda or "", environment.driver.cuda_version
    major = environment.cuda_major
    too_old = major is not None and supported is not None and supported[0] < major
    code = cuda.code if cuda is not None else None
    is_of_linux = environment.driver.libcuda_version is not None and "/wsl/" not in path
    if not environment.host.wsl or not is_of_linux or not (code or too_old):
        return None
    fixes = [
        system_remedies.look_first_in(system_remedies.WSL_DRIVER),
        manual("or remove the packages of the driver for Linux (libnvidia-compute-*, nvidia-utils-*)", needs="root"),
    ]
    return DriverUnusableError(
        "a libcuda.so.1 that is not WSL's is loaded, and in WSL there is no other driver than that of Windows",
        evidence=[f"loaded: {path}", *([returned_by_cuinit(code)] if code else [])],
        fixes=_ways_to_the_drivers_own(facts) if environment.host.container else fixes,
        cuda_code=code or None,
    )


def off_the_path(facts: Facts) -> Fix | None:
    """Take the loaded libcuda out of LD_PRELOAD, or its folder out of LD_LIBRARY_PATH; None where neither has it."""
    environment, driver = facts.environment, facts.environment.driver
    if driver.libcuda_preload is not None:
        return remedies.off_the_path(environment, "LD_PRELOAD", driver.libcuda_preload)
    entry = driver.libcuda_entry
    return remedies.off_the_path(environment, "LD_LIBRARY_PATH", entry) if entry is not None else None


def do_without_interposed(facts: Facts) -> list[Fix]:
    """For what stands between this process and the driver: Project-HAMi/HAMi issues 1055 and 1834."""
    fixes = []
    for path in facts.environment.driver.interposed:
        everywhere = manual(
            f"take {path} out of /etc/ld.so.preload; of HAMi, which puts it there, CUDA_DISABLE_CONTROL=true in the "
            "specification of the container does without it",
            needs="host",
        )
        fixes.append(remedies.off_the_path(facts.environment, "LD_PRELOAD", path) or everywhere)
    return fixes


def _is_compat(facts: Facts) -> bool:
    return "compat" in PurePosixPath(facts.environment.driver.libcuda or "").parts


def _versions(facts: Facts) -> list[str]:
    driver = facts.environment.driver
    own = f", of driver {driver.libcuda_version}" if driver.libcuda_version else ""
    return [f"loaded: {driver.libcuda}{own}", f"driver {driver.version or 'of unknown version'}"]


def _ways_to_the_drivers_own(facts: Facts) -> list[Fix]:
    host, driver = facts.environment.host, facts.environment.driver
    if _is_compat(facts):
        everywhere = "take the cuda-compat folder out of LD_LIBRARY_PATH and the loader's configuration"
        return [off_the_path(facts) or on_linux(everywhere, needs="root"), *_update(facts)]
    if host.container == "lxc":  # into which nothing is mounted unless it is told to
        return [
            manual(
                f"install the libraries of driver {driver.version} in this container, without a kernel module "
                f"(NVIDIA-Linux-*-{driver.version}.run --no-kernel-module): its own are of {driver.libcuda_version}, "
                "and have to be upgraded whenever its host's are",
                needs="root",
            )
        ]
    if host.container:
        return [
            manual(
                "take the packages of the driver (libnvidia-compute-*, nvidia-utils-*, libcuda1) out of the image: the "
                "container runtime brings those of the host",
                needs="host",
            ),
            manual("or start the container again, if the driver of its host was upgraded meanwhile", needs="host"),
        ]
    if numbers_of(driver.libcuda_version or "0") > numbers_of(driver.kernel_version or ""):
        return list(UNUSABLE[_MISMATCH].fixes)  # upgraded, and not started anew
    return [manual(f"let the libcuda.so.1 of the driver be found before {driver.libcuda}", needs="root")]


def _update(facts: Facts) -> list[Fix]:
    """Without cuda-compat a driver that is too old stays too old."""
    major, version = facts.environment.cuda_major, facts.environment.driver.version
    if major is None or version is None or system_remedies.is_enough(version, major):
        return []
    return [system_remedies.update_driver(facts.environment)]


# What cuInit returns for a kernel module that is not there, or that does not answer.
_VAGUE = frozenset({1, 3, 100, 101, 304, 801, 999})

_NOT_LOADED, _LOST, _DIFFERS = 9, 15, 18  # nvmlReturn_t, nvml.h

_IN_WSL = on_linux("in WSL: update it (wsl --update) and the NVIDIA driver of Windows, and restart it", needs="host")

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
    if nvml.code == _DIFFERS:
        found = of_another_driver(cuda.code, facts, evidence)
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
        on_linux(
            "if that fails, install the driver again for this kernel (uname -r): a kernel that was upgraded has no "
            "module of it, Secure Boot refuses one that is not signed, nouveau may hold the GPU, and drivers from 590 "
            "on leave out GPUs before the RTX 20 series (sudo dmesg | grep -i nvrm)",
            needs="driver",
        ),
    )
