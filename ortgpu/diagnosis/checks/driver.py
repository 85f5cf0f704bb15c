"""Check that there is a driver, that its parts match, and that this process can use it."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import PurePosixPath

from ... import errors
from ...environment.gpu.driver import TEGRA_MEMORY, RefusedNode
from ...environment.host import Host
from ...environment.inspection import Environment
from ...environment.libraries import loader_words
from ...environment.packages.metadata import numbers_of
from ...errors import Fix, GPUError, counted, manual, python, shell
from ..facts import Facts
from ..messages import cuda_codes
from ..remedies import fixes as remedies
from ..remedies.releases import FOR_CUDA_12
from . import surroundings


def not_found(facts: Facts) -> GPUError | None:
    environment = facts.environment
    driver, host = environment.driver, environment.host
    if driver.libcuda is not None:
        return None
    library = _libcuda(host)
    evidence = [driver.libcuda_error or f"{library} cannot be loaded"]
    if driver.nvml.available:
        gpus = counted(len(driver.nvml.gpus), "GPU")
        evidence.append(f"NVML works and sees {gpus}: nvidia-smi does not show this fault")
    elif driver.nvml.error:
        evidence.append(f"NVML: {driver.nvml.error}")
    fixes = [remedies.update_driver(environment)]
    if not host.is_windows:
        if driver.kernel_version:
            evidence.append(f"kernel module: {driver.kernel_version}")
        evidence.append(f"device files: {', '.join(driver.device_nodes) or 'none'}")
        evidence += map("there, where the loader does not look: {}".format, driver.libcuda_elsewhere)
        evidence += [f"there, without its link {library}: {file.path}" for file in driver.libcuda_unlinked]
        if host.container:
            capabilities = environment.variables.now.get("NVIDIA_DRIVER_CAPABILITIES")
            value = f"={capabilities}" if capabilities else " is not set"
            evidence.append(f"in a container ({host.container}), NVIDIA_DRIVER_CAPABILITIES{value}")
            evidence += surroundings.given_to_container(environment)
        fixes = _ways_to_a_driver(environment)
        elsewhere = surroundings.service_advice(environment) or surroundings.no_nvidia_advice(environment)
        if elsewhere is not None:
            evidence.append(elsewhere[0])
            fixes = [elsewhere[1]]
    summary = f"the NVIDIA driver's library {library} cannot be loaded"
    return errors.DriverNotFoundError(summary, evidence=evidence, fixes=fixes)


def _libcuda(host: Host) -> str:
    return "nvcuda.dll" if host.is_windows else "libcuda.so.1"


def _ways_to_a_driver(environment: Environment) -> list[Fix]:
    driver, host, major = environment.driver, environment.host, environment.cuda_major
    words = driver.libcuda_error or ""
    if driver.libcuda_elsewhere:  # See huggingface/text-generation-inference issue 291.
        return [remedies.prepend_library_path(os.path.dirname(driver.libcuda_elsewhere[0]))]
    if driver.libcuda_unlinked:  # See NVIDIA/nvidia-container-toolkit issues 128, 675 and 1099.
        file = driver.libcuda_unlinked[0]
        if file.writable:
            return [shell(f"/sbin/ldconfig -n {shlex.quote(os.path.dirname(file.path))}")]
        make_link = f'links=$(mktemp -d) && ln -s {shlex.quote(file.path)} "$links/libcuda.so.1"'
        return [shell(f'{make_link} && export LD_LIBRARY_PATH="$links${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"')]
    if loader_words.cannot_be_mapped(words):
        return [remedies.fix_mapping_refusal(environment, "libcuda.so.1")]
    if (none_given := surroundings.wsl_advice(environment)) is not None:
        return [none_given]
    if host.wsl and not host.container:
        of_windows = "the driver of WSL is the one of Windows: install it there, and none inside WSL"
        return [remedies.prepend_library_path(remedies.WSL_DRIVER), manual(of_windows, needs="driver")]
    give_gpu = surroundings.give_the_gpu(environment)
    if not host.container and major is not None and remedies.is_enough(environment, major):
        # Distributions split the driver, and a display needs no CUDA.
        rest = f"install the part of driver {driver.version} that has libcuda.so.1 (on Ubuntu: libnvidia-compute-*)"
        return [manual(rest, needs="driver"), give_gpu]
    if not host.container:
        return [remedies.update_driver(environment), give_gpu]
    fixes = [give_gpu]
    if empty := re.match(r"(/.*): file too short", words):
        delete = f"find {shlex.quote(os.path.dirname(empty[1]))} -name 'lib*.so*' -size 0 -delete"
        made = "if it has its GPU already: its image was made with a mounted driver, and has empty files in its place"
        fixes.append(manual(f"{made}; delete them in the image: {delete}", needs="host"))
    if not remedies.is_enough(environment, major or 13):
        fixes.append(manual(f"and {remedies.update_driver(environment)}", needs="driver"))
    return fixes


def too_old(facts: Facts) -> GPUError | None:
    environment = facts.environment
    driver, provider = environment.driver, environment.provider
    major, supported = environment.cuda_major, driver.supported_cuda
    if major is None or supported is None or supported[0] >= major:
        return None
    if (other := _older(facts, major)) is not None:
        return other
    if driver.cuda_version is None and remedies.is_enough(environment, major):
        return None  # NVML answered through a libcuda.so.1 that only NVML found.
    what, update = "installed ONNX Runtime", remedies.update_driver(environment)
    fixes, present = [update], surroundings.visible_gpus(environment)
    is_plugin = facts.observed.cuda_is_plugin
    if environment.packages.onnxruntime.cuda_is_plugin if is_plugin is None else is_plugin:
        what = "CUDA plugin of ONNX Runtime"
        either = f"{update}; or else install this plugin for CUDA {supported[0]}, if you have it"
        fixes = [manual(either, needs="driver")]
    elif (
        supported[0] == FOR_CUDA_12.cuda_major
        and FOR_CUDA_12.why_not_for(environment.host) is None
        and all(FOR_CUDA_12.runs_on(environment.host, gpu.compute_capability) for gpu in present)
    ):
        either = f"{update}; or else, to keep the present driver:"
        fixes = [manual(either, needs="driver"), remedies.other_release(environment, FOR_CUDA_12)]
    evidence = [
        f"driver {driver.version or 'of unknown version'}",
        f"needed: {remedies.lowest_driver(environment, major) or 'a newer one'} or newer",
        f"provider: {provider.path if provider else ''}",
    ]
    summary = f"the NVIDIA driver supports CUDA up to {supported[0]}.{supported[1]}, the {what} needs CUDA {major}"
    return older_than_needed(facts, summary, evidence, fixes)


def older_than_needed(facts: Facts, summary: str, evidence: list[str], fixes: list[Fix]) -> errors.DriverTooOldError:
    driver, major = facts.environment.driver, facts.environment.cuda_major
    return errors.DriverTooOldError(
        summary,
        evidence=evidence,
        fixes=fixes,
        driver_version=driver.version,
        driver_cuda=driver.supported_cuda,
        needed_cuda=(major, 0) if major else None,
    )


def _older(facts: Facts, cuda_major: int) -> errors.DriverTooOldError | None:
    """Return the error for an old libcuda in this process although the driver itself is new enough."""
    driver = facts.environment.driver
    loaded, by_nvml = driver.cuda_version, driver.nvml.cuda_version
    if loaded is None or loaded[0] >= cuda_major:
        return None
    if by_nvml is not None and by_nvml[0] >= cuda_major:
        newer = f"this machine's driver up to {by_nvml[0]}.{by_nvml[1]}"
    elif remedies.is_enough(facts.environment, cuda_major):  # NVML may answer for the loaded libcuda, too.
        newer = f"this machine's driver, {driver.version}, is new enough for CUDA {cuda_major}"
    else:
        return None
    supports = f"the {_libcuda(facts.environment.host)} that is loaded supports CUDA up to {loaded[0]}.{loaded[1]}"
    summary = f"{supports}, {newer}, and the installed ONNX Runtime needs CUDA {cuda_major}"
    fixes = [off] if (off := drop_libcuda(facts)) is not None else _ways_to_the_drivers_own(facts)
    return older_than_needed(facts, summary, versions(facts), fixes)


def mismatched_libcuda(code: int, facts: Facts, evidence: list[str]) -> errors.DriverUnusableError | None:
    """Return the error for an incompatible libcuda: CUDA reports 803, or 804 if it takes the file for cuda-compat's."""
    driver = facts.environment.driver
    differs = None not in (driver.libcuda_version, driver.version) and driver.libcuda_version != driver.version
    if _is_compat(facts):
        unfit = "does not fit the driver in the kernel" if code == cuda_codes.MISMATCH else "this GPU does not support"
        what = f"a forward-compatibility libcuda (package cuda-compat) is loaded, which {unfit}"
    elif differs and facts.environment.host.container:
        what = "this container has loaded the libcuda.so.1 of another driver than its host's"
    elif differs:
        what = cuda_codes.UNUSABLE[cuda_codes.MISMATCH].what
    else:
        return None
    evidence, fixes = [*evidence, *versions(facts)], _ways_to_the_drivers_own(facts)
    return errors.DriverUnusableError(
        f"{what} ({cuda_codes.name_of(code)})", evidence=evidence, fixes=fixes, cuda_code=code
    )


