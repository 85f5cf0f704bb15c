"""ONNX Runtime in this process: imported once, with the libraries that its provider needs already loaded."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import threading
from dataclasses import dataclass
from types import ModuleType

from .environment.cuda import CudaState
from .environment.elf import read_elf
from .environment.packages import read_packages
from .errors import GPUError, OnnxRuntimeNotInstalledError, ProviderFallbackError
from .preload import PreloadReport, merged, preload_for, why_provider_does_not_load

logger = logging.getLogger("ortgpu")


@dataclass(frozen=True, slots=True)
class Runtime:
    """What importing gave. ``module`` None: the import failed with ``import_error``, or has no InferenceSession."""

    module: ModuleType | None
    import_error: str | None
    preload: PreloadReport
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

    The libraries are loaded while the import runs, unless the extension module links them itself (1.27.0 does) and
    has to find them in the process. No thread outlives the call.
    """
    global _runtime
    with _lock:
        if _runtime is not None and _runtime.module is not None and _runtime.preload.ok:
            return _runtime
        _runtime = _load()
        return _runtime


def _load() -> Runtime:
    packages = read_packages(compare_files=False)
    extension = packages.onnxruntime.extension
    linked = read_elf(extension).needed if extension else ()
    if any(soname.startswith("libcu") for soname in linked):
        report = preload_for(packages, lazily_opened=False)
        module, error = _import()
        return Runtime(module, error, report)
    reports: list[PreloadReport] = []

    def preload_linked() -> None:
        reports.append(preload_for(packages, lazily_opened=False))

    loader = threading.Thread(target=preload_linked, name="ortgpu-preload", daemon=True)
    loader.start()
    try:
        module, error = _import()
    finally:
        loader.join()
    return Runtime(module, error, reports[0] if reports else preload_for(packages, lazily_opened=False))


def load_lazily_opened() -> Runtime:
    """Load what the provider opens at need (cuDNN's parts, cuFFT and what they open), once per process."""
    global _runtime
    with _lock:
        runtime = load_runtime()
        if not runtime.lazily_opened:
            report = merged(runtime.preload, preload_for(read_packages(compare_files=False)))
            _runtime = runtime = dataclasses.replace(runtime, preload=report, lazily_opened=True)
        return runtime


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
