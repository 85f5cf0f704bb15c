"""Classes for sessions that the guard opened: subclasses of both the original class and GPUSession."""

from __future__ import annotations

import types
from typing import Any, cast

from ...process.background import fork_safe_lock
from ...running.onnxruntimes import InferenceSession
from ..gpu_session import GPUSession
from ..pickling import by_its_state, has_own_state, new
from ..reopening import set_class
from .policy import judge

_lock = fork_safe_lock()


class GuardedSession(GPUSession):
    """A GPUSession that was requested as an InferenceSession and behaves as the library that made it expects."""

    _guards: type[Any]  # the class that was requested
    _chooses_options = False  # the library chose its options, and may have measured with them

    def __init__(  # a subclass may run its constructor again, for instance to unpickle itself
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        if judge(providers, provider_options, sess_options) == "guarded":
            open_verified(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
        else:
            set_class(self, self._guards)
            InferenceSession.__init__(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Open the model again with these providers, verified. Raises ProviderRequestError for those without CUDA."""
        if judge(providers, provider_options) == "guarded":
            open_again(self, providers, provider_options)
        else:
            super().set_providers(providers, provider_options)


class _Front(InferenceSession):  # type: ignore[misc]  # a session's class can only be changed to one with this base
    """The first base class of a guarded class, before the class that was requested."""

    _guards: type[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing. The method of the requested class may register subclasses or need arguments."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the session as the requested class does, under the name of that class.

        A plain InferenceSession cannot be pickled. It unpickles as a GPUSession, which is verified again.
        """
        cls = self._guards
        for name, arguments in (("__reduce_ex__", (protocol,)), ("__reduce__", ())):
            if getattr(cls, name) is not getattr(InferenceSession, name):
                return _renamed(getattr(cls, name)(self, *arguments), type(self), cls)
        if has_own_state(cls):
            return by_its_state(self, cls)
        if cls is InferenceSession:
            return _renamed(super().__reduce_ex__(protocol), type(self), GPUSession)
        raise TypeError(f"cannot pickle {cls.__name__!r} object")


def _renamed(reduced: Any, before: type[Any], after: type[Any]) -> Any:
    if not isinstance(reduced, tuple):
        return reduced
    function, arguments, *rest = reduced
    if getattr(function, "__name__", "") == "__newobj__":
        function = new  # pickle accepts __newobj__ only with the object's own class
    function, *arguments = (after if one is before else one for one in (function, *arguments))
    return function, tuple(arguments), *rest


def guarded_class(cls: type[Any]) -> type[Any]:
    """Return the guarded class for ``cls``: a subclass of ``cls`` and GPUSession, with the name of ``cls``.

    It is made once for each class and dropped with its last session.
    """
    if issubclass(cls, GuardedSession):
        return cls
    with _lock:
        for known in GuardedSession.__subclasses__():
            if known._guards is cls:
                return cast("type[Any]", known)
        names = {"_guards": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        if _is_laid_out_as_onnxruntimes(cls):
            bases = (_Front, GuardedSession) if cls is InferenceSession else (_Front, cls, GuardedSession)
        else:
            bases, names["__reduce_ex__"] = (cls, GuardedSession), _Front.__reduce_ex__
        made: type[Any] = types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(names))
        return made


def _is_laid_out_as_onnxruntimes(cls: type[Any]) -> bool:
    """Return True if Python can change an object of ``cls`` to a class that begins with _Front.

    It cannot if an abstract or generic class comes before InferenceSession, because the class that adds ``__dict__``
    is then not derived from ``object`` directly.
    """
    adding: Any = cls
    while adding.__base__.__dictoffset__:
        adding = adding.__base__
    return adding.__base__ is object


def open_verified(
    session: Any, model: Any, sess_options: Any, providers: Any, provider_options: Any, **kwargs: Any
) -> None:
    """Open ``session``, an instance of InferenceSession or a subclass, and make it a GPUSession.

    Raises:
        GPUError: as GPUSession raises. The session then has its original class again, and holds nothing.
    """
    from ..arguments import OWN, misspelt
    from ..gpu_session import GPUSession
    from ..reopening import set_class
    from .classes import guarded_class
    from .policy import attainable

    for name in (*OWN, *misspelt(kwargs)):
        kwargs.pop(name, None)  # as InferenceSession does
    kwargs.pop("enable_fallback", None)  # 1 is the default of InferenceSession
    providers, provider_options = attainable(providers, provider_options)
    before = type(session)
    set_class(session, guarded_class(before))
    try:
        GPUSession.__init__(session, model, sess_options, providers, provider_options, **kwargs)
    except BaseException:
        set_class(session, before)
        raise


def open_again(session: Any, providers: Any, provider_options: Any) -> None:
    """Open the model of ``session`` again with other providers, and verify it. An error leaves it unchanged."""
    from ...provider.lifetime import refuse_if_unusable
    from ..reopening import unchanged_on_error

    refuse_if_unusable(session)
    model = session._model_path if session._model_path is not None else session._model_bytes
    with unchanged_on_error(session):
        open_verified(session, model, session._sess_options_initial, providers, provider_options)
