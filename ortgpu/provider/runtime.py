"""ONNX Runtime in this process: import it once, and open its provider once with all libraries that it needs.

Modules that only a session needs are imported when a session is made, while the driver initialises.
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
from ..environment.libraries.library_file import read_library, this_machine, wrong_machine
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
    ``preload`` None: nobody has requested a session yet, so no library was loaded.
    """

    packages: Packages
    module: ModuleType | None
    import_error: str | None
    preload: PreloadReport | None = None
    found: Plan | None = None  # the source of the report
    provider_opened: bool = False
    lazily_opened: frozenset[str] = frozenset()  # stems of loaded libraries that the provider opens on demand
    provider_error: str | None = None  # the loader's message about the provider file; its libraries are there
    plugin_problem: PluginProblem | None = None  # why this process cannot use the plugin
    provider_stamp: tuple[int, ...] | None = None  # changes when the provider file is replaced
    numpy_error: str | None = None  # NumPy's own error, if NumPy made the import fail

    @property
    def provider_library(self) -> str | None:
        return self.packages.onnxruntime.provider_library

    @property
    def available_providers(self) -> tuple[str, ...] | None:
        try:
            names = tuple(self.module.get_available_providers()) if self.module is not None else None
        except AttributeError:
            return None
        brings = self.cuda_is_plugin  # A plugin is listed only after registration.
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
        """True if this build has the operators that work between processes; None if there is no module."""
        if self.module is None:
            return None
        ask = getattr(extension, "has_collective_ops", None)
        return ask is not None and bool(ask())


_runtime: Runtime | None = None
_has_session = False  # True once a session has opened on CUDA. From then on ONNX Runtime keeps its provider.
_lock = fork_safe_lock()


def load_runtime() -> Runtime:
    """Import ONNX Runtime. A success is kept; after a failure the next call tries again.

    The import loads no CUDA library, unless the extension module itself links some (as in 1.27.0).
    """
    global _runtime
    with this_thread.holds, _lock:
        if _runtime is None or _runtime.module is None or _runtime.provider_library is None:
            _runtime = _load()
        elif registered_library() not in (None, _runtime.provider_library):  # registered after the packages were read
            _runtime = dataclasses.replace(_runtime, packages=locate_packages(), provider_opened=False)
        return _runtime


def look_again() -> Runtime:
    """Return :func:`load_runtime`, with the packages read again if the provider was replaced before any session opened.

    A loaded provider is not enough: after a failed session, ONNX Runtime may open the new file beside it and crash.
    """
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        if not _has_session and runtime.provider_stamp != stamp_of(runtime.provider_library):
            packages = locate_packages()
            _runtime = runtime = dataclasses.replace(
                runtime, packages=packages, provider_stamp=stamp_of(packages.onnxruntime.provider_library)
            )
        return runtime


def note_session() -> None:
    """Note that a session has opened on CUDA: a replaced package does not matter to this process any more."""
    global _has_session
    _has_session = True


def _load() -> Runtime:
    packages = locate_packages()
    if "onnxruntime" not in sys.modules and is_sub_interpreter():  # Its extension would wait for a lock for ever.
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
    """Prepare an import of ONNX Runtime by another module. Raises ImportError if a file would kill the process."""
    damage, _ = _load_what_the_module_links(locate_packages())
    if damage is not None:
        raise ImportError(damage)


def _load_what_the_module_links(packages: Packages) -> tuple[str | None, PreloadReport | None]:
    """Return the damage of a file, and the report of a preload if the import itself needs CUDA's libraries."""
    installed = packages.onnxruntime
    if sys.platform != "linux" or installed.provider_library is None:
        return None, None
    paths = (installed.extension, installed.bridge)
    native = [read_library(path) for path in paths if path and os.path.exists(path)]
    host = this_machine()
    for file in native:
        if (why := file.problem or wrong_machine(file.machine, host)) is not None:
            return f"{file.path}: {why}", None
    bundled = installed.arrival is not None and installed.arrival.way == "bundled plugin"
    if not bundled and not any(soname.startswith("libcu") for file in native for soname in file.needed):
        return None, None
    return None, load(plan(packages), lazily_opened=frozenset())


