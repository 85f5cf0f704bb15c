"""Explain why this process could not open a session: the full diagnosis, once something has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..environment.inspection import inspect_environment
from ..errors import (
    BrokenPackageError,
    GPUError,
    LibraryConflictError,
    OnnxRuntimeNotInstalledError,
    ProviderFailureError,
    ProviderFallbackError,
    manual,
)
from ..provider.living import sessions
from .checks import driver, opening
from .diagnosing import find_problems
from .facts import Facts, Observed, Request
from .messages.runtime_words import OF_WHEELS

_FOR_WHAT_NO_CHECK_KNOWS = (
    manual("run `ortgpu doctor`: it opens the driver, the provider and a small session in a process of its own"),
    manual("if a session opens there, restart this process and open its first GPUSession before CUDA is used"),
    manual("else please report it to the maintainers of ortgpu, with the output of `ortgpu doctor --json --redact`"),
)

if TYPE_CHECKING:
    from ..environment.gpu.cuda import CudaState
    from ..provider.runtime import Runtime


def why_unusable(
    runtime: Runtime,
    *,
    request: Request | None = None,
    cuda: CudaState | None = None,
    cause: BaseException | None = None,
) -> GPUError | None:
    """Return the most likely error, with the other problems attached.

    None if neither the environment nor the words of ``cause`` say anything about the GPU. Without a ``cause`` there is
    always an error, at the last a :class:`ProviderFallbackError`. ``cuda``: the driver's answer to this process, if it
    was asked.
    """
    facts = Facts(inspect_environment(), request or Request(), _observed(runtime, request, cuda))
    problems = find_problems(facts)
    fatal = [problem for problem in problems if problem.severity == "fatal"]
    # Altered files seemed harmless, and are a better guess than none.
    fatal = fatal or [problem for problem in problems if isinstance(problem, BrokenPackageError)]
    said = opening.of_construction(str(cause), facts) if cause is not None else None
    if said is None and cause is not None:
        return None
    if said is None or isinstance(said, ProviderFallbackError):  # which names no cause
        too_few = driver.too_few_descriptors(None, facts, ["ONNX Runtime did not bind its CUDA provider"])
        explaining = fatal or ([too_few] if too_few is not None else [])
    elif isinstance(said, ProviderFailureError) and said.library in OF_WHEELS:
        # A known problem of the libraries explains why one of them fails.
        explaining = fatal or [problem for problem in problems if isinstance(problem, LibraryConflictError)]
    else:
        explaining = [problem for problem in fatal if said.code in problem.explains and problem.code != said.code]
    if explaining:
        cause, others = explaining[0], [problem for problem in problems if said is None or problem.code != said.code]
        cause.severity = "fatal"
        if said is not None and not isinstance(said, ProviderFallbackError):
            said.consequence_of = cause.code
            others.insert(0, said)
        return cause.with_others(others)
    if said is None:
        said = ProviderFallbackError(
            "ONNX Runtime did not bind its CUDA provider, and no check knows why",
            evidence=[
                *([runtime.import_error] if runtime.import_error else []),
                f"providers in this build: {', '.join(runtime.available_providers or ())}",
            ],
        )
    if isinstance(said, ProviderFallbackError):
        said.fixes = _FOR_WHAT_NO_CHECK_KNOWS
    return said.with_others(problem for problem in problems if problem.code != said.code)


def why_no_module(runtime: Runtime) -> GPUError:
    """Return the error for a process that cannot import ONNX Runtime at all."""
    error = why_unusable(runtime)
    return error if error is not None else OnnxRuntimeNotInstalledError("ONNX Runtime cannot be imported")


def _observed(runtime: Runtime, request: Request | None, cuda: CudaState | None) -> Observed:
    needs_collective_ops = request is not None and bool(request.collective_operators)
    return Observed(
        import_error=runtime.import_error,
        has_session=None if runtime.import_error else runtime.module is not None,
        available_providers=runtime.available_providers,
        preload=runtime.preload,
        cudnn_mixed=runtime.preload.cudnn_mixed if runtime.preload is not None else (),
        provider_error=runtime.provider_error,
        plugin_problem=runtime.plugin_problem,
        cuda=cuda,
        has_collective_ops=runtime.has_collective_ops if needs_collective_ops else None,
        sessions=sessions() if cuda is not None and cuda.code == 0 else (),  # else none is on a GPU
        numpy_error=runtime.numpy_error,
    )
