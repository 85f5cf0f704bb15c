"""Typed errors for runs that failed, made from ONNX Runtime's exceptions and messages."""

from __future__ import annotations

import os

from ..environment.gpu.cuda import initialised_in
from ..errors import GPUError, LibraryNotFoundError, PoisonedContextError, ProviderFailureError, manual
from ..provider import lifetime
from ..provider.interfaces import Opened


def explained(session: Opened, error: Exception) -> Exception:
    """Return the error to raise for an exception of a running session.

    It is a typed error with the exception as its cause, or the exception itself if it is not about the GPU.
    """
    if isinstance(error, GPUError):
        return error
    known = lifetime.error_of(session)
    if known is not None:  # ONNX Runtime touched the stand-in without calling it
        return lifetime.fresh_copy(known)
    if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("onnxruntime."):
        return error  # about the arguments, or raised by the caller's own objects
    creator = initialised_in()
    # A server may fork without notifying Python.
    if creator not in (None, os.getpid()) and lifetime.is_on_gpu(session):
        forked_unseen = lifetime.forked_from(creator)
        lifetime.refuse_all(forked_unseen)
        forked_unseen.__cause__ = error
        return forked_unseen
    found = _found(session, str(error), type(error).__name__)
    if found is None:
        return error
    lifetime.let_go_of_variables(error)
    found.__cause__ = error
    return lifetime.noted(found)


def _found(session: Opened, text: str, exception: str | None) -> GPUError | None:
    from ..diagnosis.messages.runtime_words import telling_line

    gone = lifetime.context_is_gone(session, telling_line(text))
    if gone is not None or not lifetime.is_on_gpu(session):  # on the CPU the same words are about host memory
        return gone
    from ..diagnosis import execution

    error = execution.of_run(text, exception, lifetime.device_of(session))
    if isinstance(error, PoisonedContextError) and lifetime.gpu_works(lifetime.device_of(session).ordinal):
        return None  # the words come from a name in the model, for instance of an input
    chosen = getattr(vars(session).get("_verified"), "options_chosen", {})
    if isinstance(error, (PoisonedContextError, ProviderFailureError)) and "prefer_nhwc" in chosen:
        without = "if it comes again, do without the layout that a record of `ortgpu tune` has chosen"
        error.fixes = (*error.fixes, manual(f"{without}: GPUSession(model, tuned=False)"))
    if isinstance(error, LibraryNotFoundError) and "enable_cudnn" in chosen:
        from .chosen import with_a_handle

        return with_a_handle(error)
    return error


def note_text(session: Opened, text: str) -> None:
    """Note a failure, as :func:`lifetime.noted` does, that ONNX Runtime reports only as text."""
    found = _found(session, text, None)
    if found is not None:
        lifetime.noted(found)
