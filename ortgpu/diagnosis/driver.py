"""Is there a driver, is it new enough, does it work?"""

from __future__ import annotations

import os
import re
import shlex

from ..environment.driver import TEGRA_MEMORY, Driver, RefusedNode
from ..environment.driver_places import UnlinkedFile
from ..errors import (
    DeviceBusyError,
    DriverNotFoundError,
    DriverTooOldError,
    DriverUnusableError,
    Fix,
    GPUError,
    manual,
    shell,
)
from . import descriptors, driver_library, kernel_module, loader_words, remedies, surroundings
from .cuda_codes import (
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
    without_code,
)
from .devices import (
    given_to_container,
    gpu_asked_for,
    lacks_memory,
    named_device,
    none_visible,
    unsupported,
    visible_gpus,
)
from .facts import Facts
from .releases import FOR_CUDA_12, runs_with_cuda_12

_UVM = "/dev/nvidia-uvm"
# The group of a file whose own is none of this user namespace: user_namespaces(7), overflowgid
_UNMAPPED = frozenset({"nogroup", "nobody", "65534"})


def not_found(facts: Facts) -> GPUError | None:
    environment = facts.environment
    driver, host = environment.driver, environment.host
    if driver.libcuda is not None:
        return None
    if host.system == "Windows":
        return _not_found_on_windows(facts)
    library = "libcuda.so.1"
    evidence = [driver.libcuda_error or f"{library} cannot be loaded", *_said_by_nvml(driver)]
    if driver.kernel_version:
        evidence.append(f"kernel module: {driver.kernel_version}")
    evidence.append(f"device files: {', '.join(driver.device_nodes) or 'none'}")
    evidence += [f"there, where the loader does not look: {path}" for path in driver.libcuda_elsewhere]
    evidence += [f"there, without its link {library}: {file.path}" for file in driver.libcuda_unlinked]
    if host.container:
        capabilities = environment.variables.now.get("NVIDIA_DRIVER_CAPABILITIES")
        value = f"={capabilities}" if capabilities else " is not set"
        evidence.append(f"in a container ({host.container}), NVIDIA_DRIVER_CAPABILITIES{value}")
        evidence += given_to_container(environment)
    fixes = _ways_to_a_driver(facts)
    elsewhere = surroundings.of_service(environment) or surroundings.without_nvidia(environment)
    if elsewhere is not None:
        evidence.append(elsewhere[0])
        fixes = [elsewhere[1]]
    return DriverNotFoundError(
        f"the NVIDIA driver's library {library} cannot be loaded", evidence=evidence, fixes=fixes
    )


def _not_found_on_windows(facts: Facts) -> GPUError:
    """There the driver's files are in System32, where its installer alone puts them."""
    driver = facts.environment.driver
    return DriverNotFoundError(
        "the NVIDIA driver's library nvcuda.dll cannot be loaded",
        evidence=[driver.libcuda_error or "nvcuda.dll cannot be loaded", *_said_by_nvml(driver)],
        fixes=[remedies.update_driver(facts.environment)],
    )


def _said_by_nvml(driver: Driver) -> list[str]:
    if driver.nvml.available:
        return [f"NVML works and sees {len(driver.nvml.gpus)} GPU(s): nvidia-smi does not show this fault"]
    return [f"NVML: {driver.nvml.error}"] if driver.nvml.error else []


