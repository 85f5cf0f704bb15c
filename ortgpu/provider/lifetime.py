"""The table of living sessions, and the events that take the GPU from them: a fork, a sticky CUDA error, a reset.

While a session works, a run only asks for the number of the thread's CUDA context. After such an event the C++ session
inside each live GPUSession is replaced by an object that raises the reason at every use, so that the next call of any
method reports it.
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

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY: for a new stream, in a context that works
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: cuInit in a process forked from one that had called it
CONTEXT_IS_DESTROYED = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED

_poison: GPUError | None = None
_forked_from: int | None = None  # the process that this one was forked from, where CUDA may have been in use


# What keeps the C++ session and its options alive, in an InferenceSession of any release since 1.18
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
    """Return the error that every use of a session raises, once it was closed or lost the GPU, or did not open."""
    inner = vars(session).get("_sess")
    return inner.error if isinstance(inner, UnusableSession) else None


def device_of(session: object) -> Device:
    """Return the device of a verified session, though a subclass may use that name. Raises KeyError for others."""
    held = vars(session)
    device = held.get("device")
    if isinstance(device, Device):
        return device
    verified: Device = held["_verified"].device
    return verified


def is_on_gpu(session: object) -> bool:
    try:
        return device_of(session).is_gpu
    except KeyError:
        return False


SessionKind = Literal["GPUSession", "guarded", "cpu", "other", "unguarded"]


@dataclass(slots=True)
class Entry:
    """A living session. ``kind`` None: one of this library's own, which ``ortgpu.sessions()`` does not list."""

    session: weakref.ref[Opened]
    kind: SessionKind | None
    created_by: str | None
    pid: int
    context: tuple[int, int] | None  # ordinal, and number of the CUDA context that it was opened in


table: dict[int, Entry] = {}  # by id(), since classes of others may compare and hash as they like; oldest first


def watch(session: Opened, kind: SessionKind | None = None, created_by: str | None = None) -> None:
    """Make a session refuse once the process loses the GPU. Held weakly. An "unguarded" one is only listed."""
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
        table.pop(key, None)  # an argument, since a session may outlive modules, whose names are None at the end

    table[key] = Entry(weakref.ref(session, forget), kind, created_by, os.getpid(), context)


def _watched() -> list[Opened]:
    """Return the sessions that a fork or the loss of the GPU concerns."""
    return [
        session
        for entry in list(table.values())
        if entry.kind != "unguarded" and (session := entry.session()) is not None
    ]


def has_lost_context(session: Opened) -> bool:
    """Return True if the CUDA context that a session was opened in was destroyed, False if not or unknown."""
    entry = table.get(id(session))
    if entry is None or entry.context is None:
        return False
    ordinal, context = entry.context
    return context_id(ordinal) not in (context, None)


class ContextCheck(NamedTuple):
    """How a run finds out, in a fraction of a microsecond, that the GPU may have been reset.

    ``ask()`` returns 0 and writes ``number``, which is ``expected`` in a thread whose CUDA context is that of the
    session. Another number, or a failure, is no proof: the thread may have used another GPU, or none.
    """

    ask: Callable[[], int]
    number: ctypes.c_ulonglong
    expected: int


def context_check(session: Opened) -> ContextCheck | None:
    """Return the check for a session that is watched. None on the CPU, or if the driver does not tell."""
    entry = table.get(id(session))
    question = context_question() if entry is not None and entry.context is not None else None
    if entry is None or entry.context is None or question is None:
        return None
    return ContextCheck(*question, entry.context[1])


def refuse_after_reset(session: Opened, check: ContextCheck | None) -> None:
    """Raise the error of a session if the GPU was reset: a run would use memory that is gone, and crash."""
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
    """Raise the error of ``session`` if it is closed, or if it is known that it lost the GPU. Asks no driver."""
    error = error_of(session)
    if error is not None:
        raise fresh_copy(error)


#: In the place of a session's check, so that its next use opens the C++ session again. See ``reopening.reopen``.
OUTDATED = ContextCheck(lambda: 1, ctypes.c_ulonglong(), 0)