def linux_driver_in_wsl(facts: Facts) -> errors.DriverUnusableError | None:
    """Check for a driver package inside WSL: it hides the driver of Windows, the only driver there (faults C15).

    The package names its file after a driver version. Windows brings libcuda.so.1.1 (NVIDIA/nvidia-container-toolkit
    issue 289).
    """
    environment, code = facts.environment, facts.observed.cuda_code or None
    if not environment.host.wsl:
        return None
    path, supported = environment.driver.libcuda or "", environment.driver.cuda_version
    major = environment.cuda_major
    too_old = major is not None and supported is not None and supported[0] < major
    is_of_linux = environment.driver.libcuda_version is not None and "/wsl/" not in path
    if not is_of_linux or not (code or too_old):
        return None
    remove = "or remove the packages of the driver for Linux (libnvidia-compute-*, nvidia-utils-*)"
    fixes = [remedies.prepend_library_path(remedies.WSL_DRIVER), manual(remove, needs="root")]
    fixes = _ways_to_the_drivers_own(facts) if environment.host.container else fixes
    evidence = [f"loaded: {path}", *([cuda_codes.returned_by_cuinit(code)] if code else [])]
    summary = "the loaded libcuda.so.1 is not WSL's: inside WSL only the driver of Windows works"
    return errors.DriverUnusableError(summary, evidence=evidence, fixes=fixes, cuda_code=code)


