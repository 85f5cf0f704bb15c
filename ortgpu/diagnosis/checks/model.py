"""Check the needs of a model beyond a working environment."""

from __future__ import annotations

import re

from ...environment.inspection import Environment
from ...errors import BrokenPackageError, CollectiveOpsUnavailableError, GPUError, ProviderError, manual
from ...model.contents import ModelFacts
from ...provider.placement import PlacedNode, Placement, refusal
from ..facts import Facts
from ..remedies import fixes as remedies

# The domains whose operators are part of ONNX Runtime: core/graph/constants.h.
_KNOWN_DOMAINS = frozenset(
    {
        "", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "ai.onnx.training", "com.microsoft",
        "com.microsoft.dml", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc",
    }
)  # fmt: skip

# model_load_utils.h, model.cc and graph.cc of ONNX Runtime 1.31
_OPSET = re.compile(r"Opset (\d+) is under development\b.* for domain (\S+) is till opset (\d+)", re.DOTALL)
_IR_VERSION = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPERATOR = re.compile(r"No Op registered for (\S+) with domain_version of (\d+)")
_OPERATOR_OF_DOMAIN = re.compile(r"Fatal error: (?:(\S+):)?([^\s:(]+)(?:\(-?\d+\))? is not a registered function/op")
_DATA_OUTSIDE = re.compile(
    r"External data path\b.* escapes model directory\b.*|Absolute path not allowed for external data.*"
)

_NAMED, _FILES_SHOWN = 4, 12  # files with weights: in a sentence, and as evidence
_CHECK = "check the path, and that the file is whole: the command check-model of the package onnx reads it"


def judge_file(model: ModelFacts) -> tuple[GPUError, ...]:
    """Return what is wrong with a model file, or unusual, whatever the environment is."""
    found = (unreadable(model), data_missing(model), custom_domains(model))
    return tuple(error for error in found if error is not None)


def unreadable(model: ModelFacts | None) -> GPUError | None:
    if model is None or model.problem is None:
        return None
    return GPUError(
        f"the model {model.name} cannot be read",
        evidence=[model.problem],
        fixes=[manual(model.fix or _CHECK)],
    )


def onnx_broken(environment: Environment, consequence: str, text: str) -> BrokenPackageError:
    """Return the error for a failed import of onnx, ``text``. Often protobuf is too old for it: both are updated."""
    own = remedies.in_the_way(environment.packages, "onnx")
    if own is not None:
        return BrokenPackageError(
            f"{consequence}: {own} is imported instead of the installed onnx",
            evidence=[text],
            fixes=[remedies.out_of_the_way(environment, own)],
            package="onnx",
            files=(own,),
        )
    names = ("onnx", "protobuf")
    here = [f"{one.name} {one.version} in {one.location}" for one in environment.packages.others if one.name in names]
    return BrokenPackageError(
        f"{consequence}: the package onnx cannot be imported",
        evidence=[text, *here],
        fixes=[remedies.install(environment, names, upgrade=True)],
        package="onnx",
    )


def data_missing(model: ModelFacts | None) -> GPUError | None:
    if model is None or not model.data_problems:
        return None
    count = len(model.data_problems)
    names = ", ".join(name for name, _ in model.data_problems[:_NAMED]) + (
        f" ... ({count} in all)" if count > _NAMED else ""
    )
    return GPUError(
        f"weights of {model.name} are in files that cannot be used: {names}",
        evidence=[
            *(f"{name}: {why}" for name, why in model.data_problems[:_FILES_SHOWN]),
            f"the model has external data; its files must lie in {model.data_folder} under these names",
        ],
        fixes=[manual("copy these files whole into that folder; in a repository with Git LFS, run git lfs pull")],
    )


def custom_domains(model: ModelFacts | None) -> GPUError | None:
    """Warn of operators that only a library registered with the session options brings."""
    operators = model.operators if model is not None else frozenset[tuple[str, str]]()
    foreign = sorted((domain, op) for op, domain in operators if domain not in _KNOWN_DOMAINS)
    if not foreign:
        return None
    names = ", ".join(f"{domain}:{op}" for domain, op in foreign[:8])
    domains = sorted({domain for domain, _ in foreign})
    return ProviderError(
        f"the model uses operators that are not part of ONNX Runtime: {names}",
        evidence=[f"domains: {', '.join(domains)}"],
        fixes=[manual(way) for way in dict.fromkeys(map(_way_to_operators_of, domains))],
        severity="warning",
    )


