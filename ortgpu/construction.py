"""Construct a session with what is chosen for its model here: the layout of images, whether cuDNN has a part in it, and
how its weights are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .cudnn_handles import HANDLES, needs_none, options_without_handles
from .layout import options_for_layout
from .placement import recording
from .providers import CPU, CUDA, ProviderList
from .signal_handlers import is_of_a_handler
from .throughput import is_onnxruntimes
from .weights import weights_in_place

if TYPE_CHECKING:
    from .opening import SessionRequest

logger = logging.getLogger("ortgpu")


def constructed_as_chosen(
    session: Any,
    construct: Callable[..., None],
    request: SessionRequest,
    given: ProviderList,
    asked: ProviderList,
    capability: tuple[int, int] | None,
) -> dict[str, tuple[str, str]] | None:
    """Provider options with which ``session`` is constructed now, beside those ``asked`` for, each with its value and
    the reason. None: nothing can be chosen, or nothing opens so, whatever the reason is.

    ``given``: what the caller asked for. ``capability``: that of the GPU.
    """
    chosen = _chosen_for(request, given, capability)
    providers = asked.with_cuda_options({name: value for name, (value, _) in chosen.items()}).as_arguments()

    def opens(model: Any, options: Any) -> bool:
        opened = _opens(construct, model, options, providers, request)
        return opened and (HANDLES not in chosen or needs_none(session))

    weights = weights_in_place(request.model) if _takes_weights(construct, request, asked) else None
    if weights is not None and opens(weights.structure, weights.options):
        _name_model(session, request.model)
        return chosen
    weights = None  # and with them the mapping
    if chosen and opens(request.model, recording(request.sess_options)):
        return chosen
    return None


def _opens(construct: Callable[..., None], model: Any, options: Any, providers: Any, request: SessionRequest) -> bool:
    try:
        construct(model, options, providers=providers, enable_fallback=0, **request.kwargs)
    except Exception as refusal:  # what is chosen here must keep no session from opening
        if is_of_a_handler(refusal):
            raise
        # The text alone: a handler may keep what it is given, and an error keeps the session that was half made
        logger.debug("a session does not open as chosen: %s", str(refusal))
        return False
    return True


def _chosen_for(
    request: SessionRequest, given: ProviderList, capability: tuple[int, int] | None
) -> dict[str, tuple[str, str]]:
    if not request.choose_options or request.kwargs:  # they change how the graph is optimised
        return {}
    layout = options_for_layout(request.model, given, request.sess_options, capability)
    return layout or options_without_handles(request.model, given, request.sess_options)


def _takes_weights(construct: Callable[..., None], request: SessionRequest, asked: ProviderList) -> bool:
    """Options of the caller would keep them for the next session that is made with these. TensorRT reads weights when
    it likes. A tracer in the place of the constructor is to see the model that the caller named."""
    if request.sess_options is not None or not {CUDA, CPU}.issuperset(asked.names):
        return False
    return request.choose_options and is_onnxruntimes(_behind_the_guard(construct))


def _behind_the_guard(construct: Callable[..., None]) -> Any:
    function = getattr(construct, "__func__", None)
    while type(function) is FunctionType and function.__globals__.get("__name__") == _GUARD:
        function = function.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it
    return function


_GUARD = f"{__package__}.guard"


def _name_model(session: Any, model: str | bytes | os.PathLike[str]) -> None:
    """What InferenceSession keeps of a model and options, as if it had been given the model as it is."""
    in_bytes = isinstance(model, bytes)
    session.__dict__.update(
        _model_path=None if in_bytes else os.fspath(model),
        _model_bytes=model if in_bytes else None,
        _sess_options_initial=recording(None),
    )
