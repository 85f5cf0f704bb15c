"""The guard's decision about a session, when it is constructed or gets other providers."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from ...environment.packages.plugins import CUDA, listed_accelerators
from ...process.late import late
from ...provider.interfaces import Opened, Session
from ...provider.living import register
from ...provider.requests import CPU
from ...running.onnxruntimes import InferenceSession
from ..guard_policy import is_of_backend_on_cpu, judge
from ..request import cpu_is_allowed_by_variable

if TYPE_CHECKING:
    from .. import allowed_cpu, verifying
else:
    allowed_cpu = late("ortgpu.session.allowed_cpu")
    verifying = late("ortgpu.session.verifying")


def construct(
    session: Any, original: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
) -> bool:
    """Construct a session as ``original`` does. Return False if it is to be a GPUSession instead.

    ``arguments`` are the model, the SessionOptions, the providers and their options. ``caller`` is the frame that calls
    the constructor.
    """
    model, sess_options, providers, provider_options = arguments
    verdict = judge(providers, provider_options, sess_options)
    if verdict == "guarded" and is_of_backend_on_cpu(caller):
        verdict = "cpu"
    if verdict == "guarded":
        return False
    if verdict == "plugin":
        original(session, *arguments, **{**kwargs, "enable_fallback": 0})
        if not is_on_plugin(session):
            return False
        verdict = "other"
    elif verdict == "carried":
        original(session, model, sess_options, **{**kwargs, "enable_fallback": 0})
        session.disable_fallback()  # Releases before 1.23 ignore the argument enable_fallback.
        _check_carried(session)
        verdict = "other"
    else:
        original(session, *arguments, **kwargs)
    register(session, verdict)
    return True


def set_providers(session: Any, original: Any, providers: Any, provider_options: Any) -> bool:
    """Give a session other providers as ``original`` does. Return False if it is to be a GPUSession with them."""
    if judge(providers, provider_options) in ("guarded", "plugin"):
        return False
    original(session, providers, provider_options)
    return True


def note(session: Opened, *request: Any) -> None:
    """List an unguarded session in ortgpu.sessions() if it asked for CUDA or named no provider."""
    verdict = judge(*request)
    if verdict == "guarded" or (verdict == "plugin" and not is_on_plugin(session)):
        register(session, "unguarded")


def is_on_plugin(session: Opened) -> bool:
    """Return True if a session runs on a registered GPU provider other than CUDA."""
    return not (listed_accelerators() - {CUDA}).isdisjoint(vars(session).get("_providers") or ())


def _check_carried(session: Session) -> None:
    """Raise ProviderRequestError if the SessionOptions left a session on the CPU; warn if ORTGPU_ALLOW_CPU is set."""
    if tuple(InferenceSession.get_providers(session)) != (CPU,):
        return
    if not cpu_is_allowed_by_variable():
        raise verifying.missing_cuda_error((CPU,))
    allowed_cpu.warn_of_cpu(session, verifying.missing_cuda_error((CPU,)), session._model_path or b"")
