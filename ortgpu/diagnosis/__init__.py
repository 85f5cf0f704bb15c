"""Judgement: one pure function per fault, from facts to an error or nothing.

The order of :data:`CHECKS` is the order in which causes turn out to be true: the package, then the libraries, then the
device's generation, then the driver, then the device, then what was really tried, then the model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..environment.inspection import Environment, inspect_environment
from ..errors import GPUError, UnsupportedPlatformError
from ..models import ModelFacts, collective_operators, read_model
from ..placement import cudnn_operators, cufft_operators
from . import attempts, devices, driver, libraries, packages
from . import model as model_checks
from .facts import Facts, Observed, Request
from .probe import ProbeResult, run_probe

Check = Callable[[Facts], GPUError | None]

CHECKS: tuple[Check, ...] = (
    packages.platform_unsupported,
    packages.not_installed,
    packages.shadowed,
    packages.broken_files,
    packages.conflicting,
    packages.cpu_only,
    packages.provider_missing,
    packages.library_damaged,
    packages.import_failed,
    model_checks.collective_ops_missing,  # no library, driver or device would mend it
    libraries.missing,
    libraries.provider_unloadable,
    libraries.cudnn_missing,
    libraries.cufft_missing,
    libraries.cudnn_of_other_cuda,
    libraries.cudnn_mixed,
    libraries.not_as_installed,
    devices.named_device,
    devices.unsupported,
    driver.not_found,
    driver.too_old,
    driver.not_accessible,
    devices.none_visible,
    driver.unusable,
    devices.busy,
    attempts.died,
    attempts.session_failed,
    model_checks.unreadable,
    model_checks.data_missing,
    model_checks.custom_domains,
    attempts.model_failed,
    model_checks.on_cpu,
)

# A finding of the first explains findings of the second: they are its consequences, not causes of their own.
_EXPLAINS: dict[str, frozenset[str]] = {
    "unsupported-platform": frozenset({"cpu-only-package", "driver-not-found", "onnxruntime-not-installed"}),
    "conflicting-packages": frozenset({"cpu-only-package", "broken-package"}),
    "broken-package": frozenset({"broken-package", "provider-fallback"}),
    "driver-not-found": frozenset({"no-device", "driver-too-old"}),
    "driver-too-old": frozenset({"driver-unusable", "no-device"}),
    "driver-unusable": frozenset({"no-device"}),
    "library-not-found": frozenset({"provider-fallback"}),
    "no-device": frozenset({"device-not-found"}),
}


def find_problems(facts: Facts) -> tuple[GPUError, ...]:
    """Everything that is wrong. Pure and deterministic.

    Fatal root causes come first, in the order of the checks; then what they explain, with ``consequence_of`` set; then
    warnings.
    """
    found: list[GPUError] = []
    for check in CHECKS:
        error = check(facts)
        if error is not None and (error.code, error.summary) not in {(each.code, each.summary) for each in found}:
            found.append(error)
    roots: list[GPUError] = []
    for error in (each for each in found if each.severity == "fatal"):
        cause = next((root for root in roots if _explains(root, error)), None)
        if cause is None:
            roots.append(error)
        else:
            error.consequence_of = cause.code
    return tuple(sorted(found, key=lambda error: (error.severity != "fatal", error.consequence_of is not None)))


def _explains(root: GPUError, error: GPUError) -> bool:
    if isinstance(root, UnsupportedPlatformError) and packages.has_cuda(root.system, root.machine):
        return False  # its C library is too old, which is no reason for anything else
    return error.code in _EXPLAINS.get(root.code, ())


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, most likely cause first, and the facts that it was judged by."""

    problems: tuple[GPUError, ...]
    environment: Environment
    probe: ProbeResult | None = None  # None: it was not asked for

    @property
    def ok(self) -> bool:
        """No problem that keeps a session from opening."""
        return not any(problem.severity == "fatal" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "problems": [problem.as_dict() for problem in self.problems],
            "environment": self.environment.as_dict(),
            "probe": self.probe.as_dict() if self.probe is not None else None,
        }


def diagnose(
    model: str | bytes | os.PathLike[str] | None = None, *, probe: bool = False, timeout: float = 30.0
) -> Diagnosis:
    """Inspect this environment and judge it.

    Args:
        model: a path or the bytes of a model; what it needs is judged too.
        probe: also really open the driver, the provider and a session (of ``model`` too), in a child process. Without
            it no CUDA is initialised anywhere, and a fault that only shows when CUDA works is not found.
        timeout: seconds that the child may take.

    Not promised: that a machine without problems runs every model; that takes a session.
    """
    environment = inspect_environment()
    facts_of_model = read_model(model) if model is not None else None
    request = request_for(facts_of_model)
    result = run_probe(model, timeout=timeout) if probe else None
    observed = Observed() if result is None else _observed(result)
    if request.collective_operators:
        from ..runtime import load_runtime

        observed = dataclasses.replace(observed, has_collective_ops=load_runtime().has_collective_ops)
    return Diagnosis(find_problems(Facts(environment, request, observed)), environment, result)


def request_for(model: ModelFacts | None) -> Request:
    operators = model.operators if model is not None else frozenset[tuple[str, str]]()
    return Request(
        cudnn_operators=cudnn_operators(operators),
        cufft_operators=cufft_operators(operators),
        collective_operators=collective_operators(operators),
        model=model,
    )


def _observed(result: ProbeResult) -> Observed:
    imported, provider, loaded = result.step("import"), result.step("provider"), result.step("libraries")
    providers = imported.data.get("providers") if imported is not None else None
    return Observed(
        import_error=imported.detail if imported is not None and providers is None else None,
        available_providers=tuple(providers) if providers is not None else None,
        cudnn_mixed=tuple(loaded.data.get("cudnn_mixed", ())) if loaded is not None else (),
        provider_error=provider.detail if provider is not None and not provider.ok else None,
        cuda=result.cuda,
        probe=result,
    )


__all__ = ["CHECKS", "Diagnosis", "Facts", "Observed", "Request", "diagnose", "find_problems"]
