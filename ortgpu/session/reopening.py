"""Open sessions again: from a pickle, with other providers, or because a run left its convolutions in a bad state."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ..environment.packages.plugins import tell
from ..errors import ExecutionError, GPUOutOfMemoryError, InsufficientDeviceMemoryError, manual
from ..model.files import stamp_of
from ..process.background import fork_safe_lock, this_thread
from ..provider import lifetime
from ..provider.interfaces import VerifiedSession
from ..provider.lifetime import refuse_from_the_start
from ..provider.options import Carried, carries_providers
from ..provider.runtime import load_runtime
from .request import FACTS, SessionRequest

if TYPE_CHECKING:
    from ..running.memory import Holdings

_RECEIVERS = ("multiprocessing", "multiprocess")  # The second pickles by dill.
_PICKLERS = ("pickle", "dill", "cloudpickle")


class Reopened(VerifiedSession, Protocol):
    """A GPUSession that can be opened again."""

    _own_names: frozenset[str]

    def __getstate__(self) -> object: ...
    def _open_request(self, request: SessionRequest) -> None: ...
    def close(self) -> None: ...


def reduced(session: Reopened, cls: type[Any]) -> tuple[Any, ...]:
    """Return the value of ``__reduce__``: the request for a ``cls``, with the attributes of the subclass as state.

    A class with its own ``__getstate__`` and ``__setstate__`` opens itself again. A CUDA plugin that this program has
    registered is named. Raises TypeError if the SessionOptions carry execution providers. To pickle the value raises
    ProviderRequestError if no function makes the SessionOptions.
    """
    arrival = load_runtime().arrival
    plugin = arrival.library if arrival is not None and arrival.way == "registered by the program" else None
    if has_own_state(cls) and hasattr(cls, "__setstate__"):
        return _empty, (cls, plugin), session.__getstate__()
    if carries_providers(session._request.sess_options):
        raise TypeError(f"cannot pickle {cls.__name__!r} object: its SessionOptions carry execution providers")
    state = {name: value for name, value in vars(session).items() if _is_added(session, name, value)}
    request = {field.name: getattr(session._request, field.name) for field in fields(SessionRequest)}
    del request["is_guarded"]  # a GPUSession opens it
    options = Carried(request.pop("sess_options"), request.pop("make_options"))
    return _opened_again, (cls, request, options, plugin), state or None


def _is_added(session: Reopened, name: str, value: Any) -> bool:
    if name in FACTS:  # a subclass may use these names for other values
        return value is not getattr(session._verified, name)
    return name not in session._own_names


def has_own_state(cls: type[Any]) -> bool:
    # Python 3.11 added object.__getstate__.
    return getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)


def _empty(cls: type[Any], plugin: str | None) -> Any:
    if plugin is not None:
        tell(plugin)
    return object.__new__(cls)


def _opened_again(cls: type[Any], request: dict[str, Any], options: Carried, plugin: str | None) -> Any:
    session = _empty(cls, plugin)
    session_request = SessionRequest(**request, sess_options=options.options, make_options=options.make)
    try:
        sess_options = options.make() if options.make is not None else options.options
        session._open_request(replace(session_request, sess_options=sess_options))
    except Exception as error:
        if not _is_received(sys._getframe(1)):
            raise
        session._request = session_request  # The session pickles again. It may open in another process.
        refuse_from_the_start(session, error)
        session._own_names = frozenset((*vars(session), "_own_names"))
    return session


def _is_received(reader: FrameType | None) -> bool:
    """Return True if ``multiprocessing`` unpickles, out of a queue or a pipe.

    An error there ends a worker, or the thread that collects results, and ``Pool`` waits for ever.
    """
    while reader is not None and _package_of(reader) in _PICKLERS:
        reader = reader.f_back
    return reader is not None and _package_of(reader) in _RECEIVERS


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def set_class(session: object, cls: type[Any]) -> None:
    """Set the class of a session, bypassing a ``__setattr__`` that its class may define."""
    object.__setattr__(session, "__class__", cls)


@contextlib.contextmanager
def unchanged_on_error(session: object) -> Iterator[None]:
    """Restore an InferenceSession, its class and its attributes, if the block raises."""
    cls, attributes = type(session), dict(vars(session))
    pinned = vars(session).pop("_pinned", None)  # Opening the session again would close it.
    try:
        yield
    except BaseException:
        set_class(session, cls)
        vars(session).clear()
        vars(session).update(attributes)
        raise
    if pinned is not None:
        pinned.close()


_reopening = fork_safe_lock()
_at_work: list[object] = []  # the session that is opening again


class _Awaited:
    """The stand-in for an attribute that keeps the C++ session alive. A use waits until the session is open again."""

    def __init__(self, session: Reopened, name: str) -> None:
        self._session, self._name = weakref.ref(session), name

    def _new(self) -> Any:
        session = self._session()
        with this_thread.holds, _reopening:
            new = vars(session).get(self._name) if session is not None else None
        if new is None or isinstance(new, _Awaited):
            raise ExecutionError("this session could not be opened again after a run was out of memory")
        return new

    def __getattr__(self, name: str) -> Any:
        return getattr(self._new(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._new()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._new())

    def __len__(self) -> int:
        return len(self._new())


def reopen(session: Reopened) -> None:
    """Open the C++ session of an outdated session again. The former one is freed first: a budget has no room for two.

    If the session has a budget, this waits for runs of other threads. Otherwise they end with the former C++ session.

    Raises:
        GPUOutOfMemoryError: the GPU has no room now. The next use tries again.
        ExecutionError: the model's file was changed or removed. The session is closed.
        GPUError: as the constructor raises.
    """
    with this_thread.holds, _reopening:
        # Another thread may have opened it again, or this thread may be opening it.
        if session._gpu_context is not lifetime.OUTDATED or any(other is session for other in _at_work):
            return
        request, holdings = session._request, session._holdings
        if not isinstance(request.model, bytes) and stamp_of(request.model) != session._model_stamp:
            session.close()
            raise ExecutionError(
                "a run was out of memory, and this session cannot be opened again, as its model's file has changed",
                evidence=[f"{request.model!s}: changed or removed since the session was opened"],
                fixes=[manual("open a new GPUSession")],
            )
        changes: dict[str, Any] = {
            "device": lifetime.device_of(session).ordinal,
            "allow_cpu": False,
            "cpu_nodes": "allow",
            "tuned": request.tuned if request.tuned != "now" else True,
        }
        again = replace(request, **changes)
        if holdings is not None and holdings.turns is not None:  # Wait for the run at work, and keep others waiting.
            holdings.turns.run_in_turn(_open_again, session, again, holdings)
        else:
            _open_again(session, again, holdings)
        session._request = replace(session._request, **{name: getattr(request, name) for name in changes})


def _open_again(session: Reopened, request: SessionRequest, holdings: Holdings | None) -> None:
    names = [name for name in lifetime.HELD_BY_ONNXRUNTIME if name in vars(session)]
    vars(session).update({name: _Awaited(session, name) for name in names})
    session._gpu_runner.let_go()
    if holdings is not None:
        holdings.give_back()
    _at_work.append(session)
    try:
        with unchanged_on_error(session):
            session._open_request(request)
    except InsufficientDeviceMemoryError as error:
        raise GPUOutOfMemoryError(
            "the GPU has no room now to open this session again after a run was out of memory",
            evidence=error.evidence,
            fixes=error.fixes,
            requested=error.requested,
            free=error.free,
            total=error.total,
        ) from error
    finally:
        _at_work.clear()
