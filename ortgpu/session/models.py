"""Many models in one budget of GPU memory: a session opens at the first use and closes when others need its memory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..environment.gpu.cuda import initialise
from ..errors import (
    ExecutionError,
    GPUError,
    GPUOutOfMemoryError,
    InsufficientDeviceMemoryError,
    escape_controls,
    manual,
)
from ..model.files import stamp_of
from ..model.weights import bytes_of_weights
from ..process.background import may_wait, this_thread
from ..process.late import late
from ..process.reminders import Reminder
from ..provider.devices import choose_visible, is_cpu, plain_request
from ..provider.requests import parse
from ..provider.sizes import GPUSize, bytes_of_gpu, parse_gpu_size
from ..running import arena
from .budget import OUTSIDE
from .request import NAMES, ModelsArguments, SessionRequest, Unpack, checked, refuse_misspelt, seconds

if TYPE_CHECKING:
    from typing_extensions import Self  # type checkers bring it; typing has it since Python 3.11

    from ..running.onnxruntimes import Results
    from . import gpu_session
    from .gpu_session import GPUSession
else:
    gpu_session = late("ortgpu.session.gpu_session")

Result = TypeVar("Result")

logger = logging.getLogger("ortgpu")

_MIB = 1 << 20
_FIRST_ROOM = 64 * _MIB  # Activations and workspaces get as much, until a run needs more.
_UNKNOWN_WEIGHTS = 256 * _MIB
_PAUSE = 0.002  # seconds between two checks whether other runs have ended
_LONGEST_WAIT = 300.0  # seconds


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """The state of one model.

    Attributes:
        path: the path of its file.
        state: "open", or "closed" until the next use.
        device: the device of its session, "cuda:0 (NVIDIA H200, ...)"; None while it is closed.
        memory: its bytes of the budget; None without a budget, or while it is closed.
        running: the number of running calls.
        opened: how often its session was opened.
        idle: the seconds since its last use; None before the first.
        last_error: why it was not opened the last time.
    """

    path: str
    state: Literal["open", "closed"]
    device: str | None
    memory: int | None
    running: int
    opened: int
    idle: float | None
    last_error: GPUError | None


class GPUModel:
    """One model of a :class:`GPUModels`. Its session is open while a call runs, and often afterwards."""

    def __init__(self, models: GPUModels, path: str) -> None:
        self.path = path
        self._models = models
        self._session: GPUSession | None = None
        self._calls: list[int] = []  # the threads of running calls; append and remove are atomic
        self._used: float | None = None
        self._share = 0  # bytes of the budget
        self._need = 0  # bytes of the budget that the last session needed
        self._opened = 0
        self._last_error: GPUError | None = None

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Results:
        """Run the model, as ``GPUSession.run`` does. The session is opened if it is not open.

        A run that is out of memory is repeated with more of the budget. Other sessions are closed for that.

        Raises:
            GPUError, Exception: as GPUSession and its ``run`` raise. A missing file raises ONNX Runtime's own error.
            ExecutionError: the GPUModels is closed.
        """
        calls, thread = self._calls, get_ident()
        try:
            calls.append(thread)  # before the look at the session: a session with calls is not closed
            session = self._session
            if session is not None:
                self._used = monotonic()
                return session.run(output_names, input_feed, run_options)
        except GPUOutOfMemoryError as error:
            if not self._models._may_get_more(self):
                raise
            size: int | None = error.requested or 0
        else:
            size = None
        finally:
            calls.remove(thread)  # This is _end_call without its call, since each run comes here.
            if self._models._closed:
                self._models._close(self)
        return self._models._call(self, lambda session: session.run(output_names, input_feed, run_options), size)

    @contextlib.contextmanager
    def session(self) -> Iterator[GPUSession]:
        """Open the session, if it is not open, and keep it open within the ``with`` block: for ``map`` and others.

        Raises:
            GPUError, Exception: as the constructor of GPUSession raises.
        """
        session = self._models._begin(self)
        try:
            yield session
        finally:
            self._models._end_call(self)

    def __repr__(self) -> str:
        state = "open" if self._session is not None else "closed"
        return f"<{type(self).__name__} {escape_controls(self.path)} {state}>"


class GPUModels(Mapping[str, GPUModel]):
    """Models by their paths. Their sessions share a budget of GPU memory.

    ``models["a.onnx"].run(None, feed)`` opens the session at the first use. If the budget has no room for it, the least
    recently used session is closed, but never a session that runs. If all run, the call waits until a run has ended. A
    closed session is opened again at its next use. Many threads may use any model at any time; sessions are opened one
    at a time. Each session gets a share of the budget: memory for its weights, 150 MiB for ONNX Runtime's allocations
    outside of its arena, and the memory that its runs need. Within a budget a model makes one run at a time.

    In a forked child the models cannot be used. On the CPU (``allow_cpu=True``) the budget counts nothing, and the log
    says so.

    Not promised: good service for a model that needs the whole budget beside a model in constant use. Each use of the
    first model waits until the second model does not run.

    Args:
        budget: the most GPU memory that all sessions take together: bytes, "12GiB", or 0.5 for half of the GPU. None:
            no limit. CUDA's context and the kernels that the process has loaded are not counted.
        idle: a session is closed after so many seconds without a use. None: never.
        arguments: arguments of GPUSession for every model, such as ``device`` and ``providers``.

    Raises:
        TypeError, ValueError: an argument is invalid, or its name looks misspelt. Nothing was opened.
    """

    def __init__(
        self, budget: GPUSize | None = None, idle: float | None = None, **arguments: Unpack[ModelsArguments]
    ) -> None:
        if "memory" in arguments:
            raise TypeError("GPUModels has budget= instead of memory=")
        refuse_misspelt("GPUModels", arguments.keys() - set(NAMES), (*NAMES, "budget", "idle"))
        self._size = None if budget is None else parse_gpu_size("budget", budget)
        self._idle = None if idle is None else seconds("idle", idle)
        _check_arguments(arguments)
        self._arguments = arguments
        self._models: dict[str, GPUModel] = {}
        self._lock = threading.RLock()  # held while a session is opened or closed
        self._budget: int | None = None  # bytes, once the GPU is known
        self._closed = False
        self._reminder = Reminder(self, GPUModels._close_idle, "ortgpu-models")

    def __getitem__(self, path: str | os.PathLike[str]) -> GPUModel:
        """Return the model at a path. Its file is not looked at before its first use."""
        try:
            # The keys are absolute paths, and making one takes ten times as long as this look-up.
            return self._models[path]  # type: ignore[index]  # no other object equals such a key
        except (KeyError, TypeError):
            pass
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"a model is named by the path of its file, not by {path!r}")
        name = os.path.abspath(os.fsdecode(path))
        model = self._models.get(name)
        return model if model is not None else self._models.setdefault(name, GPUModel(self, name))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(os.fsdecode(path)) in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._models))

    def __len__(self) -> int:
        return len(self._models)

    def warm(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Open the sessions of these models, in this order. If the budget is full, the first of them are closed.

        Raises:
            GPUError, Exception: as the constructor of GPUSession raises.
        """
        for path in paths:
            with self[path].session():
                pass

    def health(self) -> tuple[ModelHealth, ...]:
        """Return the state of each model that was asked for, in the order of the first requests. This does not wait."""
        now = monotonic()
        states = []
        for model in list(self._models.values()):
            session, used = model._session, model._used
            states.append(
                ModelHealth(
                    path=model.path,
                    state="open" if session is not None else "closed",
                    device=str(session.device) if session is not None else None,
                    memory=model._share if session is not None and self._size is not None else None,
                    running=len(model._calls),
                    opened=model._opened,
                    idle=None if used is None else max(0.0, now - used),
                    last_error=model._last_error,
                )
            )
        return tuple(states)

    def close(self) -> None:
        """Wait for the running calls, and close all sessions. Later calls raise ExecutionError. Closing twice is fine.

        In a signal handler this does not wait for the call that it interrupts.
        """
        self._closed = True
        while True:
            with this_thread.holds, self._lock:
                open_models = [model for model in list(self._models.values()) if not self._close(model)]
            # A signal handler or finalizer does not wait for the call that it interrupts. That call closes its session.
            if not may_wait() or all(get_ident() in model._calls for model in open_models):
                break
            time.sleep(_PAUSE)
        self._reminder.stop()

    def __enter__(self) -> Self:
        self._refuse_if_closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'GPUModels' object: its sessions belong to this process")

    def _call(self, model: GPUModel, call: Callable[[GPUSession], Result], asked: int | None) -> Result:
        """Return the result of ``call`` with an open session.

        After an out-of-memory error the session gets more of the budget, and the call is made again. ``asked``: the
        bytes that a first call could not allocate; None if there was no first call.
        """
        for last in (False, True) if asked is not None else (False, False, True):
            session = self._begin(model, more_than=asked, all_of_it=last)
            try:
                return call(session)
            except GPUOutOfMemoryError as error:
                if last or not self._may_get_more(model):
                    raise
                asked = error.requested or 0
            finally:
                del session
                self._end_call(model)
        raise AssertionError("the last try returns or raises")

    def _begin(self, model: GPUModel, more_than: int | None = None, *, all_of_it: bool = False) -> GPUSession:
        """Return the open session of a model, and count a call. The caller must end it by ``_end_call``."""
        with this_thread.holds, self._lock:
            self._refuse_if_closed()
            share = self._share_of(model, more_than, all_of_it=all_of_it and more_than is not None)
            if model._session is not None and model._share < share:
                self._wait(lambda: self._close(model), share, is_vain=get_ident() in model._calls)
            if more_than is not None and self._budget is None:
                for other in self._models.values():
                    self._close(other)
            if model._session is None:
                self._open(model, share)
            session = model._session
            assert session is not None
            model._calls.append(get_ident())
            model._used = monotonic()
        if self._idle is not None and self._reminder.thread is None:
            self._reminder.start()
        return session

    def _end_call(self, model: GPUModel) -> None:
        model._calls.remove(get_ident())
        if self._closed:  # A signal handler or finalizer closed the models and did not wait for this call.
            self._close(model)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ExecutionError("this GPUModels is closed", fixes=[manual("make a new GPUModels")])

    def _may_get_more(self, model: GPUModel) -> bool:
        if self._budget is not None:
            return model._share < self._budget
        return any(other._session is not None and other is not model for other in self._models.values())

    def _share_of(self, model: GPUModel, more_than: int | None, *, all_of_it: bool) -> int:
        """Return a session's bytes of the budget. 0 without a budget."""
        budget = self._bytes_of_budget()
        if budget is None:
            return 0
        if all_of_it:
            return budget
        share = model._need or model._share
        if not share:
            weights = bytes_of_weights(model.path, stamp_of(model.path))
            share = (_UNKNOWN_WEIGHTS if weights is None else weights) + _FIRST_ROOM + OUTSIDE
        if more_than is not None:
            share = max(2 * model._share, model._share + 2 * more_than, share)
        return min(share, budget)

    def _bytes_of_budget(self) -> int | None:
        if self._budget is None and self._size is not None:
            device = self._arguments.get("device")
            if isinstance(self._size, int) or is_cpu(device):
                self._budget = int(self._size)
            else:
                try:
                    gpu = choose_visible(plain_request(device), initialise())
                except GPUError:  # The session raises the same error, or is on the CPU.
                    return None
                self._budget = bytes_of_gpu(self._size, gpu.total_memory)
        return self._budget

    def _open(self, model: GPUModel, share: int) -> None:
        """Open a session with a share of the budget, and close others for that. The lock is held."""
        budget = self._budget
        memory: dict[str, Any] = {} if budget is None else {"memory": share}
        if os.path.exists(model.path):  # ONNX Runtime refuses a missing file, and it needs no room.
            self._make_room(model, share)
        try:
            session = gpu_session.GPUSession(model.path, **self._arguments, **memory)
        except InsufficientDeviceMemoryError as error:
            model._last_error = error
            if budget is None or share >= budget:
                raise
            del error
            self._open(model, min(2 * share, budget))
            return
        except Exception as error:
            model._last_error = error if isinstance(error, GPUError) else None
            raise
        model._last_error = None
        model._opened += 1
        if not session.device.is_gpu and budget is not None:
            logger.warning("%s is on the CPU, and the budget of GPU memory does not count it", model.path)
            share = 0
        elif self._arguments.get("device") == "auto":  # A budget belongs to one GPU.
            self._arguments["device"] = session.device.ordinal
        model._share, model._session = share, session

    def _make_room(self, model: GPUModel, share: int) -> None:
        """Close the least recently used sessions until a share fits. Waits while all open sessions run."""
        budget = self._budget
        if budget is None:
            return

        def others() -> list[GPUModel]:
            return [other for other in self._models.values() if other._session is not None and other is not model]

        def fits_beside(models: list[GPUModel]) -> bool:
            return sum(member._share for member in models) + share <= budget

        def has_room() -> bool:
            for other in sorted(others(), key=lambda each: each._used or 0.0):
                if fits_beside(others()):
                    break
                self._close(other)
            return fits_beside(others())

        thread = get_ident()
        self._wait(has_room, share, is_vain=not fits_beside([other for other in others() if thread in other._calls]))

    def _wait(self, is_ready: Callable[[], bool], share: int, *, is_vain: bool) -> None:
        """Wait for other threads' calls. The lock is held.

        Raises:
            GPUOutOfMemoryError: the wait ``is_vain``, because this thread itself uses the sessions that it waits for;
                or the wait took too long.
        """
        until = monotonic() + _LONGEST_WAIT
        while not is_ready():
            if is_vain or monotonic() > until:
                whose = "this thread uses" if is_vain else f"for {_LONGEST_WAIT:.0f} seconds other threads used"
                raise GPUOutOfMemoryError(
                    f"{share // _MIB} MiB of the budget are needed, but models in use hold the rest",
                    evidence=[f"{whose} {model.path}" for model in self._models.values() if model._calls],
                    fixes=[manual("use one model at a time in a thread"), manual("or raise budget=")],
                )
            time.sleep(_PAUSE)

    def _close(self, model: GPUModel) -> bool:
        """Close a session without running calls. Return True if the model has no session now."""
        with this_thread.holds, self._lock:
            session = model._session
            if session is None or model._calls:
                return session is None
            model._session = None
            if model._calls:  # A call came meanwhile. It may have seen the session.
                model._session = session
                return False
            if model._share:
                reserved = arena.reserved_bytes(session)
                needed = reserved + reserved // 8 + OUTSIDE if reserved is not None else model._share
                model._need = max(model._need, needed)
            session.close()
            return True

    def _close_idle(self) -> float | None:
        """Close the sessions that were idle for ``idle`` seconds. Return the seconds until the next check."""
        idle = self._idle
        if idle is None:
            return None
        with this_thread.holds, self._lock:
            now = monotonic()
            due = []
            for model in list(self._models.values()):
                if model._session is not None:
                    remaining = idle - (now - (model._used or now))
                    if remaining > 0 or not self._close(model):
                        due.append(max(remaining, _PAUSE * 10))
        return min(due, default=None)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise the error that the constructor of GPUSession would raise for arguments, before a model is opened."""
    others = {name: value for name, value in arguments.items() if name not in NAMES}
    session_arguments = {name: arguments[name] for name in NAMES if name in arguments}
    providers = parse(session_arguments.pop("providers", None), session_arguments.pop("provider_options", None))
    device = plain_request(session_arguments.pop("device", None))
    checked(SessionRequest(b"", providers=providers, device=device, **session_arguments, others=others))
