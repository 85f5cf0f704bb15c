"""Pickling of sessions: the arguments that open them again, and the attributes that a subclass added."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from types import MemberDescriptorType
from typing import Any, Protocol

from ..provider.options import Carried
from .request import SessionRequest, Verified

_FACTS = frozenset(each.name for each in fields(Verified))


class Reopened(Protocol):
    """The attributes of a GPUSession that are needed to open it again."""

    _request: SessionRequest
    _verified: Verified
    _allow_cpu: bool | None
    _pinned_memory_limit: int
    _own_names: frozenset[str]


def reduced(session: Reopened) -> tuple[Any, ...]:
    """Return the value of ``__reduce__``: model and arguments, with the attributes of the subclass as state.

    A class with its own ``__getstate__`` and ``__setstate__`` opens itself again.
    """
    cls = type(session)
    if has_own_state(cls) and hasattr(cls, "__setstate__"):
        return by_its_state(session, cls)
    arguments, settings = requested(session)
    state = {name: value for name, value in vars(session).items() if _is_added(session, name, value)}
    slots = _in_slots(session)
    return _opened_again, (cls, arguments, settings), (state, slots) if slots else state or None


def requested(session: Reopened) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of the session, with the SessionOptions wrapped in Carried."""
    request = session._request
    arguments = (
        request.model,
        Carried(request.sess_options),
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
    return arguments, settings


def _is_added(session: Reopened, name: str, value: Any) -> bool:
    if name in _FACTS:  # a subclass may use these names for other values
        return value is not getattr(session._verified, name)
    return name not in session._own_names


def _in_slots(session: Reopened) -> dict[str, Any]:
    """Return the values in the slots of its class and base classes, for instance of dataclasses with slots."""
    found: dict[str, Any] = {}
    for cls in type(session).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    found.setdefault(name, member.__get__(session))
    return found


def has_own_state(cls: type[Any]) -> bool:
    return getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)  # from Python 3.11


def by_its_state(session: Any, cls: type[Any]) -> tuple[Any, ...]:
    """Return a reduction by ``__getstate__``, as Python makes it, which unpickles as a ``cls``."""
    return new, (cls, *getattr(session, "__getnewargs__", tuple)()), session.__getstate__()


def new(cls: type[Any], *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


def _opened_again(cls: type[Any], arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    model, options, providers, provider_options = arguments
    session = new(cls)
    session._open_again(model, options.options, providers, provider_options, **settings)
    return session
