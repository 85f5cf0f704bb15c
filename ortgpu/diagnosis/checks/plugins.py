"""Judge CUDA as a plugin of ONNX Runtime: the package that brings it, and what came of registering it."""

from __future__ import annotations

import os

from ...environment.packages.plugins import CUDA, PluginPackage
from ...errors import (
    BrokenPackageError,
    CPUOnlyPackageError,
    Fix,
    GPUError,
    LibraryVersionError,
    NoDeviceError,
    manual,
)
from ..facts import Facts
from ..remedies import fixes as remedies
from .packages import replace_build

_REGISTER = (
    "import onnxruntime, {module} as plugin; "
    "onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())"
)


def incomplete(facts: Facts) -> GPUError | None:
    """Check that a package of a CUDA plugin has the provider's library: a warning if CUDA comes another way.

    A meta-package has none, nor a module, and requires one that has.
    """
    installed = facts.environment.packages.onnxruntime
    whole = any(one.library for one in installed.plugins)
    lacking = (one for one in installed.plugins if one.is_for_cuda and one.library is None)
    empty = next((one for one in lacking if one.folder is not None or not whole), None)
    if empty is None:
        return None
    where = f"expected in {empty.folder}" if empty.folder is not None else f"its module is not in {empty.location}"
    return BrokenPackageError(
        f"the plugin package {empty} has no CUDA provider library",
        evidence=[where],
        fixes=[manual(f"install {empty.name} again, from where it came")],
        severity="warning" if installed.arrival is not None else "fatal",
        package=empty.name,
    )


def of_another_release(facts: Facts) -> GPUError | None:
    """Check that a plugin that uses internals of ONNX Runtime belongs to the installed release."""
    environment = facts.environment
    installed, wanted = environment.packages.onnxruntime, environment.release_wanted
    arrival, name = installed.arrival, installed.build_name or "onnxruntime"
    if arrival is None or wanted is None or facts.observed.plugin_problem == "no device":
        return None
    bundled = arrival.way == "bundled plugin"
    fitting = f"{name}=={installed.version if bundled else wanted}"
    reinstall = remedies.reinstall_onnxruntime(environment, requirement=fitting)
    return LibraryVersionError(
        f"the CUDA plugin belongs to ONNX Runtime {wanted}, and {name} {installed.version} is installed: "
        "it would end this process",
        evidence=[f"plugin: {arrival.library}", "it calls Provider_GetHost, which differs between releases"],
        fixes=[reinstall if bundled else remedies.install(environment, [fitting])],
        needed=(f"{name} {wanted}",),
    )


def of_no_plugin(facts: Facts) -> GPUError | None:
    """Check that the file is a plugin: a provider of a release before 1.23 is none."""
    text = facts.observed.provider_error or ""
    if "CreateEpFactories" not in text:
        return None
    return LibraryVersionError(
        "the file of the CUDA plugin is none that ONNX Runtime can register: it lacks CreateEpFactories",
        evidence=[text, "providers have that function from release 1.23 on"],
        fixes=replace_build(facts),
        needed=("CreateEpFactories",),
    )


def without_device(facts: Facts) -> GPUError | None:
    """Check that a registered plugin lists a GPU: ONNX Runtime finds devices by files of the system, not by CUDA."""
    if facts.observed.plugin_problem != "no device":
        return None
    where, ways = "in /sys/class/drm and /sys/bus/pci/devices", ["or start this container with /sys of its host"]
    if facts.environment.host.is_windows:
        where, ways = "among the devices of Windows", []
    return NoDeviceError(
        "the CUDA plugin is registered, and lists no GPU",
        evidence=[f"ONNX Runtime looks for GPUs {where}, and sees none"],
        fixes=[*replace_build(facts), *map(manual, ways)],
    )


def unregistered(facts: Facts) -> GPUError | None:
    """Check that a session of others has the plugin: the guard judges sessions and registers nothing."""
    installed = facts.environment.packages.onnxruntime
    if facts.observed.plugin_problem != "not registered" or installed.arrival is None:
        return None
    package = installed.arrival.package
    if installed.arrival.way == "bundled plugin":
        return CPUOnlyPackageError(
            f"the CUDA plugin of {installed.build_name} {installed.version} was not registered when it was imported",
            evidence=[
                f"plugin: {installed.arrival.library}",
                "ONNX Runtime does that only if its libraries are loaded",
            ],
            fixes=[Fix("import ortgpu; ortgpu.preload(); import onnxruntime", kind="python")],
            package=installed.build_name,
            version=installed.version,
        )
    return CPUOnlyPackageError(
        f"{package or 'a CUDA plugin'} is installed, and this program has not registered it",
        evidence=[f"plugin: {installed.arrival.library}", f"{installed.build_name} {installed.version} has no CUDA"],
        fixes=[_registration(package, installed.arrival.library)],
        package=installed.build_name,
        version=installed.version,
    )


def unknown_to_release(facts: Facts) -> GPUError | None:
    """Check that this release of ONNX Runtime takes plugins."""
    installed = facts.environment.packages.onnxruntime
    if facts.observed.plugin_problem != "no plugins":
        return None
    return CPUOnlyPackageError(
        f"{installed.build_name or 'onnxruntime'} {installed.version} has no CUDA, and takes no plugins",
        evidence=["register_execution_provider_library came with release 1.23"],
        fixes=replace_build(facts),
        package=installed.build_name,
        version=installed.version,
    )


def _registration(package: PluginPackage | None, library: str) -> Fix:
    if package is None:
        code = f"import onnxruntime; onnxruntime.register_execution_provider_library({CUDA!r}, {library!r})"
    else:
        code = _REGISTER.format(module=os.path.basename(package.folder or ""))
    return Fix(f"import ortgpu; ortgpu.preload(); {code}", kind="python")
