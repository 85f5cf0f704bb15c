"""May this process open the files of the GPUs?"""

from __future__ import annotations

import re

from ...environment.gpu.driver import TEGRA_MEMORY, RefusedNode
from ...errors import DriverUnusableError, Fix, GPUError, manual, on_linux, shell
from ..facts import Facts
from . import surroundings

_UVM = "/dev/nvidia-uvm"
# The group of a file whose own is none of this user namespace: user_namespaces(7), overflowgid
_UNMAPPED = frozenset({"nogroup", "nobody", "65534"})


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
                on_linux(f"in a service of systemd: PrivateDevices=no in its unit, and {_ALLOWED}", needs="root"),
                shell("sudo nvidia-modprobe -u -c=0", needs="root"),
            ],
            cuda_code=code,
        )
    has_own = "/dev/nvidiactl" in driver.device_nodes and _UVM not in driver.device_nodes
    if has_own and not facts.environment.host.wsl and not driver.is_tegra:
        whole = surroundings.how(facts.environment)
        in_container = on_linux(f"in a container: give it {_UVM} too, as this does: {whole}", needs="host")
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
            on_linux(
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
            *([on_linux(f"in a service of systemd: {_ALLOWED}", needs="root")] if container is None else []),
        ]
    if not any(node.by_mode for node in nodes):
        return [_let_selinux_allow_it(container)]
    groups = sorted({node.group for node in nodes if node.group is not None} - {"root"})
    if _UNMAPPED.intersection(groups):
        return [
            on_linux(
                "let this container keep the groups of the user who starts it, one that may open these files: "
                "podman run --group-add keep-groups ...",
                needs="host",
            )
        ]
    if groups and container is not None:
        return [on_linux(surroundings.join_groups(facts.environment, groups), needs="host")]
    if groups:
        return [manual(f"make this user a member of {' and '.join(groups)}, and log in again", needs="root")]
    return [
        on_linux(
            "let this user read and write these files: nvidia-modprobe makes them so"
            + (" on the host of this container" if container is not None else ""),
            needs="host" if container is not None else "root",
        )
    ]


def _let_selinux_allow_it(container: str | None) -> Fix:
    """docs.nvidia.com, "Troubleshooting the NVIDIA Container Toolkit", NVML: Insufficient Permissions and SELinux."""
    what = "their mode allows it, so that SELinux, or what else guards this system, has to: "
    if container is None:
        return on_linux(f"{what}sudo ausearch -m avc -ts recent says what it refused", needs="root")
    run = "podman run" if container == "podman" else "docker run"
    return on_linux(
        f"{what}{run} --security-opt label=disable ..., or on the host sudo setsebool -P container_use_devices on",
        needs="host",
    )