def drop_libcuda(facts: Facts) -> Fix | None:
    """Take the loaded libcuda out of LD_PRELOAD, or its folder out of LD_LIBRARY_PATH; None if both lack it."""
    environment, driver = facts.environment, facts.environment.driver
    if driver.libcuda_preload is not None:
        return remedies.drop_from_variable(environment, "LD_PRELOAD", driver.libcuda_preload)
    entry = driver.libcuda_entry
    return remedies.drop_from_variable(environment, "LD_LIBRARY_PATH", entry) if entry is not None else None


def _is_compat(facts: Facts) -> bool:
    return "compat" in PurePosixPath(facts.environment.driver.libcuda or "").parts


def versions(facts: Facts) -> list[str]:
    driver = facts.environment.driver
    library_version = f", of driver {driver.libcuda_version}" if driver.libcuda_version else ""
    loaded = [f"loaded: {driver.libcuda}{library_version}"] if driver.libcuda else []
    return [*loaded, f"driver {driver.version or 'of unknown version'}"]


def _ways_to_the_drivers_own(facts: Facts) -> list[Fix]:
    host, driver, major = facts.environment.host, facts.environment.driver, facts.environment.cuda_major
    if host.is_windows:
        return [manual(f"make Windows find the driver's nvcuda.dll (in System32) before {driver.libcuda}")]
    if _is_compat(facts):
        fixes = [drop_libcuda(facts) or cuda_codes.UNUSABLE[cuda_codes.COMPAT].fixes[0]]
        if major is not None and driver.version is not None and not remedies.is_enough(facts.environment, major):
            fixes.append(remedies.update_driver(facts.environment))
        return fixes
    if host.container:
        own = "remove the driver's packages (libnvidia-compute-*, libcuda1) from the image: the host's is brought in"
        again = "or restart the container, if the driver of its host was upgraded meanwhile"
        return [manual(own, needs="host"), manual(again, needs="host")]
    if numbers_of(driver.libcuda_version or "0") > numbers_of(driver.kernel_version or ""):
        return list(cuda_codes.UNUSABLE[cuda_codes.MISMATCH].fixes)  # The driver was upgraded, and not restarted.
    return [manual(f"make the loader find the driver's libcuda.so.1 before {driver.libcuda}", needs="root")]


