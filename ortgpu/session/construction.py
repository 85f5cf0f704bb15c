"""Construction of a session with the options that are chosen for its model.

Chosen are the layout of images, the use of cuDNN, the number of CPU threads, and the way weights are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..model.questions import in_memory
from ..model.structure import ModelSource
from ..process.signals import is_of_a_handler
from ..provider.lifetime import HELD_BY_ONNXRUNTIME
from ..provider.options import recording, recording_options
from ..provider.placement import Placement, read_placement
from ..provider.requests import CPU, CUDA, ProviderList
from ..running.onnxruntimes import is_onnxruntimes
from .chosen.layout import options_for_layout
from .chosen.unneeded import (
    COUNT,
    HANDLES,
    THREADS,
    needs_no_handles,
    needs_no_more_threads,
    options_with_few_threads,
    options_without_handles,
)
from .weights import Weights, weights_in_place

if TYPE_CHECKING:
    from .request import SessionRequest

logger = logging.getLogger("ortgpu")


class Constructed(NamedTuple):
    chosen: dict[str, tuple[str, str]]  # further options, each with its value and the reason
    placement: Placement


def constructed_as_chosen(
    session: Any,
    construct: Callable[..., None],
    request: SessionRequest,
    requested: ProviderList,
    final: ProviderList,
    capability: tuple[int, int] | None,
) -> Constructed | None:
    """Construct ``session`` with further options beside those of ``final``.

    Returns None if nothing can be chosen, or if the session does not open with what is chosen. ``requested`` is the
    list of the caller, ``capability`` the compute capability of the GPU.
    """
    if not request.choose_options:
        return None
    judged = _file_of(request.model)
    weights = weights_in_place(request.model) if _takes_weights(construct, request, final) else None
    model = in_memory(request.model) if weights is None else weights.structure
    chosen = _chosen_for(model, request, requested, capability)
    while chosen or weights is not None:
        if not _construct(session, construct, request, final, chosen, weights):
            if weights is None:
                return None
            weights = None  # free them first: the memory may not have room for two copies
            continue
        placement = read_placement(session, without_options=request.sess_options is None)
        unfit = [name for name, fits in _FITS.items() if name in chosen and not fits(placement)]
        if weights is None and _file_of(request.model) != judged:
            unfit = list(chosen)  # the file changed, so they may fit another model
        if not unfit:
            if weights is not None:
                weights.give_back()
            return Constructed(chosen, placement)
        chosen = {name: choice for name, choice in chosen.items() if name not in unfit}
        for name in HELD_BY_ONNXRUNTIME:  # free it first: the GPU may not have room for two
            vars(session).pop(name, None)
    return None


def _file_of(model: ModelSource) -> tuple[int, ...] | None:
    """Return a stamp that changes with the content of a model file. None for bytes, or if there is no file."""
    if isinstance(model, bytes):
        return None
    try:
        found = os.stat(model)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_FITS = {HANDLES: needs_no_handles, THREADS: needs_no_more_threads}


def _construct(
    session: Any,
    construct: Callable[..., None],
    request: SessionRequest,
    final: ProviderList,
    chosen: dict[str, tuple[str, str]],
    weights: Weights | None,
) -> bool:
    """Construct ``session``, with ``weights`` if there are any. Return True if it opened."""
    of_provider = {name: value for name, (value, _) in chosen.items() if name != THREADS}
    providers = final.with_cuda_options(of_provider).as_arguments()
    if weights is None:
        options = _with_threads(recording_options(), chosen) if THREADS in chosen else request.sess_options
        return _opens(construct, request.model, options, providers, request)
    if not _opens(construct, weights.structure, _with_threads(weights.options(), chosen), providers, request):
        return False
    _name_model(session, request.model, _with_threads(recording_options(), chosen))
    return True


def _with_threads(options: Any, chosen: dict[str, tuple[str, str]]) -> Any:
    if THREADS in chosen:
        options.intra_op_num_threads = COUNT
    return options


def _opens(construct: Callable[..., None], model: Any, options: Any, providers: Any, request: SessionRequest) -> bool:
    try:
        construct_recording(construct, model, options, providers, request.kwargs)
    except Exception as refusal:  # a choice must not keep a session from opening
        if is_of_a_handler(refusal):
            raise
        # Log the text alone: a handler may keep the error, and the error keeps the half-made session.
        logger.debug("a session does not open as chosen: %s", str(refusal))
        return False
    return True


def construct_recording(
    construct: Callable[..., None], model: Any, options: Any, providers: Any, kwargs: dict[str, Any]
) -> None:
    """Call InferenceSession's constructor so that it records the placement and never falls back."""
    with recording(options) as with_entry:
        construct(model, with_entry, providers=providers, enable_fallback=0, **kwargs)


def _chosen_for(
    model: ModelSource, request: SessionRequest, requested: ProviderList, capability: tuple[int, int] | None
) -> dict[str, tuple[str, str]]:
    if request.kwargs:  # they change how the graph is optimised
        return {}
    options = request.sess_options
    layout = options_for_layout(model, requested, options, capability)
    threads = options_with_few_threads(model, requested, options, is_network_of_images=bool(layout))
    return {**(layout or options_without_handles(model, requested, options)), **threads}


def _takes_weights(construct: Callable[..., None], request: SessionRequest, final: ProviderList) -> bool:
    """Return False if the caller passed SessionOptions, uses other providers, or patches the constructor.

    SessionOptions would keep the weights for the next session. TensorRT may read weights at any time. A tracer that
    patches the constructor expects the model that the caller named.
    """
    if request.sess_options is not None or not {CUDA, CPU}.issuperset(final.names):
        return False
    return is_onnxruntimes(_behind_the_guard(construct))


def _behind_the_guard(construct: Callable[..., None]) -> Any:
    function = getattr(construct, "__func__", None)
    while type(function) is FunctionType and function.__globals__.get("__name__") == _GUARD:
        function = function.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it
    return function


_GUARD = f"{__package__}.guard.guard"


def _name_model(session: Any, model: ModelSource, options: Any) -> None:
    """Set the attributes that InferenceSession would have if the caller's model had been passed to it directly."""
    in_bytes = isinstance(model, bytes)
    session.__dict__.update(
        _model_path=None if in_bytes else os.fspath(model),
        _model_bytes=model if in_bytes else None,
        _sess_options_initial=options,
    )