def open_provider(*, register: bool = True) -> Runtime:
    """Load the provider's libraries, then the provider, once per process. ``register`` False: register no plugin."""
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        if runtime.provider_opened:
            return runtime
        library_plan = plan(runtime.packages, thorough=False)
        report = load(library_plan, lazily_opened=frozenset())
        if not report.ok and all(library.candidates for library in library_plan.resolutions if library.required):
            # The search may have ended early, with files that do not load. This one finds every file.
            library_plan = plan(runtime.packages)
            report = load(library_plan, lazily_opened=frozenset())
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
            found=library_plan,
            provider_error=error,
            plugin_problem=problem,
            provider_opened=opened,
        )
        return _runtime


def why_plugin_is_of_no_use(runtime: Runtime, *, register: bool = True) -> tuple[PluginProblem | None, str | None]:
    """Register the plugin under ONNX Runtime's own name for it. Return its problem and ONNX Runtime's message.

    The plugin is never unregistered: sessions of others may use it by then.
    """
    path = runtime.provider_library or ""
    *_, supported = load_libcuda()
    cuda_major = cuda_major_of(read_library(path).needed)
    if supported is not None and cuda_major is not None and supported[0] < cuda_major:
        return "newer CUDA", None  # Its first call of CUDA would fail and may end the process.
    loose = runtime.arrival is not None and runtime.arrival.way == "registered by the program"
    if loose and registered_library() is None and path == loaded_plugin():
        return "no device", None  # The file may be another ONNX Runtime's, so it is not registered.
    if release_wanted(path, str(getattr(runtime.module, "__version__", ""))) is not None:
        return "another release", None
    if registered_library() is not None:
        return None, None
    function = getattr(runtime.module, "register_execution_provider_library", None)
    if function is None:
        return "no plugins", None
    if not register:  # A loaded file was registered, and lists no device.
        return ("no device" if loaded_plugin() is not None else "not registered"), None
    bridge = runtime.packages.onnxruntime.bridge
    if bridge is not None and uses_internals(path) and (conflict := why_another_answers(bridge)) is not None:
        return None, conflict
    try:
        function(CUDA, path)
    except Exception as error:  # noqa: BLE001 - the classes differ between releases
        if "already registered" not in str(error):  # A registered plugin lists no device.
            return None, str(error).rpartition(" with error: ")[2]
    return (None if registered_library() is not None else "no device"), None


def load_lazily_opened(stems: frozenset[str]) -> Runtime:
    """Load libraries that the provider or cuDNN open on demand: once per process, and only for models that need them.

    All parts come from one folder, since this opens them by path. Plain ONNX Runtime has them opened at the first run,
    and the loader's own search decides; the time is the same.
    """
    global _runtime
    with this_thread.holds, _lock:
        runtime = load_runtime()
        all_stems = runtime.lazily_opened | stems
        if runtime.found is not None and runtime.preload is not None and all_stems != runtime.lazily_opened:
            later = load(runtime.found, lazily_opened=all_stems)
            sonames = {library.soname for library in runtime.preload.libraries}  # Their origins are known.
            new = (library for library in later.libraries if library.soname not in sonames)
            report = dataclasses.replace(later, libraries=(*runtime.preload.libraries, *new))
            _runtime = runtime = dataclasses.replace(runtime, preload=report, lazily_opened=all_stems)
        return runtime


def _import() -> tuple[ModuleType | None, str | None]:
    try:
        with untranslated():
            module = importlib.import_module("onnxruntime")
            if not hasattr(importlib.import_module("numpy"), "ndarray"):  # A second import succeeds without it.
                raise ImportError("import numpy failed: its folder has no file __init__.py")
    except Exception as error:
        logger.debug("import onnxruntime failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}".removesuffix(": ")
    # A module without a spec comes from no finder of Python; it may be a mock.
    if not isinstance(getattr(module, "__spec__", None), ModuleSpec):
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