# cuInit returns these codes if the kernel module is missing, or does not answer.
_VAGUE = frozenset({1, 3, 100, 101, 304, 801, 999})

_NOT_LOADED, _DIFFERS = 9, 18  # They are values of nvmlReturn_t in nvml.h, as the keys below are.

_IN_WSL = manual("update WSL (wsl --update) and the NVIDIA driver of Windows, then restart WSL", needs="host")

_SAID_BY_NVML: dict[int | None, cuda_codes.Meaning] = {
    _NOT_LOADED: cuda_codes.Meaning(
        "the NVIDIA kernel module is not loaded",
        (
            shell("sudo modprobe nvidia", needs="root"),
            manual(
                "if that fails, install the driver again. Usual causes (sudo dmesg | grep -i nvrm): an upgraded "
                "kernel, Secure Boot, nouveau, or a GPU older than the RTX 20 series with driver 590 or newer",
                needs="driver",
            ),
        ),
    ),
    15: cuda_codes.Meaning(  # The kernel logs Xid 79.
        "a GPU is lost: it does not answer on its bus any more",
        (
            manual("reboot; a GPU that is lost again has to be taken out of service", needs="reboot"),
            manual("or leave it out, by naming the others in CUDA_VISIBLE_DEVICES"),
        ),
    ),
    16: cuda_codes.Meaning(
        "the GPU has to be reset before it computes again",
        (shell("sudo nvidia-smi --gpu-reset", needs="root"), manual("or reboot", needs="reboot")),
    ),
    17: cuda_codes.Meaning(
        "the operating system refuses the GPU to this process", (_IN_WSL,)
    ),  # See microsoft/WSL issue 9962.
}


def not_ready(facts: Facts) -> errors.DriverUnusableError | None:
    """Explain a vague code of ``cuInit`` with the help of NVML."""
    environment, code = facts.environment, facts.observed.cuda_code
    nvml, host, driver = environment.driver.nvml, environment.host, environment.driver
    if code not in _VAGUE or surroundings.hides_everything(environment):
        return None
    evidence = [cuda_codes.returned_by_cuinit(code), f"NVML: {nvml.error}"]
    meaning = _SAID_BY_NVML.get(nvml.code)
    if nvml.code == _DIFFERS:
        if (error := mismatched_libcuda(code, facts, evidence)) is not None:
            return error
        meaning = cuda_codes.meaning_of(cuda_codes.MISMATCH, host.is_windows)
    elif nvml.code == _NOT_LOADED and (driver.version is not None or driver.is_tegra):
        return None
    elif nvml.code == _NOT_LOADED and host.wsl and not host.container:  # See microsoft/WSL issue 9134.
        advice = surroundings.wsl_advice(environment) or _IN_WSL
        meaning = cuda_codes.Meaning("WSL does not reach the NVIDIA driver of Windows", (advice,))
    if meaning is None:
        return None
    what = "the NVIDIA driver is not loaded" if nvml.code == _NOT_LOADED and host.is_windows else meaning.what
    fixes = [cuda_codes.RESTART_WINDOWS] if host.is_windows else remedies.move_to_host(environment, meaning.fixes)
    return errors.DriverUnusableError(
        f"{what} ({cuda_codes.name_of(code)})", evidence=evidence, fixes=fixes, cuda_code=code
    )


_UVM = "/dev/nvidia-uvm"


