"""The table of living sessions, and the events that take the GPU from them: a fork, a sticky CUDA error, a reset.

While a session works, a run only asks for the number of the thread's CUDA context. After such an event a
stand-in replaces the C++ session inside each live GPUSession. It raises the reason at every use, so the next call of
any method reports it.
"""

from __future__ import annotations

import ctypes
import os
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

from ..environment.gpu.cuda import RESULT_NAMES, context_error, context_id, context_question, initialised_in
from ..errors import Fix, ForkedSessionError, GPUError, PoisonedContextError, ProviderFailureError, manual, python
from .devices import Device
from .interfaces import Opened

E = TypeVar("E", bound=Exception)

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY: a working context has no memory for a new stream
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: cuInit in a process forked from one that had called it
CONTEXT_IS_DESTROYED = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED

_poison: GPUError | None = None
_forked_from: int | None = None  # pid of the parent, if CUDA may have been in use at the fork


# These attributes of an InferenceSession keep the C++ session and its options alive, in all releases since 1.18.
HELD_BY_ONNXRUNTIME = (
    "_sess", "_inputs_meta", "_outputs_meta", "_overridable_initializers", "_input_meminfos", "_output_meminfos",
    "_input_epdevices", "_model_meta", "_sess_options", "_profiling_start_time_ns",
)  # fmt: skip


class UnusableSession:
    """A stand-in for the C++ session of an unusable session: any use of it raises a fresh copy of ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def _refuse(self, *_: object) -> NoReturn:
        raise fresh_copy(self.error)

    __getattr__ = __getitem__ = __iter__ = __len__ = _refuse


def fresh_copy(error: E) -> E:
    rebuild, arguments = cast("tuple[Any, tuple[Any, ...]]", error.__reduce__()[:2])
    copy: E = rebuild(*arguments)
    return copy


def error_of(session: Opened) -> Exception | None:
    """Return the error that every use of a session raises after it closed, lost the GPU or failed to open."""
    inner = vars(session).get("_sess")
    return inner.error if isinstance(inner, UnusableSession) else None


def device_of(session: object) -> Device:
    """Return the device of a verified session, even if a subclass redefines it. Raises KeyError for other sessions."""
    attributes = vars(session)
    device = attributes.get("device")
    if isinstance(device, Device):
        return device
    verified: Device = attributes["_verified"].device
    return verified


def is_on_gpu(session: object) -> bool:
    try:
        return device_of(session).is_gpu
    except KeyError:
        return False


SessionKind = Literal["GPUSession", "guarded", "cpu", "other", "unguarded"]


@dataclass(slots=True)
class Entry:
    """A living session. ``kind`` None: the library's own session; ``ortgpu.sessions()`` does not list it.

    ``context`` is the ordinal of the GPU and the number of the CUDA context at opening.
    """

    session: weakref.ref[Opened]
    kind: SessionKind | None
    created_by: str | None
    pid: int
    context: tuple[int, int] | None


table: dict[int, Entry] = {}  # Keys are id(), since subclasses may define __eq__ and __hash__. Oldest first.


def watch(session: Opened, kind: SessionKind | None = None, created_by: str | None = None) -> None:
    """Make a session refuse once the process loses the GPU. Held weakly. An "unguarded" session is only listed."""
    key = id(session)
    context = None
    if kind != "unguarded" and is_on_gpu(session):
        ordinal = device_of(session).ordinal or 0
        number = context_id(ordinal)
        context = (ordinal, number) if number else None
    entry = table.get(key)
    if entry is not None and entry.session() is session:  # opened again, with other providers
        entry.kind, entry.context = kind, context
        return

    def forget(_reference: object, table: dict[int, Entry] = table, key: int = key) -> None:
        table.pop(key, None)  # ``table`` is an argument: at exit the names of modules are None.

    table[key] = Entry(weakref.ref(session, forget), kind, created_by, os.getpid(), context)


def _watched() -> list[Opened]:
    """Return the sessions that stop working after a fork or the loss of the GPU."""
    return [
        session
        for entry in list(table.values())
        if entry.kind != "unguarded" and (session := entry.session()) is not None
    ]


def has_lost_context(session: Opened) -> bool:
    """Return True if a session's CUDA context was destroyed. False: the context exists, or is unknown."""
    entry = table.get(id(session))
    if entry is None or entry.context is None:
        return False
    ordinal, context = entry.context
    return context_id(ordinal) not in (context, None)


