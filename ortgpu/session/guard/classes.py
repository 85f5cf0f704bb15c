"""Classes for sessions that the guard opened: subclasses of both the original class and GPUSession."""

from __future__ import annotations

from typing import Any, cast

from ...errors import GPUError
from ...process.background import fork_safe_lock, this_thread
from ...provider.interfaces import Session
from ...provider.lifetime import refuse_if_unusable
from ...provider.living import register
from ...running.onnxruntimes import InferenceSession
from ..failures import hide_own_frames
from ..gpu_session import GPUSession
from ..guard_policy import attainable, judge
from ..reopening import has_own_state, reduced, set_class, unchanged_on_error
from ..request import OWN, misspelt
from .exemptions import is_exempt
from .verification import is_on_plugin

_lock = fork_safe_lock()


class GuardedSession(GPUSession):
    """A GPUSession in place of the InferenceSession that a library requested. It behaves as the library expects."""

    _guards: type[Any]

    # A class may call its constructor again, for instance to load another model.
    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        if judge(providers, provider_options, sess_options) == "guarded" and not is_exempt(self, path_or_bytes):
            open_verified(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            return
        self._open_unverified(path_or_bytes, sess_options, providers, provider_options, **kwargs)

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Open the model again with these providers. Without CUDA the session gets its original class back."""
        verdict = judge(providers, provider_options)
        if verdict == "guarded":
            open_again(self, providers, provider_options)
            return
        refuse_if_unusable(self)
        request = self._request
        # Without the fallback an error is raised, as InferenceSession.set_providers does.
        others = {**request.others, "enable_fallback": 0}
        self._open_unverified(_model_of(self), request.sess_options, providers, provider_options, **others)
        if not issubclass(type(self), GPUSession):
            InferenceSession.enable_fallback(self)
            register(self, "cpu" if verdict == "cpu" else "other")  # The guard may be uninstalled.

    def _open_unverified(self, *arguments: Any, **kwargs: Any) -> None:
        """Give the session its original class, and open it. The guard may verify it again.

        An error leaves the session unchanged.
        """
        with unchanged_on_error(self):
            set_class(self, self._guards)
            for name in self._own_names:  # Otherwise sessions() would show the device of the verified session.
                self.__dict__.pop(name, None)
            InferenceSession.__init__(self, *arguments, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the session as its original class does, with the original class in the result."""
        reduction = super().__reduce_ex__(protocol)
        if not isinstance(reduction, tuple):
            return reduction
        function, arguments, *rest = reduction
        function, *arguments = (
            self._guards if argument is type(self) else argument for argument in (function, *arguments)
        )
        return function, tuple(arguments), *rest

    def __reduce__(self) -> tuple[Any, ...]:
        """Reduce a plain session to a GPUSession, and one of a subclass to the state that the subclass defines.

        The GPUSession is verified when it opens. A subclass without a state of its own cannot be pickled.
        """
        cls = self._guards
        if cls is InferenceSession:
            return reduced(self, GPUSession)
        if not has_own_state(cls):
            raise TypeError(f"cannot pickle {cls.__name__!r} object")
        return object.__new__, (cls,), self.__getstate__()


def guarded_class(cls: type[Any]) -> type[Any]:
    """Return the subclass of ``cls`` and GPUSession, with the name of ``cls``.

    It stays the same class for as long as it has sessions.
    """
    if issubclass(cls, GuardedSession):
        return cls
    with this_thread.holds, _lock:
        for subclass in GuardedSession.__subclasses__():
            if subclass._guards is cls and cls in subclass.__mro__:
                return cast("type[Any]", subclass)
        names = {"_guards": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        metaclass: Any = type(cls)
        guarded: type[Any] = metaclass(cls.__name__, (GuardedSession,), names)
        if cls is not InferenceSession:
            bases = (cls, GuardedSession)
            # The bases are set afterwards: the __init_subclass__ of cls may register classes, or need arguments.
            try:
                guarded.__bases__ = bases
            except TypeError:  # The layouts differ: cls has slots, or an abstract or generic class comes first.
                guarded = metaclass(cls.__name__, bases, names)
        return guarded


def open_verified(
    session: object, model: Any, sess_options: Any, providers: Any, provider_options: Any, **kwargs: Any
) -> None:
    """Make ``session`` a GPUSession. After an error it has its original class again, and no open session."""
    for name in (*OWN, *misspelt(kwargs)):
        kwargs.pop(name, None)  # InferenceSession ignores these arguments, too.
    kwargs.pop("enable_fallback", None)  # 1 is the default of InferenceSession
    providers, provider_options = attainable(providers, provider_options)
    before = type(session)
    set_class(session, guarded_class(before))
    try:
        GPUSession.__init__(cast("GPUSession", session), model, sess_options, providers, provider_options, **kwargs)
    except BaseException:
        set_class(session, before)
        raise


def open_again(session: Session, providers: Any, provider_options: Any) -> None:
    """Open the model of ``session`` again with other providers, and verify it. An error leaves it unchanged."""
    refuse_if_unusable(session)
    with unchanged_on_error(session):
        open_verified(session, _model_of(session), session._sess_options_initial, providers, provider_options)


def _model_of(session: Session) -> str | bytes | None:
    return session._model_path if session._model_path is not None else session._model_bytes


def construct(session: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Construct a session as a GPUSession, with the arguments of InferenceSession."""
    try:
        open_verified(session, *arguments, **kwargs)
    except GPUError as error:
        raise hide_own_frames(error) from error.__cause__


def set_providers(session: Any, original: Any, providers: Any, provider_options: Any) -> None:
    """Give a session other providers. Make it a GPUSession unless it runs on another GPU provider."""
    with unchanged_on_error(session):
        if judge(providers, provider_options) == "plugin":
            original(session, providers, provider_options)
            if is_on_plugin(session):
                return
        try:
            open_again(session, providers, provider_options)
        except GPUError as error:
            raise hide_own_frames(error) from error.__cause__
