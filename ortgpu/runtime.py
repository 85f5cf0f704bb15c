"""ONNX Runtime in this process: imported once, with the libraries that its provider needs already loaded."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from .environment.cuda import CudaState
from .environment.elf import read_elf
from .environment.packages import read_packages
from .environment.wheel import bridge_of
from .errors import GPUError, OnnxRuntimeNotInstalledError, ProviderFallbackError
from .preloading import Plan, PreloadReport, load, plan, why_provider_does_not_load

logger = logging.getLogger("ortgpu")


@dataclass(frozen=True, slots=True)
class Runtime:
    """What importing gave. ``module`` None: the import failed with ``import_error``, or has no InferenceSession."""

    module: ModuleType | None
    import_error: str | None
    preload: PreloadReport
    found: Plan | None = None  # what the report was made from
    lazily_opened: bool = False  # whether what the provider opens at need is loaded too

    @property
    def available_providers(self) -> tuple[str, ...] | None:
        try:
            return tuple(self.module.get_available_providers()) if self.module is not None else None
        except AttributeError:
            return None


_runtime: Runtime | None = None
_lock = threading.RLock()


def load_runtime() -> Runtime:
    """Import ONNX Runtime and load the CUDA libraries. A success is kept; after a failure the next call tries again.

    The libraries that the provider links are loaded while the import runs, unless the extension module links them
    itself (1.27.0 does) and has to find them in the process. No thread outlives the call.
    """
    global _runtime
    with _lock:
        if _runtime is not None and _runtime.module is not None and _runtime.preload.ok:
            return _runtime
        _runtime = _load()
        return _runtime


def _load() -> Runtime:
    packages = read_packages(compare_files=False)
    found = plan(packages)
    if isinstance(found, PreloadReport):
        return Runtime(*_import(), found)
    extension = packages.onnxruntime.extension
    native = [read_elf(path) for path in (extension, bridge_of(found.provider.path)) if path and os.path.exists(path)]
    damaged = next((file for file in native if file.problem is not None), None)
    if damaged is not None:  # opening it would kill the process
        return Runtime(
            None, f"{damaged.path}: {damaged.problem}", PreloadReport(found.provider, (), (), (), False, None)
        )
    if any(soname.startswith("libcu") for file in native for soname in file.needed):
        report = load(found, lazily_opened=False)
        return Runtime(*_import(), report, found)
    # The thread does nothing but open libraries, which needs no interpreter lock: the import goes on beside it.
    opening = _Task(lambda: load(found, lazily_opened=False), "ortgpu-preload")
    try:
        module, error = _import()
    finally:
        report = opening.result()
    return Runtime(module, error, report, found)


class _Task:
    """A function in a thread, with its result or exception."""

    def __init__(self, function: Callable[[], PreloadReport], name: str) -> None:
        self._function = function
        self._outcome: PreloadReport | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._outcome = error

    def result(self) -> PreloadReport:
        self._thread.join()
        if isinstance(self._outcome, PreloadReport):
            return self._outcome
        raise self._outcome or RuntimeError("the loading thread ended without a result")


class LazilyOpened:
    """Opens what the provider opens at need (cuDNN's parts, cuFFT and what they open) while a session is being made.

    Once per process, in a thread that :meth:`finish` waits for.
    """

    def __init__(self, runtime: Runtime) -> None:
        found = runtime.found
        self._task = None
        if found is not None and not runtime.lazily_opened:
            self._task = _Task(lambda: load(found), "ortgpu-preload")

    def finish(self) -> Runtime:
        global _runtime
        report = self._task.result() if self._task is not None else None
        with _lock:
            if report is not None and _runtime is not None:
                _runtime = dataclasses.replace(_runtime, preload=report, lazily_opened=True)
            return _runtime or load_runtime()


def _import() -> tuple[ModuleType | None, str | None]:
    try:
        module = importlib.import_module("onnxruntime")
    except (
        Exception
    ) as error:  # anything: a broken package raises ImportError, AttributeError, SyntaxError, OSError ...
        logger.debug("import onnxruntime failed", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
    return (module, None) if hasattr(module, "InferenceSession") else (None, None)


def why_unusable(
    runtime: Runtime,
    *,
    device: object = None,
    cuda: CudaState | None = None,
    cause: BaseException | None = None,
    cudnn_operators: tuple[str, ...] = (),
    cufft_operators: tuple[str, ...] = (),
    cudnn_disabled: bool = False,
    cuda_not_bound: bool = False,
) -> GPUError | None:
    """The full diagnosis of a failure: the most likely error, with what else is wrong attached.

    None when neither the environment nor the words of ``cause`` say anything about the GPU; without a ``cause`` there
    is always an error, at the last a :class:`ProviderFallbackError`.
    """
    from .devices import DeviceRequest
    from .diagnosis import Facts, Observed, Request, find_problems
    from .diagnosis.messages import of_construction
    from .environment.inspection import inspect_environment

    provider = runtime.preload.provider
    requested: DeviceRequest = device if isinstance(device, (int, str)) else None
    facts = Facts(
        inspect_environment(),
        Request(requested, cudnn_operators, cufft_operators, cudnn_disabled),
        Observed(
            runtime.import_error,
            None if runtime.import_error else runtime.module is not None,
            runtime.available_providers,
            runtime.preload,
            why_provider_does_not_load(provider) if cuda_not_bound and provider is not None else None,
            cuda,
        ),
    )
    problems = find_problems(facts)
    fatal = [problem for problem in problems if problem.severity == "fatal"]
    said = of_construction(str(cause), facts) if cause is not None else None
    if said is None and cause is not None:
        return None
    if said is not None and not (isinstance(said, ProviderFallbackError) and fatal):
        return said.with_others(problem for problem in problems if problem.code != said.code)
    if fatal:
        return fatal[0].with_others(problem for problem in problems if problem is not fatal[0])
    return ProviderFallbackError(
        "ONNX Runtime did not bind its CUDA provider, and no check knows why",
        evidence=[f"providers in this build: {', '.join(runtime.available_providers or ())}"],
        others=problems,
    )


def why_no_module(runtime: Runtime) -> GPUError:
    """The error for a process that cannot import ONNX Runtime at all."""
    error = why_unusable(runtime)
    return error if error is not None else OnnxRuntimeNotInstalledError("ONNX Runtime cannot be imported")