class ContextCheck(NamedTuple):
    """A check for a reset of the GPU that takes a fraction of a microsecond.

    ``ask()`` returns 0 and writes ``number``. The number is ``expected`` in a thread with the CUDA context of the
    session. Another number, or a failure, is no proof: the thread may have used another GPU, or none.
    """

    ask: Callable[[], int]
    number: ctypes.c_ulonglong
    expected: int


def context_check(session: Opened) -> ContextCheck | None:
    """Return the check for a watched session. None on the CPU, or if the driver numbers no contexts."""
    entry = table.get(id(session))
    question = context_question() if entry is not None and entry.context is not None else None
    if entry is None or entry.context is None or question is None:
        return None
    return ContextCheck(*question, entry.context[1])


def refuse_after_reset(session: Opened, check: ContextCheck | None) -> None:
    """Raise the error of a session if the GPU was reset: a run would use freed memory and crash."""
    if check is not None and (check.ask() or check.number.value != check.expected):
        refuse_if_unusable(session)


def refuse_if_lost() -> None:
    """Raise the PoisonedContextError or ForkedSessionError that keeps this process from ever using the GPU again."""
    if _poison is not None:
        raise fresh_copy(_poison)
    creator = initialised_in()
    if creator is not None and creator != os.getpid():
        raise forked_from(creator)


def refuse_if_closed(session: Opened) -> None:
    """Raise the error of ``session`` if it is closed, or known to have lost the GPU. Does not ask the driver."""
    error = error_of(session)
    if error is not None:
        raise fresh_copy(error)


#: Replaces a session's check, so that its next use opens the C++ session again. See ``reopening.reopen``.
OUTDATED = ContextCheck(lambda: 1, ctypes.c_ulonglong(), 0)


def refuse_if_gone(session: Opened) -> None:
    """Raise the error of a session that is closed or lost the GPU."""
    refuse_if_closed(session)
    gone = context_is_gone(session, "this process has another CUDA context now than when the session was opened")
    if gone is not None:
        raise fresh_copy(gone)  # Raising ``gone`` would make a reference cycle with this frame.


def refuse_if_unusable(session: Opened) -> None:
    """Raise the error of a session that is closed or lost the GPU. Open the C++ session again if it is outdated.

    That waits for the session's runs, so a run must not call this function. It may call :func:`refuse_if_gone`.
    """
    refuse_if_gone(session)
    if vars(session).get("_gpu_context") is OUTDATED:
        reopen: Callable[[], None] = session._gpu_reopen  # type: ignore[attr-defined]  # only a GPUSession is outdated
        reopen()


def forked_error(code: int | None) -> ForkedSessionError | None:
    """Return the error if ``cuInit`` gave ``code`` because the parent process had used CUDA before the fork."""
    if _forked_from is None or code != _NOT_INITIALIZED:
        return None
    return forked(
        "CUDA was used before this process was forked, it seems, and CUDA does not survive a fork",
        f"cuInit returned {code} (CUDA_ERROR_NOT_INITIALIZED), as it does where the parent had initialised CUDA; "
        f"process {_forked_from} was forked, this is process {os.getpid()}",
        _forked_from,
        manual("or do what `ortgpu doctor` says, if nothing used CUDA before the fork"),
    )


