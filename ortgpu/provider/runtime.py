"""ONNX Runtime in this process: import it once, and open its provider once with all libraries that it needs.

What a process needs only once a session is made is imported then: meanwhile the driver is being initialised.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from ..environment.gpu.driver import load_libcuda
from ..environment.libraries.library_file import read_elf, read_library, this_machine, wrong_machine
from ..environment.libraries.loader import loaded_plugin
from ..environment.libraries.loader_words import blames_numpy
from ..environment.libraries.wheel import cuda_major_of, release_wanted, uses_internals
from ..environment.packages.installed import Packages, locate_packages
from ..environment.packages.interpreter import IN_SUB_INTERPRETER, is_sub_interpreter
from ..environment.packages.plugins import CUDA, Arrival, registered_library
from ..model.files import stamp_of
from ..process.background import fork_safe_lock, this_thread
from ..process.late import late
from ..process.untranslated import untranslated
from .preloading import load, plan, why_another_answers, why_provider_does_not_load

if TYPE_CHECKING:
    from onnxruntime.capi import onnxruntime_pybind11_state as extension

    from .preloading import Plan, PreloadReport
else:
    extension = late("onnxruntime.capi.onnxruntime_pybind11_state")

logger = logging.getLogger("ortgpu")

PluginProblem = Literal["newer CUDA", "another release", "no plugins", "not registered", "no device"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """The state of ONNX Runtime in this process.

    ``module`` None: the import failed with ``import_error``, or gave a module without InferenceSession.
    ``preload`` None: no session was asked for yet, so no library was loaded.
    """

    packages: Packages
    module: ModuleType | None
    import_error: str | None
    preload: PreloadReport | None = None
    found: Plan | None = None  # what the report was made from
    provider_opened: bool = False
    lazily_opened: frozenset[str] = frozenset()  # stems of what the provider opens at need and this process has loaded
    provider_error: str | None = None  # the loader's words about the provider file, all its libraries being there
    plugin_problem: PluginProblem | None = None  # why the provider file, as a plugin, is of no use to this process
    provider_stamp: tuple[int, ...] | None = None  # by which another file in its place is known
    numpy_error: str | None = None  # what NumPy said, where the import failed for it and does not say why

    @property
    def provider_library(self) -> str | None:
        return self.packages.onnxruntime.provider_library

    @property
    def available_providers(self) -> tuple[str, ...] | None:
        try:
            names = tuple(self.module.get_available_providers()) if self.module is not None else None
        except AttributeError:
            return None
        brings = self.cuda_is_plugin  # and lists CUDA once it is registered
        return (*names, CUDA) if names is not None and brings and CUDA not in names else names

    @property
    def cuda_is_plugin(self) -> bool:
        return self.packages.onnxruntime.cuda_is_plugin

    @property
    def arrival(self) -> Arrival | None:
        return self.packages.onnxruntime.arrival

    @property
    def release(self) -> tuple[int, ...]:
        """The first two numbers of the release; empty if there is no module."""
        if self.module is None:
            return ()
        return tuple(int(part) for part in self.module.__version__.split(".")[:2])

    @property
    def has_collective_ops(self) -> bool | None:
        """True if this build has the operators that work between processes; None if there is no module to ask."""
        if self.module is None:
            return None
        ask = getattr(extension, "has_collective_ops", None)
        return ask is not None and bool(ask())


_runtime: Runtime | None = None
_lock = fork_safe_lock()


def load_runtime() -> Runtime:
    """Import ONNX Runtime. A success is kept; after a failure the next call tries again.

    No CUDA library is loaded for it, except where the extension module itself links some (1.27.0 does).
    """
    global _runtime
    with this_thread.holds, _lock:
        if _runtime is None or _runtime.module is None or _runtime.provider_library is None:
            _runtime = _load()
        elif registered_library() not in (None, _runtime.provider_library):  # since the packages were read
            _runtime = dataclasses.replace(_runtime, packages=locate_packages(), provider_opened=False)
        return _runtime


def look_again() -> Runtime:
    """Return :func:`load_runtime`, with the packages read again if the unopened provider was replaced."""
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        if runtime.provider_stamp != stamp_of(runtime.provider_library):
            packages = locate_packages()
            _runtime = runtime = dataclasses.replace(
                runtime, packages=packages, provider_stamp=stamp_of(packages.onnxruntime.provider_library)
            )
        return runtime


def _load() -> Runtime:
    packages = locate_packages()
    if "onnxruntime" not in sys.modules and is_sub_interpreter():  # its extension waits for a lock for ever
        return Runtime(packages, None, IN_SUB_INTERPRETER)
    damage, preload = _load_what_the_module_links(packages)
    if damage is not None:
        return Runtime(packages, None, damage)
    module, error = _import()
    return Runtime(
        packages,
        module,
        error,
        preload,
        numpy_error=_why_numpy_fails() if error and blames_numpy(error) else None,
        provider_stamp=stamp_of(packages.onnxruntime.provider_library),
    )


def prepare_import() -> None:
    """Prepare an import of ONNX Runtime by another module. Raises ImportError for a file that would kill it."""
    damage, _ = _load_what_the_module_links(locate_packages())
    if damage is not None:
        raise ImportError(damage)


def _load_what_the_module_links(packages: Packages) -> tuple[str | None, PreloadReport | None]:
    """Return the damage of a file, and the report of a preload where the import itself needs CUDA's libraries."""
    installed = packages.onnxruntime
    if sys.platform != "linux" or installed.provider_library is None:
        return None, None
    paths = (installed.extension, installed.bridge)
    native = [read_elf(path) for path in paths if path and os.path.exists(path)]
    here = this_machine()
    problems = (f"{file.path}: {why}" for file in native if (why := file.problem or wrong_machine(file.machine, here)))
    damage = next(problems, None)
    if damage is not None:
        return damage, None
    bundled = installed.arrival is not None and installed.arrival.way == "bundled plugin"
    if not bundled and not any(soname.startswith("libcu") for file in native for soname in file.needed):
        return None, None
    return None, load(plan(packages), lazily_opened=frozenset())


