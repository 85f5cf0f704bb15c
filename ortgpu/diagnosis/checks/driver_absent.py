"""Is there a driver, and where is it if the loader does not find it?"""

from __future__ import annotations

import os
import re
import shlex

from ...environment.gpu.driver import Driver
from ...environment.gpu.driver_places import UnlinkedFile
from ...errors import DriverNotFoundError, Fix, GPUError, manual, on_linux, shell
from ..facts import Facts
from ..messages import loader_words
from ..remedies import system as system_remedies
from . import surroundings
from .visible import given_to_container


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
        fixes=[system_remedies.update_driver(facts.environment)],
    )


def _said_by_nvml(driver: Driver) -> list[str]:
    if driver.nvml.available:
        return [f"NVML works and sees {len(driver.nvml.gpus)} GPU(s): nvidia-smi does not show this fault"]
    return [f"NVML: {driver.nvml.error}"] if driver.nvml.error else []


def _ways_to_a_driver(facts: Facts) -> list[Fix]:
    environment = facts.environment
    major = environment.cuda_major
    if environment.driver.libcuda_elsewhere:  # huggingface/text-generation-inference issue 291
        return [system_remedies.look_first_in(os.path.dirname(environment.driver.libcuda_elsewhere[0]))]
    if environment.driver.libcuda_unlinked:
        return _ways_to_its_link(facts, environment.driver.libcuda_unlinked[0])
    if loader_words.cannot_be_mapped(environment.driver.libcuda_error or ""):
        return [system_remedies.let_it_be_mapped(environment, "libcuda.so.1")]
    if (none_given := surroundings.of_wsl(environment)) is not None:
        return [none_given]
    if environment.host.wsl and not environment.host.container:
        return [
            system_remedies.look_first_in(system_remedies.WSL_DRIVER),
            on_linux("the driver of WSL is the one of Windows: install it there, and none inside WSL", needs="driver"),
        ]
    fixes = []
    if not environment.host.container:
        fixes.append(_rest_of_the_driver(facts) or system_remedies.update_driver(environment))
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
    if environment.host.container and not system_remedies.is_enough(environment.driver.version, major or 13):
        fixes.append(manual(f"and {system_remedies.update_driver(environment)}", needs="driver"))
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
            on_linux(
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
    if major is None or not system_remedies.is_enough(version, major):
        return None
    return manual(
        f"install the part of driver {version} that has libcuda.so.1, in that version (Ubuntu: libnvidia-compute-*, "
        "Debian: libcuda1, Fedora: xorg-x11-drv-nvidia-cuda-libs, openSUSE: nvidia-compute-*, Arch: nvidia-utils)",
        needs="driver",
    )