def let_go_of_variables(error: BaseException) -> None:
    """Clear the frames of an error and its causes. They would keep GPU memory until a garbage collection."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


def noted(error: GPUError) -> GPUError:
    """Return ``error``. After the first sticky error, every session of the process refuses."""
    global _poison
    if isinstance(error, PoisonedContextError) and _poison is None:
        _poison = fresh_copy(error)
        refuse_all(error)
    return error


def context_is_gone(session: Opened, evidence: str) -> GPUError | None:
    """Return an error if something reset the GPU. Every session that lost its context refuses from now on.

    Another library may reset the GPU (numba's ``Device.reset()``, ``cudaDeviceReset``, ``cuDevicePrimaryCtxReset``).
    Then all memory and streams of the process on this GPU are gone. CUDA reports the loss at a later call, by varying
    codes. Code that writes into pinned memory or destroys a session crashes.
    """
    if not has_lost_context(session):
        return None
    error = context_destroyed([evidence])
    for watched_session in _watched():
        if abandon_if_context_is_gone(watched_session):
            refuse(watched_session, error)
    return error


def context_destroyed(evidence: list[str]) -> ProviderFailureError:
    """Return the error for a session that lost its memory on the GPU, while the GPU and the process are well."""
    return ProviderFailureError(
        "something in this process reset the GPU, and this session's data there is lost",
        evidence=evidence,
        fixes=[
            manual("open the session again"),
            manual(
                "and reset no device while sessions are open: numba's Device.reset() and cuda.close(), "
                "cudaDeviceReset(), cuDevicePrimaryCtxReset(); close() gives a session's memory back"
            ),
        ],
        library="CUDA",
        status=RESULT_NAMES[CONTEXT_IS_DESTROYED],
    )


_abandoned: list[list[Any]] = []  # Objects such as streams live for ever here: their destructors would crash.


def abandon_if_context_is_gone(session: Opened) -> bool:
    """Leave a session's objects in a lost context unused and never free them. Return True if its context is lost."""
    inner = vars(session).get("_sess")
    if inner is None or isinstance(inner, UnusableSession) or not has_lost_context(session):
        return False
    _never_destroy(inner)
    attributes = vars(session)
    if attributes.get("_pinned") is not None:
        attributes["_pinned"].abandon()
    _abandoned.append([attributes.get(name) for name in ("_gpu_runner", "_pinned", "_stream")])
    attributes.pop("_gpu_runner", None)
    return True


def gpu_works(ordinal: int | None) -> bool:
    """Return True if the driver says that this process can use a GPU with open sessions."""
    return context_error(ordinal or 0) in (0, OUT_OF_MEMORY)


def refuse(session: Opened, error: GPUError) -> None:
    """Make every later use of a session raise ``error``: its GPU is lost."""
    inner = vars(session).get("_sess")
    if inner is not None and not isinstance(inner, UnusableSession):
        _never_destroy(inner)  # The destructor would call the lost CUDA and abort.
        # The copy has no traceback, so it keeps no variables of the failed call.
        session._sess = UnusableSession(fresh_copy(error))


def refuse_from_the_start(session: Opened, error: Exception) -> None:
    """Make every use of a session raise ``error``, the reason for its failure to open."""
    vars(session).update(dict.fromkeys(HELD_BY_ONNXRUNTIME, UnusableSession(error.with_traceback(None))))


def _never_destroy(inner: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def refuse_all(error: GPUError) -> None:
    for session in _watched():
        if is_on_gpu(session):
            refuse(session, error)


def forked_from(creator: int) -> ForkedSessionError:
    return forked(
        "CUDA was used before this process was forked, and CUDA does not survive a fork",
        f"CUDA was initialised in process {creator}; this is process {os.getpid()}",
        creator,
    )


def forked(summary: str, evidence: str, creator: int, *fixes: Fix) -> ForkedSessionError:
    return ForkedSessionError(
        summary,
        evidence=[evidence],
        fixes=[
            python('multiprocessing.set_start_method("spawn")'),
            manual("or open the first session after the fork (gunicorn without --preload, uWSGI with --lazy-apps)"),
            *fixes,
        ],
        creator_pid=creator,
        pid=os.getpid(),
    )


def _after_fork_in_child() -> None:
    global _forked_from
    _forked_from = os.getppid()
    refuse_all(forked_from(_forked_from))
    for session in _watched():
        # A session on the CPU keeps working; its destructor would wait for threads that stayed in the parent.
        _never_destroy(vars(session).get("_sess"))
    if _LIBC is not None:
        # The process ends without the C++ destructors that run after Python. Since 1.29 ONNX Runtime has a thread for
        # telemetry. The thread stays in the parent, and a destructor in the child waits for it for ever.
        leave, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (_LIBC._exit, _LIBC.fflush))
        # The last registration is called first: all streams are flushed, then the process ends with its status.
        _LIBC.on_exit(leave, None)
        _LIBC.__cxa_atexit(flush, None, None)


_LIBC: ctypes.CDLL | None = None  # glibc only; looked up before a fork, since a forked child should not call the loader
if hasattr(os, "register_at_fork"):
    _LIBC = ctypes.CDLL(None)
    if not all(hasattr(_LIBC, name) for name in ("on_exit", "__cxa_atexit", "_exit", "fflush")):
        _LIBC = None
    os.register_at_fork(after_in_child=_after_fork_in_child)
