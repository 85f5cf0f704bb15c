"""Sessions that travel between processes: what opens them again, and the attributes that a subclass gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import session_options

if TYPE_CHECKING:
    from .session import GPUSession


def reduced(session: GPUSession) -> tuple[Any, ...]:
    """For ``__reduce__``: the model and the arguments, and as state what is neither ours nor ONNX Runtime's."""
    request = session._request
    arguments = (
        request.model,
        session_options.state_of(request.sess_options),
        request.providers,
        request.provider_options,
    )
    settings = {
        "device": request.device,
        "cpu_nodes": request.cpu_nodes,
        "allow_cpu": session._allow_cpu,
        "cuda_graph": request.cuda_graph,
        "pinned_memory_limit": session._pinned_memory_limit,
        **request.kwargs,
    }
    state = {name: value for name, value in vars(session).items() if name not in session._own_names}
    return _opened_again, (type(session), arguments, settings), state or None


def _opened_again(cls: type[GPUSession], arguments: tuple[Any, ...], settings: dict[str, Any]) -> GPUSession:
    model, options, providers, provider_options = arguments
    session = cls.__new__(cls)
    session._open_again(model, session_options.from_state(options), providers, provider_options, **settings)
    return session