def open_provider(*, register: bool = True) -> Runtime:
    """Load what the provider links, then the provider: once per process. ``register`` False: register no plugin."""
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        if runtime.provider_opened:
            return runtime
        found = plan(runtime.packages, thorough=False)
        report = load(found, lazily_opened=frozenset())
        if not report.ok:
            # Once more, with everything that could serve and everything that was passed over.
            found = plan(runtime.packages)
            report = load(found, lazily_opened=frozenset())
        error: str | None = None
        problem: PluginProblem | None = None
        opened = report.ok and report.provider is not None and not report.driver_missing
        if opened and report.provider is not None:
            if runtime.cuda_is_plugin:
                problem, error = why_plugin_is_of_no_use(runtime, register=register)
            else:
                error = why_provider_does_not_load(report.provider)
            opened = error is None and problem is None
        _runtime = dataclasses.replace(
            runtime,
            preload=report,
            found=found,
            provider_error=error,
            plugin_problem=problem,
            provider_opened=opened,
        )
        return _runtime


def why_plugin_is_of_no_use(runtime: Runtime, *, register: bool = True) -> tuple[PluginProblem | None, str | None]:
    """Register the plugin under ONNX Runtime's own name for it. Return what is wrong with it, and ONNX Runtime's words.

    It is never unregistered: sessions of others may use it by then.
    """
    path = runtime.provider_library or ""
    if _is_for_newer_cuda(path):  # its first call of CUDA fails, which may end the process
        return "newer CUDA", None
    loose = runtime.arrival is not None and runtime.arrival.way == "registered by the program"
    if loose and registered_library() is None and path == loaded_plugin():
        return "no device", None  # nor is it registered here: it may be another ONNX Runtime's
    if release_wanted(path, str(getattr(runtime.module, "__version__", ""))) is not None:
        return "another release", None
    if registered_library() is not None:
        return None, None
    function = getattr(runtime.module, "register_execution_provider_library", None)
    if function is None:
        return "no plugins", None
    if not register:  # a file that is loaded was registered, and lists no device
        return ("no device" if loaded_plugin() is not None else "not registered"), None
    bridge = runtime.packages.onnxruntime.bridge
    if bridge is not None and uses_internals(path) and (conflict := why_another_answers(bridge)) is not None:
        return None, conflict
    try:
        function(CUDA, path)
    except Exception as error:  # noqa: BLE001 - of classes that differ between releases
        if "already registered" not in str(error):  # and lists no device
            return None, str(error).rpartition(" with error: ")[2]
    return (None if registered_library() is not None else "no device"), None


def _is_for_newer_cuda(path: str) -> bool:
    *_, supported = load_libcuda()
    wanted = cuda_major_of(read_library(path).needed)
    return supported is not None and wanted is not None and supported[0] < wanted


def load_lazily_opened(stems: frozenset[str]) -> Runtime:
    """Load what the provider or cuDNN open at need: once per process, and only for models that will need it.

    Opened by path, here, all parts come from one place. At the first run, where plain ONNX Runtime has them opened,
    the loader's own search decides; the time is the same.
    """
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        wanted = runtime.lazily_opened | stems
        if runtime.found is not None and runtime.preload is not None and wanted != runtime.lazily_opened:
            later = load(runtime.found, lazily_opened=wanted)
            known = {library.soname for library in runtime.preload.libraries}  # whose origins it knows
            new = (library for library in later.libraries if library.soname not in known)
            report = dataclasses.replace(later, libraries=(*runtime.preload.libraries, *new))
            _runtime = runtime = dataclasses.replace(runtime, preload=report, lazily_opened=wanted)
        return runtime


def _import() -> tuple[ModuleType | None, str | None]:
    try:
        with untranslated():
            module = importlib.import_module("onnxruntime")
            if not hasattr(importlib.import_module("numpy"), "ndarray"):  # a second import succeeds without it
                raise ImportError("import numpy failed: its folder has no file __init__.py")
    except Exception as error:
        logger.debug("import onnxruntime failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}".removesuffix(": ")
    if not isinstance(getattr(module, "__spec__", None), ModuleSpec):  # no finder of Python made it: a mock, say
        return None, "TypeError: this program put what is not ONNX Runtime into sys.modules['onnxruntime']"
    return (module if hasattr(module, "InferenceSession") else None), None


def _why_numpy_fails() -> str | None:
    """Return why NumPy cannot be imported: ONNX Runtime raises only "import numpy failed"."""
    try:
        with untranslated():
            importlib.import_module("numpy")
    except Exception as error:  # noqa: BLE001 - NumPy and its imports may raise anything
        cause: BaseException = error
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            cause = earlier
        return f"{type(cause).__name__}: {cause}"
    return None