def _ways_to_a_driver(facts: Facts) -> list[Fix]:
    environment = facts.environment
    major = environment.cuda_major
    if environment.driver.libcuda_elsewhere:  # huggingface/text-generation-inference issue 291
        return [remedies.look_first_in(os.path.dirname(environment.driver.libcuda_elsewhere[0]))]
    if environment.driver.libcuda_unlinked:
        return _ways_to_its_link(facts, environment.driver.libcuda_unlinked[0])
    if loader_words.cannot_be_mapped(environment.driver.libcuda_error or ""):
        return [remedies.let_it_be_mapped(environment, "libcuda.so.1")]
    if (none_given := surroundings.of_wsl(environment)) is not None:
        return [none_given]
    if environment.host.wsl and not environment.host.container:
        return [
            remedies.look_first_in(remedies.WSL_DRIVER),
            manual("the driver of WSL is the one of Windows: install it there, and none inside WSL", needs="driver"),
        ]
    fixes = [] if environment.host.container else [_rest_of_the_driver(facts) or remedies.update_driver(environment)]
    fixes.append(
        surroundings.give_the_gpu(
            environment, " and the capability compute (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
    )
    if environment.host.container and (
        empty := re.match(r"(/.*): file too short", environment.driver.libcuda_error or "")
    ):
        folder = shlex.quote(os.path.dirname(empty[1]))
        fixes.append(
            manual(
                "if it has the GPU already: take the empty files, over which another container's libraries were "
                f"mounted, out of the image that was made of it: find {folder} -name 'lib*.so*' -size 0 -delete",
                needs="host",
            )
        )
    if environment.host.container and not driver_library.is_enough(environment.driver.version, major or 13):
        fixes.append(manual(f"and {remedies.update_driver(environment)}", needs="driver"))
    return fixes


def _ways_to_its_link(facts: Facts, file: UnlinkedFile) -> list[Fix]:
    """NVIDIA/nvidia-container-toolkit issues 128, 675 and 1099."""
    folder, path = shlex.quote(os.path.dirname(file.path)), shlex.quote(file.path)
    fixes = [
        shell(f"/sbin/ldconfig -n {folder}")
        if file.writable
        else shell(
            f'links=$(mktemp -d) && ln -s {path} "$links/libcuda.so.1" && '
            'export LD_LIBRARY_PATH="$links${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'
        )
    ]
    if facts.environment.host.container:
        fixes.append(
            manual(
                "for good: let its runtime make the link, as nvidia-container-toolkit does by ldconfig, for which the "
                "root file system must not be read-only (docker run --read-only, readOnlyRootFilesystem) and the "
                "ldconfig of /etc/nvidia-container-runtime/config.toml has to be there on the host",
                needs="host",
            )
        )
    return fixes


def _rest_of_the_driver(facts: Facts) -> Fix | None:
    """Distributions have its parts in packages of their own, and that of the display needs no CUDA."""
    environment = facts.environment
    version, major = environment.driver.version, environment.cuda_major
    if major is None or not driver_library.is_enough(version, major):
        return None
    return manual(
        f"install the part of driver {version} that has libcuda.so.1, in that version (Ubuntu: libnvidia-compute-*, "
        "Debian: libcuda1, Fedora: xorg-x11-drv-nvidia-cuda-libs, openSUSE: nvidia-compute-*, Arch: nvidia-utils)",
        needs="driver",
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
    fixes = [remedies.update_driver(environment)]
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
            f"needed: {remedies.LOWEST_DRIVER.get(major, 'a newer one')} or newer",
            f"provider: {provider.path if provider else ''}",
        ],
        fixes=fixes,
        driver_version=driver.version,
        driver_cuda=supported,
        needed_cuda=(major, 0),
    )


def not_accessible(facts: Facts) -> GPUError | None:
    """Device files that this process may not open, or that nobody made: CUDA then sees no GPU, or fails without a
    reason."""
    driver, cuda = facts.environment.driver, facts.observed.cuda
    if driver.libcuda is None or (cuda is not None and cuda.code == 0):
        return None
    code = cuda.code if cuda is not None else None
    refused = {node.path: node for node in driver.refused_nodes}
    gpus = [path for path in driver.device_nodes if re.fullmatch(r"/dev/nvidia\d+", path)]
    # Some GPUs may be kept from a job on purpose.
    needed = [path for path in ("/dev/nvidiactl", _UVM, TEGRA_MEMORY) if path in refused] + (
        gpus if gpus and all(path in refused for path in gpus) else []
    )
    if needed:
        return DriverUnusableError(
            f"this process may not open {', '.join(needed)}",
            evidence=[
                f"{node.path}: {node.error}, group {node.group or 'unknown'}"
                for node in map(refused.__getitem__, needed)
            ],
            fixes=_ways_to_access(facts, [refused[path] for path in needed]),
            cuda_code=code,
        )
    if code and not driver.device_nodes and driver.kernel_version is not None and not _may_have_no_files(facts):
        return DriverUnusableError(
            "the NVIDIA kernel module is loaded, and this process sees none of its device files",
            evidence=[f"kernel module: {driver.kernel_version}", "device files: none"],
            fixes=[
                manual(f"in a service of systemd: PrivateDevices=no in its unit, and {_ALLOWED}", needs="root"),
                shell("sudo nvidia-modprobe -u -c=0", needs="root"),
            ],
            cuda_code=code,
        )
    has_own = "/dev/nvidiactl" in driver.device_nodes and _UVM not in driver.device_nodes
    if has_own and not facts.environment.host.wsl and not driver.is_tegra:
        whole = surroundings.how(facts.environment)
        in_container = manual(f"in a container: give it {_UVM} too, as this does: {whole}", needs="host")
        made = shell("sudo nvidia-modprobe -u -c=0", needs="root")
        return DriverUnusableError(
            f"the device file {_UVM} is missing, which CUDA needs beside those of the GPUs",
            evidence=[f"device files: {', '.join(driver.device_nodes)}"],
            fixes=[in_container] if facts.environment.host.container else [made],
            cuda_code=code,
        )
    return None


# systemd.resource-control(5), systemd.exec(5): PrivateDevices=yes brings DevicePolicy=closed with it
_ALLOWED = "DeviceAllow=char-nvidia* rw where it has a DevicePolicy"


def _may_have_no_files(facts: Facts) -> bool:
    """A container sees the kernel module of its host, whatever it was given."""
    host = facts.environment.host
    return host.container is not None or host.wsl or host.system != "Linux"


