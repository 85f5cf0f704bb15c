"""The package with the training API: its checks, refusals of features that no published one has, require_training.

The import of ``onnxruntime.training`` misleads. "No module named 'torch'" is a requirement that no metadata names. It
does not report a missing ORTModule at all.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from typing import Final, Literal, get_args

from ...diagnosis import diagnosing
from ...diagnosis.checks.packages import broken_files, is_vital
from ...diagnosis.facts import Facts
from ...diagnosis.remedies import fixes as remedies
from ...diagnosis.requirements import dotted
from ...environment.inspection import Environment, inspect_environment
from ...environment.packages.installed import Distribution
from ...environment.packages.metadata import numbers_of
from ...errors import (
    BrokenPackageError,
    ConflictingPackagesError,
    Fix,
    GPUError,
    Severity,
    TrainingUnavailableError,
    manual,
    shell,
)
from ...provider.runtime import load_runtime
from ..environment import TrainingPackages, read_training_packages

Missing = Literal["nccl", "horovod", "cuda", "checkpoint shards", "model parallelism"]
Feature = Literal["on-device", "ORTModule"] | Missing

LAST_RELEASE: Final = "1.19.2"  # The last of onnxruntime-training and onnxruntime-training-cpu, September 2024.
TRAINING_PACKAGE: Final = f"onnxruntime-training-cpu=={LAST_RELEASE}"
NEWEST_ONNX: Final = "1.17"
# The package with all that it needs. Its metadata names neither torch nor a limit for onnx.
REQUIREMENTS: Final = (TRAINING_PACKAGE, f"onnx<={NEWEST_ONNX}", "torch", "mpi4py")
_MODULES: Final = {
    "on-device": ("onnxruntime.training.api", "onnxruntime.training.artifacts"),
    "ORTModule": ("onnxruntime.training.ortmodule",),
}
_OWN_ENVIRONMENT: Final = "ort-training"
_NEWEST_PYTHON: Final = (3, 12)


def conflicting(_: TrainingPackages, facts: Facts) -> GPUError | None:
    """Report a folder that a training package shares with another. It is fatal if the training build is damaged."""
    environment = facts.environment
    installed = environment.packages.onnxruntime
    training = _owner(environment)
    if training is None or len(installed.owners) < 2:
        return None
    whole = installed.build_name == training.name and not _damage(training)
    names = list(dict.fromkeys(owner.name for owner in installed.owners))
    evidence = [
        f"{owner.name} {owner.version}: {len(_damage(owner)) or 'none'} of the files it runs on missing or overwritten"
        for owner in installed.owners
    ]
    evidence.append(f"the files there now: {installed.build_name or 'a mixture'} {installed.build_version or ''}")
    evidence.append(
        "both write the folder onnxruntime: uninstalling one breaks the other, and `pip check` reports nothing"
    )
    return ConflictingPackagesError(
        f"{' and '.join(names)} share one folder" + ("" if whole else ", and the training build was overwritten"),
        evidence=evidence,
        fixes=[
            remedies.reinstall_onnxruntime(environment, requirement=_pinned(training)),
            *([remedies.reinstall_onnxruntime(environment)] if "onnxruntime-gpu" in names else []),
        ],
        severity="warning" if whole else "fatal",
        packages=tuple(owner.name for owner in installed.owners),
    )


def broken(_: TrainingPackages, facts: Facts) -> GPUError | None:
    """Report files that are missing, as after the removal of another package that shared the folder."""
    environment = facts.environment
    installed = environment.packages.onnxruntime
    training = _owner(environment)
    if training is None:
        return broken_files(facts)
    damage = _damage(training)
    if len(installed.owners) != 1 or (installed.importable and not damage):
        return None
    return BrokenPackageError(
        f"files of {training.name} are missing: another package that shared its folder was removed",
        evidence=[f"missing or altered: {name}" for name in damage[:8]] or [f"no __init__.py in {installed.folder}"],
        fixes=[remedies.reinstall_onnxruntime(environment, leftover=installed.folder, requirement=_pinned(training))],
        package=training.name,
        files=damage or ("onnxruntime/__init__.py",),
    )


def absent(packages: TrainingPackages, facts: Facts) -> GPUError | None:
    """Report that ``import onnxruntime`` finds no training package: none is installed, or another comes first."""
    environment = facts.environment
    installed = environment.packages.onnxruntime
    owner = _owner(environment)
    where = owner or next(filter(_is_training, installed.elsewhere), None)
    if _is_training_build(environment):
        return None
    if where is None and packages.api_folder is None:
        return _not_installed(environment)
    if not installed.importable:
        return None
    name = f"{installed.build_name or 'another package'} {installed.build_version or ''}".rstrip()
    other = f"files of a training package are left in {packages.api_folder}"
    fix = remedies.reinstall_onnxruntime(environment, requirement=TRAINING_PACKAGE)
    if where is not None:
        other = f"installed as well: {where.name} {where.version} in {where.location}"
        if owner is None:
            off = remedies.drop_from_variable(environment, "PYTHONPATH", installed.home)
            fix = off or manual(f"put {where.location} before {installed.home} on the path")
    return TrainingUnavailableError(
        f"onnxruntime.training is not available: {name} is installed instead of the training package",
        evidence=[f"import onnxruntime finds {name} in {installed.folder}", other],
        fixes=[fix],
        reason="shadowed",
    )


def _not_installed(environment: Environment) -> TrainingUnavailableError:
    installed = environment.packages.onnxruntime
    is_empty = installed.folder is None and not installed.owners
    why = "no package that provides onnxruntime is installed"
    if not is_empty:
        name = installed.build_name or next((owner.name for owner in installed.owners), "onnxruntime")
        why = f"{name} {installed.build_version or ''}".rstrip() + " is for inference, and has no training API"
    return TrainingUnavailableError(
        f"onnxruntime.training is not available: {why}",
        evidence=[
            f"the training packages ended with {LAST_RELEASE} of September 2024 (release notes of ONNX Runtime 1.20.0)",
            f"they are for Python up to 3.12, with CUDA up to 3.11; this is {dotted(environment.host.python)}",
            "the one with CUDA is for CUDA 11.8 and cuDNN 8; training on a GPU with it is not verified",
        ],
        fixes=_ways_to_training(environment, is_empty=is_empty),
        reason="not installed",
    )


def torch_missing(_: TrainingPackages, facts: Facts) -> GPUError | None:
    environment = facts.environment
    if not _is_training_build(environment) or environment.packages.torch is not None:
        return None
    return TrainingUnavailableError(
        "onnxruntime.training cannot be imported: it needs torch, which is not installed",
        evidence=["onnxruntime.training.optim imports torch at its top; the package's metadata does not name it"],
        fixes=[remedies.install(environment, ["torch"])],
        reason="no torch",
    )


def onnx_too_new(packages: TrainingPackages, facts: Facts) -> GPUError | None:
    onnx = packages.get("onnx")
    if not _is_training_build(facts.environment) or onnx is None or onnx.version is None:
        return None
    if numbers_of(onnx.version)[:2] <= numbers_of(NEWEST_ONNX):
        return None
    return TrainingUnavailableError(
        f"the installed onnx {onnx.version} writes models that ONNX Runtime {LAST_RELEASE} refuses to train",
        evidence=[
            f"onnxruntime {LAST_RELEASE} reads IR version 10 at most, the one of onnx 1.16 and 1.17",
            "generate_artifacts writes the newest that onnx knows: 'Unsupported model IR version'",
        ],
        fixes=[remedies.install(facts.environment, [f"onnx<={NEWEST_ONNX}"])],
        reason="onnx too new",
    )


def ort_module_absent(_: TrainingPackages, facts: Facts) -> GPUError | None:
    """Warn that ORTModule does not work. The on-device API does not need it."""
    torch = facts.environment.packages.torch
    if not _is_training_build(facts.environment) or torch is None or torch.version is None:
        return None
    if numbers_of(torch.version)[:2] < (2, 9):
        return None
    return TrainingUnavailableError(
        f"ORTModule does not work with torch {torch.version}, and onnxruntime.training does not say so",
        evidence=[
            "torch 2.9 took torch.onnx._internal.jit_utils away (pytorch/pytorch#161323), which ORTModule imports",
            "onnxruntime/training/__init__.py swallows that ImportError: the import succeeds, ORTModule is just absent",
        ],
        fixes=[
            manual("use onnxruntime.training.api instead, as examples/train_data_parallel.py does"),
            manual(
                "or install 'torch<2.9', build ORTModule's extensions with `python -m "
                "onnxruntime.training.ortmodule.torch_cpp_extensions.install`, and set "
                "ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE, without which it may go back to torch in silence"
            ),
        ],
        severity="warning",
        reason="no ORTModule",
    )


CHECKS: Final = (conflicting, broken, absent, torch_missing, onnx_too_new, ort_module_absent)


def find_faults(packages: TrainingPackages, facts: Facts) -> list[GPUError]:
    return [error for check in CHECKS if (error := check(packages, facts)) is not None]


def import_failed(lines: list[str], environment: Environment) -> TrainingUnavailableError:
    return TrainingUnavailableError(
        "import onnxruntime.training fails",
        evidence=lines,
        fixes=[remedies.reinstall_onnxruntime(environment, requirement=TRAINING_PACKAGE)],
        reason="import fails",
    )


def _ways_to_training(environment: Environment, *, is_empty: bool) -> list[Fix]:
    python = shlex.quote(environment.host.executable or "python3")
    words = " ".join(map(shlex.quote, REQUIREMENTS))
    if environment.host.python[:2] > _NEWEST_PYTHON or environment.host.frozen:
        return [manual(f"use Python 3.12 or older, in an environment of its own: pip install {words}", needs="host")]
    if is_empty:
        return [remedies.install(environment, REQUIREMENTS)]
    # Not into this environment, where both packages would write into one folder
    folder = f"{_OWN_ENVIRONMENT}/bin/python"
    return [shell(f"{python} -m venv {_OWN_ENVIRONMENT} && {folder} -m pip install {words}")]


def _is_training(distribution: Distribution) -> bool:
    return "training" in distribution.name


def _owner(environment: Environment) -> Distribution | None:
    return next((one for one in environment.packages.onnxruntime.owners if _is_training(one)), None)


def _is_training_build(environment: Environment) -> bool:
    installed = environment.packages.onnxruntime
    return installed.importable and "training" in (installed.build_name or "")


def _pinned(distribution: Distribution) -> str:
    return f"{distribution.name}=={distribution.version}"


def _damage(distribution: Distribution) -> tuple[str, ...]:
    names = (*distribution.missing_files, *distribution.altered_files)
    return tuple(name for name in names if is_vital(name) or re.match(r"onnxruntime/training/.*\.py$", name))


# Features that ONNX Runtime's pages on distributed training promise

# Summary, evidence, and what to do instead
_REFUSALS: Final[dict[Missing, tuple[str, str, str]]] = {
    "nccl": (
        "no published package of ONNX Runtime, for training or inference, is built with NCCL or MPI",
        "onnxruntime-training 1.13.1 to 1.19.2 were looked at: no NCCL symbol, no link to libnccl or libmpi",
        "train data-parallel with MPI, as examples/train_data_parallel.py does; or with torch's "
        "DistributedDataParallel, which has NCCL, and export the result to ONNX",
    ),
    "horovod": (
        "ONNX Runtime does not work with Horovod: it dropped that in 2020",
        "microsoft/onnxruntime pull request 5468 of 2020: deprecating Horovod",
        "train data-parallel with MPI, as examples/train_data_parallel.py does; Horovod goes on to serve torch",
    ),
    "cuda": (
        "training with ONNX Runtime on a GPU is not verified, and not promised",
        f"onnxruntime-training {LAST_RELEASE} is built for CUDA 11.8, cuDNN 8 and compute capabilities 6.0 to 8.6",
        "train with torch on the GPU, export the result to ONNX and open it with GPUSession; or train on the CPU with "
        "onnxruntime-training-cpu",
    ),
    "checkpoint shards": (
        "checkpoints of ORTTrainer (*.ort.pt) cannot be read by any package that still trains",
        "onnxruntime.training.checkpoint is in the packages up to 1.16.3, and gone from 1.17 on",
        "merge the shards with aggregate_checkpoints of onnxruntime-training 1.16.3, in an environment of its own, and "
        "save what comes out as a CheckpointState, with ortgpu.distributed.checkpoint.save",
    ),
    "model parallelism": (
        "ONNX Runtime cannot train a model that does not fit into one GPU",
        "no published package has pipeline or tensor parallelism: every rank holds the whole model",
        "use torch with FSDP or DeepSpeed, and export the result to ONNX; or make it fit, with smaller batches",
    ),
}


def refuse(missing: Missing, *, severity: Severity = "fatal") -> TrainingUnavailableError:
    summary, evidence, instead = _REFUSALS[missing]
    return TrainingUnavailableError(
        summary,
        evidence=[evidence],
        fixes=[manual(instead)],
        severity=severity,
        reason=missing,
    )


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
        raise refuse(feature)  # type: ignore[arg-type]  # mypy does not narrow a Literal by get_args
    if feature not in _MODULES:
        raise ValueError(f"feature is one of {', '.join((*_MODULES, *get_args(Missing)))}; not {feature!r}")
    environment = inspect_environment()
    packages = read_training_packages(environment.packages.onnxruntime.folder)
    faults = find_faults(packages, Facts(environment))
    lack = "no ORTModule" if feature == "ORTModule" else ""  # It is a warning for the other features.
    fatal = [error for error in faults if error.severity == "fatal" or getattr(error, "reason", None) == lack]
    if fatal:
        raise fatal[0].with_others(fatal)
    try:
        for name in _MODULES[feature]:
            import_module(name)
    except Exception as error:  # other people's code: whatever it raises, there is no training
        raise import_failed([f"{type(error).__name__}: {error}"], environment) from error


def has_collective_ops() -> bool:
    """Return True if the installed ONNX Runtime has com.microsoft:AllReduce, AllGather and AllToAll.

    These need a build with NCCL and MPI. No published package from 1.22 to 1.31.1 is built so. Imports ``onnxruntime``.

    Raises:
        PackageError: ``onnxruntime`` cannot be imported.
    """
    runtime = load_runtime()
    has_operators = runtime.has_collective_ops
    if has_operators is None:
        raise diagnosing.why_no_module(runtime)
    return has_operators
