"""Typed errors for runs that failed, made from ONNX Runtime's exceptions and messages.

An IOBinding copies inputs to the GPU and outputs back without any method of its session. It can therefore run out of
GPU memory or meet a sticky CUDA error by itself, so its methods raise the same errors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from onnxruntime.capi.onnxruntime_inference_collection import IOBinding  # a tracer may replace the public name

from ..diagnosis.messages.runtime_words import telling_line
from ..environment.gpu.cuda import initialised_in
from ..errors import (
    GPUError,
    GPUOutOfMemoryError,
    LibraryNotFoundError,
    PoisonedContextError,
    ProviderFailureError,
    manual,
)
from ..process.background import may_wait, this_thread
from ..process.late import late
from ..process.threads import drop_own_frames
from ..provider import lifetime
from ..provider.interfaces import Opened
from ..running.memory import give_back
from ..running.streams import streams_of, wait_for_caller
from .budget import exceeded
from .chosen import missing_handle_error

if TYPE_CHECKING:
    from ..diagnosis.checks import classifier
else:
    classifier = late("ortgpu.diagnosis.checks.classifier")

Raised = TypeVar("Raised", bound=BaseException)

logger = logging.getLogger("ortgpu")

# ONNX Runtime's Conv and ConvTranspose note the shape of their input, then allocate the output, and then plan for the
# shape (UpdateState in conv.cc, as of 2021 and 2024). If there is no memory for the output, the shape is noted without
# a plan. The next run of the same shape then uses the plan of an earlier shape. On an H100, 1.31.1 returned wrong
# results without an error. Without an earlier plan each run raised.
_IN_CONVOLUTION = re.compile(r"while running \w*Conv\w* node")


def explained(session: Opened, error: Exception) -> Exception:
    """Return the error to raise for an exception of a running session.

    It is a typed error with the exception as its cause, or the exception itself if it is not about the GPU.
    """
    if isinstance(error, GPUError):
        return hide_own_frames(error)
    earlier_error = lifetime.error_of(session)
    if earlier_error is not None:  # ONNX Runtime used the stand-in without calling it.
        return lifetime.fresh_copy(earlier_error)
    if not isinstance(error, RuntimeError) and not type(error).__module__.startswith("onnxruntime."):
        return error  # The arguments are wrong, or the caller's own objects raised it.
    creator = initialised_in()
    # A server may fork without notifying Python.
    if creator not in (None, os.getpid()) and lifetime.is_on_gpu(session):
        forked_unseen = lifetime.forked_from(creator)
        lifetime.refuse_all(forked_unseen)
        forked_unseen.__cause__ = error
        return forked_unseen
    explanation = _found(session, str(error), type(error).__name__)
    if explanation is None:
        return error
    lifetime.let_go_of_variables(error)
    explanation.__cause__ = error
    return hide_own_frames(lifetime.noted(explanation))


def explained_run(session: Opened, error: Exception) -> Exception:
    """Return the error to raise for a run that failed. After a wrong plan, the next use opens the session again."""
    explanation = explained(session, error)
    if isinstance(explanation, GPUOutOfMemoryError):
        _look_for_wrong_plan(session, str(explanation.__cause__))
    return explanation


def _look_for_wrong_plan(session: Opened, text: str) -> None:
    if _IN_CONVOLUTION.search(text):
        _outdate(session)


def _outdate(session: Opened) -> None:
    """Have the next use of a session open it again."""
    vars(session)["_gpu_context"] = lifetime.OUTDATED
    runner: Any = vars(session).get("_gpu_runner")
    if runner is not None:
        runner.caller = ()  # It asks for the session's former context.


def call_again(session: Any, error: Exception, call: Callable[[], Any], *, is_bound: bool = False) -> Any:
    """Return the result of a second ``call`` if the first ran out of memory and the session has a budget.

    Before the second call the session gives back the memory that no run needs. A call that ``is_bound`` keeps the C++
    session alive. It is not repeated if the C++ session must be opened again: a budget has no room for two.

    Raises:
        Exception: the error to raise for ``error``, or for the error of the second call.
    """
    refusal, answer = explained_run(session, error), None
    try:
        budget = session._holdings.budget if session._holdings is not None else None
        if budget is None or not isinstance(refusal, GPUOutOfMemoryError):
            raise drop_own_frames(refusal)
        if session._holdings.room:  # Plans and graphs go first, and do not come back.
            session._request = replace(session._request, shares_budget=False)
            _outdate(session)
        if not is_bound or session._gpu_context is not lifetime.OUTDATED:
            answer = _repeat(session, call)
            if not isinstance(answer, Exception):
                return answer[0]
            refusal = answer
        if not isinstance(refusal, GPUOutOfMemoryError):
            raise refusal
        raise exceeded(refusal, session, budget) from refusal.__cause__
    finally:
        del refusal, answer, error  # The error and this frame, in its traceback, must not refer to each other.


def _repeat(session: Any, call: Callable[[], Any]) -> list[Any] | Exception:
    """Give memory back and make a call in a turn of its own. Return a list with its result, or the error to raise.

    Only one call repeats at a time, so that no other call takes the memory that was given back.
    """
    waits = may_wait()
    with this_thread.holds, session._holdings.retrying:
        while True:
            try:
                lifetime.refuse_if_unusable(session)  # It opens an outdated session again.
            except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
                return explained_run(session, error)
            context, turns = session._gpu_context, session._holdings.turns
            again = functools.partial(_call_in_room, session, call)
            answer = turns.run_in_turn(again) if waits and turns is not None else again()
            if isinstance(answer[0], Exception):
                return answer.pop()  # type: ignore[no-any-return]  # an exception, as this line has seen
            if session._gpu_context is context:
                return answer
            # A run beside this one was out of memory too, and may have left a wrong plan to it.


def _call_in_room(session: Any, call: Callable[[], Any]) -> list[Any]:
    """Give memory back, make a call and return its result, or the error after memory was given back again."""
    give_back(session)
    try:
        return [call()]
    except Exception as error:  # noqa: BLE001 - an error that is not about the GPU is raised unchanged
        answer = [explained_run(session, error)]
    give_back(session)
    return answer


def _found(session: Opened, text: str, exception: str | None) -> GPUError | None:
    gone = lifetime.context_is_gone(session, telling_line(text))
    if gone is not None or not lifetime.is_on_gpu(session):  # On the CPU the same words are about host memory.
        return gone
    error = classifier.explain_run(text, exception, lifetime.device_of(session))
    if isinstance(error, PoisonedContextError) and lifetime.gpu_works(lifetime.device_of(session).ordinal):
        return None  # The words come from a name in the model, for instance the name of an input.
    options = getattr(vars(session).get("_verified"), "options_chosen", {})
    if isinstance(error, (PoisonedContextError, ProviderFailureError)) and "prefer_nhwc" in options:
        without = "if it comes again, do without the layout that a record of `ortgpu tune` has chosen"
        error.fixes = (*error.fixes, manual(f"{without}: GPUSession(model, tuned=False)"))
    if isinstance(error, LibraryNotFoundError) and "enable_cudnn" in options:
        return missing_handle_error(error)
    return error


def hide_own_frames(error: Raised) -> Raised:
    """Return an error without traceback, its causes without frames of this library. At DEBUG the log has all frames."""
    if logger.isEnabledFor(logging.DEBUG):
        # Log the text alone: a handler may keep the error, and the error keeps the half-made session.
        logger.debug("%s", "".join(traceback.format_exception(error)))
    error.__traceback__ = None
    cause = error.__cause__
    while cause is not None:
        cause = drop_own_frames(cause).__cause__
    return error


def note_text(session: Opened, text: str) -> None:
    """Note a failure that ONNX Runtime reports only as text, as :func:`lifetime.noted` does."""
    explanation = _found(session, text, None)
    if explanation is not None:
        lifetime.noted(explanation)
    if isinstance(explanation, GPUOutOfMemoryError):
        _look_for_wrong_plan(session, text)


_METHODS = (
    "bind_cpu_input", "bind_input", "bind_output", "bind_ortvalue_input", "bind_ortvalue_output", "synchronize_inputs",
    "synchronize_outputs", "copy_outputs_to_cpu", "get_outputs", "get_outputs_as_ortvaluevector",
)  # fmt: skip
_TAKING_MEMORY = ("bind_input", "bind_ortvalue_input")
# The position and name of a method's argument that has the shape of an input, or is that shape
_SHAPED = {"bind_cpu_input": (1, "arr_on_cpu"), "bind_input": (4, "shape"), "bind_ortvalue_input": (1, "ortvalue")}


class Binding(IOBinding):  # type: ignore[misc]  # ships no types
    """The IOBinding that ``GPUSession.io_binding`` returns."""

    _of: weakref.ref[Opened]  # The reference is weak, so that a binding does not keep the session.
    _session: Any
    _former: Any  # See move_binding.
    shape: tuple[Any, ...] | None = None  # The shapes of all inputs together; None: unknown.
    _shapes: Mapping[str, Any] = MappingProxyType({})

    def _note_shape(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        session: Any = self._of()
        if session is None or not session._gpu_runner.most_shapes:
            return
        position, name = _SHAPED[method]
        value = arguments[position] if len(arguments) > position else named[name]
        shape = getattr(value, "shape", value)
        with contextlib.suppress(Exception):  # A value may have no shape.
            shape = tuple(shape() if callable(shape) else shape)
            self._shapes = {**self._shapes, arguments[0] if arguments else named["name"]: shape}
            self.shape = tuple(self._shapes.items())

    def _check_context(self) -> None:
        session: Any = self._of()
        if session is not None:
            lifetime.refuse_after_reset(session, session._gpu_context)


def explaining_binding(binding: Any, session: Opened) -> Any:
    """Make ``binding`` raise the typed errors of ``session``. Return it; a binding of another class stays as it is."""
    if type(binding) is IOBinding:
        binding.__class__ = Binding
        binding._of = weakref.ref(session)
    return binding


def move_binding(binding: Any, session: Opened) -> None:
    """Let a binding run with the C++ session that replaced the binding's own.

    The binding keeps its former C++ session until its end, because its memory belongs to that session.
    """
    if isinstance(binding, Binding) and binding._of() is session and binding._session is not session._sess:
        binding._former = binding._session
        binding._session = session._sess


def _wait_for_input(session: Any, name: Any = None, *_: Any, **__: Any) -> None:
    """Wait for the memory of an input if ONNX Runtime copies the input to the host now, and not in the run."""
    streams = streams_of(session) if session is not None else None
    if streams is not None and name in streams.read_on_host:
        wait_for_caller(session)


def _explaining(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(IOBinding, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self._check_context()
            if name in _TAKING_MEMORY:
                _wait_for_input(self._of(), *args, **kwargs)
            bound = getattr(IOBinding, name)(self, *args, **kwargs)
            if name in _SHAPED:
                self._note_shape(name, args, kwargs)
            return bound
        except Exception as error:
            session = self._of()
            if session is None:
                raise
            return call_again(session, error, functools.partial(getattr(IOBinding, name), self, *args, **kwargs))

    return call


for _name in _METHODS:
    if hasattr(IOBinding, _name):
        setattr(Binding, _name, _explaining(_name))
