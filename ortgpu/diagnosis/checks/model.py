"""Check the needs of a model beyond a working environment."""

from __future__ import annotations

import re

from ...errors import CollectiveOpsUnavailableError, GPUError, ProviderError, manual
from ...model.contents import LEAVES, ModelFacts
from ...provider.placement import Placement, refusal
from ..facts import Facts

# The operators of these domains are part of ONNX Runtime: core/graph/constants.h.
_KNOWN_DOMAINS = frozenset(
    {
        "", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "ai.onnx.training", "com.microsoft",
        "com.microsoft.dml", "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc",
    }
)  # fmt: skip

# ONNX Runtime 1.31 says this about unknown opsets and operators: model_load_utils.h, model.cc and graph.cc.
_UNKNOWN = re.compile("Opset|IR version|No Op registered|not a registered function/op")

_NAMED, _FILES_SHOWN = 4, 12  # A sentence names four files with weights, and the evidence twelve.
_CHECK = "check the path, and the file with `check-model FILE`, a command of the package onnx"


def judge_file(model: ModelFacts) -> tuple[GPUError, ...]:
    errors = (unreadable(model), data_missing(model), custom_domains(model))
    return tuple(error for error in errors if error is not None)


def unreadable(model: ModelFacts | None) -> GPUError | None:
    if model is None or model.problem is None:
        return None
    fix = manual(model.fix or _CHECK)
    return GPUError(f"the model {model.name} cannot be read", evidence=[model.problem], fixes=[fix])


def data_missing(model: ModelFacts | None) -> GPUError | None:
    if model is None or not model.data_problems:
        return None
    count, folder = len(model.data_problems), model.data_folder or "the folder of the model"
    names = ", ".join(name for name, _ in model.data_problems[:_NAMED])
    names += f" ... ({count} in all)" if count > _NAMED else ""
    fixes = []
    if any(why != LEAVES for _, why in model.data_problems):
        fixes.append("copy these files whole into that folder; in a repository with Git LFS, run git lfs pull")
    if any(why == LEAVES for _, why in model.data_problems):
        fixes.append("save the model again with its weights in a file beside it, or in the model file itself")
    evidence = [f"{name}: {why}" for name, why in model.data_problems[:_FILES_SHOWN]]
    evidence.append(f"the model has external data; its files must be in {folder} under these names")
    summary = f"weights of {model.name} are in files that cannot be used: {names}"
    return GPUError(summary, evidence=evidence, fixes=map(manual, fixes))


def custom_domains(model: ModelFacts | None) -> GPUError | None:
    """Warn of operators that need a library registered with the session options."""
    operators = model.operators if model is not None else frozenset[tuple[str, str]]()
    foreign = sorted((domain, op) for op, domain in operators if domain not in _KNOWN_DOMAINS)
    if not foreign:
        return None
    names = ", ".join(f"{domain}:{op}" for domain, op in foreign[:8])
    summary = f"the model uses operators that are not part of ONNX Runtime: {names}"
    evidence = [f"domains: {', '.join(dict.fromkeys(domain for domain, _ in foreign))}"]
    register = manual(
        "register the library that has them: SessionOptions.register_custom_ops_library(path); for ai.onnx.contrib, "
        "path is onnxruntime_extensions.get_library_path()"
    )
    return ProviderError(summary, evidence=evidence, fixes=[register], severity="warning")


def not_loaded(text: str) -> GPUError:
    advice = "export the model with an opset, an IR version and operators that it knows, or use a newer ONNX Runtime"
    fixes = [manual(advice)] if _UNKNOWN.search(text) else []
    summary = "the installed ONNX Runtime cannot open this model"
    return ProviderError(summary, evidence=[text.strip()[:600]], fixes=fixes)


def collective_ops_missing(facts: Facts) -> GPUError | None:
    names = ", ".join(facts.request.collective_operators)
    if not names or facts.observed.has_collective_ops is not False:
        return None
    return CollectiveOpsUnavailableError(
        f"the model exchanges data between processes, which the installed ONNX Runtime cannot do: {names}",
        evidence=[
            "these operators of com.microsoft are in builds with NCCL and MPI only",
            "this build: has_collective_ops() is False, as in every published package",
        ],
        fixes=[
            manual("use the model as it was before it was split over several GPUs"),
            manual("or build ONNX Runtime from source, with NCCL and MPI"),
        ],
    )


def report_cpu_nodes(facts: Facts) -> GPUError | None:
    """Warn of the nodes that ONNX Runtime kept on the CPU when the probe opened the model."""
    probe = facts.observed.probe
    nodes = (probe.measured("model", "nodes") if probe is not None else None) or ()
    error = refusal(Placement(nodes)) if nodes else None
    if error is not None:
        error.severity = "warning"
    return error