def _ways_to_access(facts: Facts, nodes: list[RefusedNode]) -> list[Fix]:
    container = facts.environment.host.container
    if container == "lxc" and any(node.error == "EPERM" for node in nodes):  # linuxcontainers.org, lxc.container.conf
        return [
            manual(
                "let this container open them: lxc.cgroup2.devices.allow = c MAJOR:* rwm in its configuration, for "
                "each major number that ls -l shows (that of /dev/nvidia-uvm may be another after a reboot), or in "
                "Proxmox, pct set ID --dev0 /dev/nvidia-uvm and so on",
                needs="host",
            )
        ]
    if any(node.error == "EPERM" for node in nodes):  # NVIDIA/nvidia-container-toolkit issue 48
        return [
            manual(
                "start this container or job again with its GPU: what it may open was changed under it, as "
                "`systemctl daemon-reload` on the host does",
                needs="host",
            ),
            *([manual(f"in a service of systemd: {_ALLOWED}", needs="root")] if container is None else []),
        ]
    if not any(node.by_mode for node in nodes):
        return [_let_selinux_allow_it(container)]
    groups = sorted({node.group for node in nodes if node.group is not None} - {"root"})
    if _UNMAPPED.intersection(groups):
        return [
            manual(
                "let this container keep the groups of the user who starts it, one that may open these files: "
                "podman run --group-add keep-groups ...",
                needs="host",
            )
        ]
    if groups and container is not None:
        return [manual(surroundings.join_groups(facts.environment, groups), needs="host")]
    if groups:
        return [manual(f"make this user a member of {' and '.join(groups)}, and log in again", needs="root")]
    return [
        manual(
            "let this user read and write these files: nvidia-modprobe makes them so"
            + (" on the host of this container" if container is not None else ""),
            needs="host" if container is not None else "root",
        )
    ]


def _let_selinux_allow_it(container: str | None) -> Fix:
    """docs.nvidia.com, "Troubleshooting the NVIDIA Container Toolkit", NVML: Insufficient Permissions and SELinux."""
    what = "their mode allows it, so that SELinux, or what else guards this system, has to: "
    if container is None:
        return manual(f"{what}sudo ausearch -m avc -ts recent says what it refused", needs="root")
    run = "podman run" if container == "podman" else "docker run"
    return manual(
        f"{what}{run} --security-opt label=disable ..., or on the host sudo setsebool -P container_use_devices on",
        needs="host",
    )


def unusable(facts: Facts) -> GPUError | None:
    """``cuInit`` was called and failed."""
    cuda = facts.observed.cuda
    explained = (not_accessible, driver_library.of_linux_in_wsl, kernel_module.not_ready)
    if cuda is None or not cuda.code or cuda.code == NO_DEVICE or any(check(facts) for check in explained):
        return None  # devices.none_visible judges that code
    evidence = [f"cuInit returned {cuda.code} ({name_of(cuda.code)})", *_printed_by_it(facts)]
    return _lacks_host_memory(facts, evidence) if cuda.code == OUT_OF_MEMORY else for_code(cuda.code, facts, evidence)


def _printed_by_it(facts: Facts) -> list[str]:
    """What the driver says for itself, as that of a Jetson does: "NvRmMemInitNvmap failed with Permission denied"."""
    return [f"it printed: {line}" for line in facts.observed.printed("driver")[-5:]]


def _lacks_host_memory(facts: Facts, evidence: list[str]) -> DriverUnusableError:
    """``cuInit`` makes no context and asks for no memory of the GPU."""
    if remedies.limit_on_memory(facts.environment) is not None:
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
        cuda_code=OUT_OF_MEMORY,
    )


def for_code(code: int, facts: Facts, evidence: list[str]) -> GPUError:
    """The error that a CUDA code stands for, whoever reported it while a session was being opened."""
    driver = facts.environment.driver
    opens_files = code in (DEVICE_UNAVAILABLE, OPERATING_SYSTEM, UNKNOWN)
    if opens_files and (too_few := descriptors.too_few_for(code, facts, evidence)) is not None:
        return too_few
    if code == INSUFFICIENT_DRIVER:  # what the CUDA runtime also says where there is no driver at all
        better = not_found(facts) or too_old(facts)
        if better is not None:
            return better
        major = facts.environment.cuda_major
        return DriverTooOldError(
            "the NVIDIA driver is older than the CUDA that the installed ONNX Runtime was built with",
            evidence=evidence,
            fixes=[remedies.update_driver(facts.environment)],
            driver_version=driver.version,
            driver_cuda=driver.cuda_version,
            needed_cuda=(major, 0) if major else None,
        )
    if code == INVALID_DEVICE and (better := named_device(facts) or none_visible(facts)) is not None:
        return better
    if code in NO_CODE:
        gpu = gpu_asked_for(facts)
        name, capability = (gpu.name, gpu.compute_capability) if gpu is not None else (None, None)
        return unsupported(facts) or without_code(evidence, name, capability)
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
        fixes = remedies.restart_driver(facts.environment, fixes)
    return DriverUnusableError(f"{meaning.what} ({name_of(code)})", evidence=evidence, fixes=fixes, cuda_code=code)
