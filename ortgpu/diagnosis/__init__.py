"""Judgement: one pure function per fault, from facts to an error or nothing.

The order of :data:`CHECKS` is the order in which causes turn out to be true: the package, then the libraries, then the
device's generation, then the driver, then the device. What would only follow from an earlier finding is not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..environment.inspection import Environment, inspect_environment
from ..errors import GPUError
from . import devices, driver, libraries, packages
from .facts import Facts, Observed, Request

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
    libraries.missing,
    libraries.provider_unloadable,
    libraries.cudnn_missing,
    libraries.cufft_missing,
    libraries.cudnn_of_other_cuda,
    devices.named_device,
    devices.unsupported,
    driver.not_found,
    driver.too_old,
    devices.none_visible,
    driver.unusable,
    devices.busy,
)

# A finding of the first makes every finding of the second a consequence of it, or a guess without ground.
_HIDES: dict[str, frozenset[str]] = {
    "unsupported-platform": frozenset({"cpu-only-package", "driver-not-found", "onnxruntime-not-installed"}),
    "conflicting-packages": frozenset({"cpu-only-package", "broken-package"}),
    "driver-too-old": frozenset({"driver-unusable"}),
}


def find_problems(facts: Facts) -> tuple[GPUError, ...]:
    """Everything that is wrong: fatal findings in the order of the checks, then warnings. Pure and deterministic."""
    found = [error for check in CHECKS if (error := check(facts)) is not None]
    fatal = [error for error in found if error.severity == "fatal"]
    hidden = frozenset[str]().union(*(_HIDES.get(error.code, frozenset()) for error in fatal))
    kept = [error for error in found if error.code not in hidden]
    return tuple(sorted(kept, key=lambda error: error.severity != "fatal"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, most likely cause first, and the facts that it was judged by."""

    problems: tuple[GPUError, ...]
    environment: Environment

    @property
    def ok(self) -> bool:
        """No problem that keeps a session from opening."""
        return not any(problem.severity == "fatal" for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "problems": [problem.as_dict() for problem in self.problems],
            "environment": self.environment.as_dict(),
        }


def diagnose() -> Diagnosis:
    """Inspect this environment and judge it. Opens no session and initialises no CUDA.

    Not promised: that a machine without problems runs every model; that takes a session.
    """
    environment = inspect_environment()
    return Diagnosis(find_problems(Facts(environment)), environment)


__all__ = ["CHECKS", "Diagnosis", "Facts", "Observed", "Request", "diagnose", "find_problems"]