def _way_to_operators_of(domain: str) -> str:
    return _WAYS_BY_DOMAIN.get(
        domain, "register the library that has them: SessionOptions.register_custom_ops_library(path)"
    )


_OF_TENSORRT = (
    "export the model without plugins of TensorRT, such as its NonMaxSuppression at the end of a detector: only "
    "TensorrtExecutionProvider has them"
)

# onnxruntime-extensions; NVIDIA's plugins, under the domain of the exporters and under that of ONNX Runtime
_WAYS_BY_DOMAIN = {
    "ai.onnx.contrib": "install onnxruntime-extensions, and pass a session its library in sess_options: "
    "options.register_custom_ops_library(onnxruntime_extensions.get_library_path())",
    "TRT": _OF_TENSORRT,
    "trt.plugins": _OF_TENSORRT,
}


def not_loaded(text: str) -> GPUError:
    """Return the error for a model that ONNX Runtime refuses with ``text``."""
    said, newer = text.strip(), "or use a newer ONNX Runtime"
    if match := _OPSET.search(text):
        said, (opset, domain, newest) = match[0], match.groups()
        summary = f"the model has opset {opset} of {domain}, and the installed ONNX Runtime knows {newest} and older"
        fixes = [f"export the model with opset {newest} or older", newer]
    elif match := _IR_VERSION.search(text):
        said, (version, newest) = match[0], match.groups()
        summary = f"the model has IR version {version}, and the installed ONNX Runtime knows {newest} and older"
        fixes = [f"save it with an older one: model.ir_version = {newest}, then onnx.save(model, path)", newer]
    elif match := _OPERATOR.search(text):
        operator, opset = match.groups()
        summary = f"the installed ONNX Runtime has no operator {operator} of opset {opset}"
        fixes = ["export the model for operators and an opset that it has", newer]
    elif match := _OPERATOR_OF_DOMAIN.search(text):
        said, domain, operator = match[0], match[1] or "", match[2]
        summary = f"the installed ONNX Runtime has no operator {f'{domain}:{operator}' if domain else operator}"
        fixes = (
            ["export the model for operators that it has", newer]
            if domain in _KNOWN_DOMAINS
            else [_way_to_operators_of(domain)]
        )
    elif match := _DATA_OUTSIDE.search(text):
        said, summary = match[0], "weights of the model lie outside of its folder, and ONNX Runtime reads none there"
        fixes = [
            "put the files with its weights into its folder, and no links to them; in the model their names (location, "
            "in external_data of its tensors) must be without folders above it"
        ]
    else:
        summary, fixes = "the installed ONNX Runtime cannot open this model", []
    return ProviderError(summary, evidence=[said[:600]], fixes=map(manual, fixes))


def collective_ops_missing(facts: Facts) -> GPUError | None:
    operators = facts.request.collective_operators
    if not operators or facts.observed.has_collective_ops is not False:
        return None
    return CollectiveOpsUnavailableError(
        f"the model works between processes, and the installed ONNX Runtime cannot: {', '.join(operators)}",
        evidence=[
            "these operators of com.microsoft are in builds with NCCL and MPI only",
            "this build: has_collective_ops() is False, as in every published package",
        ],
        fixes=[
            manual("use the model as it was before it was split over several GPUs"),
            manual("or build ONNX Runtime from source, with NCCL and MPI"),
        ],
    )


def on_cpu(facts: Facts) -> GPUError | None:
    """Warn of the nodes that ONNX Runtime kept on the CPU when the probe opened the model."""
    step = facts.observed.step("model")
    nodes = step.data.get("nodes") if step is not None else None
    if not nodes:
        return None
    found = refusal(Placement(tuple(PlacedNode(**node) for node in nodes)))
    if found is None:
        return None
    found.severity = "warning"
    return found
