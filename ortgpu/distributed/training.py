"""The check that ONNX Runtime's training API can be used."""

from __future__ import annotations

from importlib import import_module
from typing import Final, Literal, get_args

from ..diagnosis.facts import Facts
from ..environment.inspection import inspect_environment
from ..errors import TrainingUnavailableError
from .diagnosis import packages as training_packages
from .diagnosis.packages import Missing
from .environment import read_training_packages

_MODULES: Final = {
    "on-device": ("onnxruntime.training.api", "onnxruntime.training.artifacts"),
    "ORTModule": ("onnxruntime.training.ortmodule",),
}

Feature = Literal["on-device", "ORTModule"] | Missing


def require_training(feature: Feature = "on-device") -> None:
    """Raise an error if a feature of ONNX Runtime's training cannot be used here.

    Args:
        feature: "on-device", the API of ``onnxruntime.training.api`` and ``artifacts``; "ORTModule"; or a feature that
            no published package has, and that is always refused: "nccl", "horovod", "cuda", "checkpoint shards",
            "model parallelism".

    The first two are imported into this process, with torch. "cuda" is refused because training on a GPU is not
    verified.

    Raises:
        TrainingUnavailableError: the feature is not there. ``reason`` says why, and ``fixes`` what to do instead.
        ConflictingPackagesError, BrokenPackageError: the training package is there, and damaged.
        ValueError: there is no such feature.
    """
    if feature in get_args(Missing):
        raise training_packages.refuse(feature)  # type: ignore[arg-type]  # mypy does not narrow a Literal by get_args
    if feature not in _MODULES:
        raise ValueError(f"feature is one of {', '.join((*_MODULES, *get_args(Missing)))}; not {feature!r}")
    environment = inspect_environment()
    packages = read_training_packages(environment.packages.onnxruntime.folder)
    found = training_packages.find_faults(packages, Facts(environment))
    fatal = [error for error in found if error.severity == "fatal" or _concerns(error, feature)]
    if fatal:
        raise fatal[0].with_others(fatal)
    try:
        for name in _MODULES[feature]:
            import_module(name)
    except Exception as error:  # other people's code: whatever it raises, there is no training
        raise training_packages.import_failed([f"{type(error).__name__}: {error}"], environment) from error


def _concerns(error: BaseException, feature: str) -> bool:
    return isinstance(error, TrainingUnavailableError) and (feature, error.reason) == ("ORTModule", "no ORTModule")