def refuse_if_unusable(session: Opened) -> None:
    """Raise the error of a session that is closed or lost the GPU. Open the C++ session again if it is outdated."""
    refuse_if_closed(session)
    gone = context_is_gone(session, "this process has another CUDA context now than when the session was opened")
    if gone is not None:
        raise fresh_copy(gone)  # else it and this frame, in its traceback, would refer to each other
    if vars(session).get("_gpu_context") is OUTDATED:
        reopen: Callable[[], None] = session._gpu_reopen  # type: ignore[attr-defined]  # only a GPUSession is outdated
        reopen()


def forked_error(code: int | None) -> ForkedSessionError | None:
    """Return the error if ``code`` of ``cuInit`` is its answer in a child of a process that had used CUDA."""
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
    """Clear the frames of an error and its causes, which would keep GPU memory until a garbage collection."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__


def noted(error: GPUError) -> GPUError:
    """Return ``error``. If it is the first sticky one, every session of the process refuses from now on."""
    global _poison
    if isinstance(error, PoisonedContextError) and _poison is None:
        _poison = fresh_copy(error)
        refuse_all(error)
    return error


def context_is_gone(session: Opened, evidence: str) -> GPUError | None:
    """Return an error if something reset the GPU. Every session that lost its context refuses from now on.

    Another library may do that (numba's ``Device.reset()``, ``cudaDeviceReset``, ``cuDevicePrimaryCtxReset``). Then all
    memory and streams of the process there are gone. CUDA reports it at some later call, by varying codes, and code
    that writes into pinned memory or destroys a session crashes.
    """
    if not has_lost_context(session):
        return None
    error = context_destroyed([evidence])
    for each in _watched():
        if abandon_if_context_is_gone(each):
            refuse(each, error)
    return error


def context_destroyed(evidence: list[str]) -> ProviderFailureError:
    """Return the error for a session whose memory on the GPU is gone, while the GPU and the process are well."""
    return ProviderFailureError(
        "something in this process reset the GPU, and what this session had there is gone",
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


_abandoned: list[list[Any]] = []  # what may not be destroyed, streams for instance: destructors would crash


def abandon_if_context_is_gone(session: Opened) -> bool:
    """Never destroy, free or use what a session had in a lost context. Return True if its context is lost."""
    inner = vars(session).get("_sess")
    if inner is None or isinstance(inner, UnusableSession) or not has_lost_context(session):
        return False
    _never_destroy(inner)
    held = vars(session)
    if held.get("_pinned") is not None:
        held["_pinned"].abandon()
    _abandoned.append([held.get(name) for name in ("_gpu_runner", "_pinned", "_stream")])
    held.pop("_gpu_runner", None)
    return True


def gpu_works(ordinal: int | None) -> bool:
    """Return True if the driver says that this process can use a GPU on which it has sessions."""
    return context_error(ordinal or 0) in (0, OUT_OF_MEMORY)


def refuse(session: Opened, error: GPUError) -> None:
    """Make every later use of a session raise ``error``: its GPU is lost."""
    inner = vars(session).get("_sess")
    if inner is not None and not isinstance(inner, UnusableSession):
        _never_destroy(inner)  # the destructor would call a CUDA that is not there any more, and abort
        # A copy: the traceback of the original holds all that was at work when it came.
        session._sess = UnusableSession(fresh_copy(error))


def refuse_from_the_start(session: Opened, error: Exception) -> None:
    """Make every use of a session raise ``error``, because of which it did not open."""
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
        # On the CPU it works on; its destructor would wait for threads that stayed in the parent.
        _never_destroy(vars(session).get("_sess"))
    if _LIBC is not None:
        # End without the C++ destructors that run after Python is done: since 1.29 ONNX Runtime has a thread for its
        # telemetry, which stays in the parent, and one of them waits for it for ever, whether a child used it or not.
        leave, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (_LIBC._exit, _LIBC.fflush))
        # What is registered last is called first: all streams are flushed, then the process is left with its status.
        _LIBC.on_exit(leave, None)
        _LIBC.__cxa_atexit(flush, None, None)


_LIBC: ctypes.CDLL | None = None  # where it is glibc; found here, since a forked child had better not ask the loader
if hasattr(os, "register_at_fork"):
    _LIBC = ctypes.CDLL(None)
    if not all(hasattr(_LIBC, name) for name in ("on_exit", "__cxa_atexit", "_exit", "fflush")):
        _LIBC = None
    os.register_at_fork(after_in_child=_after_fork_in_child)
