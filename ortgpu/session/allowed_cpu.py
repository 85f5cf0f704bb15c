"""The CPU instead of an unusable GPU: when the caller allows it, and the warning."""

from __future__ import annotations

import logging
import os
import warnings

from onnxruntime.capi import onnxruntime_pybind11_state as native

from ..errors import (
    CollectiveOpsUnavailableError,
    CPUExecutionWarning,
    GPUError,
    PlacementError,
    ProviderError,
    ProviderFallbackError,
    manual,
)
from ..model.contents import describe_model
from ..model.files import ModelSource
from ..model.outline import GraphOutline
from ..provider.living import stacklevel
from ..provider.options import CPU_FALLBACK_KEY, keeps_cpu_out
from ..running.onnxruntimes import session_on_cpu
from .request import SessionRequest, cpu_is_allowed_by_variable

logger = logging.getLogger("ortgpu")


def is_cpu_allowed(request: SessionRequest, error: GPUError | None = None) -> bool:
    """Return True if the CPU may serve after ``error``, or any error. It does not mend a wrong request."""
    if keeps_cpu_out(request.sess_options) or (error is not None and _is_of_the_request(error, request)):
        return False
    return cpu_is_allowed_by_variable() if request.allow_cpu is None else request.allow_cpu


def warn_of_cpu(session: object, error: GPUError, model: ModelSource) -> None:
    """Warn that a session is on the CPU because of ``error``.

    The log has it too, in one line, where logging is set up or the program hides warnings. Elsewhere Python would print
    the line beside the warning.
    """
    warning = CPUExecutionWarning(error, "<bytes>" if isinstance(model, bytes) else os.fsdecode(model))
    if logger.hasHandlers() or _is_hidden(CPUExecutionWarning):
        text = "%s is running on the CPU, as allowed [%s]: %s"
        logger.warning(text, warning.model, error.code, error.summary, extra={"warning": warning})
    warnings.warn(warning, stacklevel=stacklevel(session))


def _is_hidden(category: type[Warning]) -> bool:
    """Return True if the first filter for warnings of this category, in all modules, ignores them."""
    actions = (
        action
        for action, message, hidden, module, line in warnings.filters
        if message is None and module is None and not line and issubclass(category, hidden)
    )
    return next(actions, "default") == "ignore"


def _is_of_the_request(error: GPUError, request: SessionRequest) -> bool:
    if isinstance(error, PlacementError):  # Without these arguments a plugin could not compute the model.
        return request.cpu_nodes == "forbid" or request.cuda_graph or keeps_cpu_out(request.sess_options)
    of_the_request = (ProviderError, CollectiveOpsUnavailableError)
    return isinstance(error, of_the_request) and not isinstance(error, ProviderFallbackError)


def refuse_broken_model(request: SessionRequest, outline: GraphOutline, error: GPUError) -> None:
    """Raise ONNX Runtime's own error for a model that it cannot read, if ``error`` came before it saw the model.

    ONNX Runtime is asked only if our own reader finds a problem, since it would parse the whole model. A model that
    then opens on the CPU is not broken.
    """
    if error.__cause__ is not None or _is_of_the_request(error, request):
        return
    facts = describe_model(outline)
    if facts.problem is None and not facts.data_problems:
        return
    options = request.sess_options if request.sess_options is not None else native.get_default_session_options()
    try:
        session_on_cpu(request.model, options)
    except Exception as refusal:
        if explain_refused_placement(refusal) is None:
            raise refusal from None


def explain_refused_placement(cause: BaseException) -> PlacementError | None:
    if "fallback to CPU EP has been explicitly disabled" not in str(cause):
        return None
    return PlacementError(
        "nodes of this model are on the CPU, and the session options forbid that",
        evidence=[str(cause).strip().splitlines()[0], f"{CPU_FALLBACK_KEY}=1, which counts shape nodes too"],
        fixes=[manual('leave that entry out and pass cpu_nodes="forbid": it tells compute nodes from shape nodes')],
    )