def device_files_closed(facts: Facts) -> GPUError | None:
    """Check that this process can open the device files; without them CUDA sees no GPU, or gives no reason."""
    environment, code = facts.environment, facts.observed.cuda_code
    driver, is_container = environment.driver, environment.host.container is not None
    if driver.libcuda is None or code == 0:
        return None
    needed = []
    if driver.refused_nodes:
        refused = {node.path: node for node in driver.refused_nodes}
        gpus = [path for path in driver.device_nodes if re.fullmatch(r"/dev/nvidia\d+", path)]
        needed = [refused[path] for path in ("/dev/nvidiactl", _UVM, TEGRA_MEMORY) if path in refused]
        if gpus and all(path in refused for path in gpus):  # A job may have only some of the GPUs on purpose.
            needed += [refused[path] for path in gpus]
    has_own = "/dev/nvidiactl" in driver.device_nodes and _UVM not in driver.device_nodes
    # Outside containers cuInit creates the file, through nvidia-modprobe. Its absence means nothing before that call.
    is_final = (code is not None or is_container) and not environment.host.wsl and not driver.is_tegra
    if needed:
        summary = f"this process may not open {', '.join(node.path for node in needed)}"
        evidence = [f"{node.path}: {node.error}, group {node.group or 'unknown'}" for node in needed]
        fixes = _ways_to_access(environment, needed)
    elif has_own and is_final:
        summary = f"the device file {_UVM}, which CUDA needs, is missing"
        evidence = [f"device files: {', '.join(driver.device_nodes)}"]
        in_container = f"start the container with {_UVM} too: {surroundings.how(environment)}"
        create_file = shell("sudo nvidia-modprobe -u -c=0", needs="root")
        fixes = [manual(in_container, needs="host") if is_container else create_file]
    else:
        return None
    return errors.DriverUnusableError(summary, evidence=evidence, fixes=fixes, cuda_code=code)


def _ways_to_access(environment: Environment, nodes: list[RefusedNode]) -> list[Fix]:
    groups = sorted({node.group for node in nodes if node.group is not None} - {"root"})
    if any(node.error == "EPERM" for node in nodes):  # See NVIDIA/nvidia-container-toolkit issue 48.
        lost = "restart this container or job with its GPU: it lost it while it ran, as after `systemctl daemon-reload`"
        service = "in a systemd service with a DevicePolicy: DeviceAllow=char-nvidia* rw"
        return [manual(lost, needs="host"), manual(service, needs="root")]
    if not any(node.by_mode for node in nodes):
        label = "SELinux or another policy refuses them: change that policy (docker run --security-opt label=disable)"
        return [manual(label, needs="host" if environment.host.container is not None else "root")]
    if groups and environment.host.container is not None:  # Its own /etc/group has no effect on device files.
        options = " ".join(f"--group-add {name}" for name in groups)
        start = f"start this container with these groups: docker run {options} ..., or supplementalGroups of its pod"
        return [manual(start, needs="host")]
    if groups:
        return [manual(f"make this user a member of {' and '.join(groups)}, and log in again", needs="root")]
    let_it = "let this user read and write these files, as nvidia-modprobe does"
    return remedies.move_to_host(environment, [manual(let_it, needs="root")])


# The driver opens its devices some 30 times for a first session. The rest is a margin.
_DESCRIPTORS_NEEDED = 48


def descriptors_exhausted(facts: Facts) -> errors.DriverUnusableError | None:
    code = facts.observed.cuda_code
    if not code or surroundings.hides_everything(facts.environment):
        return None
    return too_few_descriptors(code, facts, [cuda_codes.returned_by_cuinit(code)])


def too_few_descriptors(code: int | None, facts: Facts, evidence: list[str]) -> errors.DriverUnusableError | None:
    """Return the error if few descriptors are left. ``code``: the result of the failed CUDA call; None: unknown.

    With fewer than 30 left, driver 580 on an H100 returned 304, 999, 100 and, from a context, 46. The code depends on
    the number.
    """
    files = facts.environment.host.open_files
    if files is None or files.limit - files.used >= _DESCRIPTORS_NEEDED:
        return None
    fixes: list[Fix] = []
    higher = min(files.hard_limit, max(65_536, 2 * files.limit))
    if higher >= files.used + _DESCRIPTORS_NEEDED:
        may = f"({higher}, resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
        fixes.append(python(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {may})"))
    limit = "raise the limit of this process (ulimit -n, docker run --ulimit nofile=65536), or close unneeded files"
    first = "at the start of the program, or " if fixes else ""
    fixes.append(manual(f"{first}{limit}; then restart it, since the driver does not try again", needs="host"))
    summary = f"this process may open {files.limit} files and has {files.used} open: too few are left for CUDA"
    return errors.DriverUnusableError(summary, evidence=evidence, fixes=fixes, cuda_code=code)
