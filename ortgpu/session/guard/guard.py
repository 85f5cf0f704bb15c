"""The guard: every InferenceSession that this process creates gives the guarantee of a GPUSession.

    ortgpu.install()            # at the start of a program; or ORTGPU_ENFORCE=1, or `ortgpu exec`
    library_that_makes_its_own_sessions()

The guard changes the methods of the class InferenceSession itself, so it does not matter how or when the class was
imported or subclassed. It is in force for the whole process, because a library may load its model in a worker thread.
:func:`~ortgpu.session.guard_policy.judge` decides about each session. Importing this module is cheap and does not
import ONNX Runtime. The guard changes ONNX Runtime's class as soon as the program has imported ONNX Runtime.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ...process.background import fork_safe_lock, this_thread
from ...process.late import late
from . import exemptions, inheritance
from .startup._ortgpu_hook import ImportHook, take_out

if TYPE_CHECKING:
    import inspect
    from types import TracebackType

    from ...provider import runtime
    from ...provider.interfaces import Opened
    from . import classes, verification
else:
    inspect = late("inspect")
    runtime = late("ortgpu.provider.runtime")
    verification = late("ortgpu.session.guard.verification")
    classes = late("ortgpu.session.guard.classes")

F = TypeVar("F", bound=Callable[..., Any])

_HOME = "onnxruntime.capi.onnxruntime_inference_collection"  # it defines the class in every release since 1.18
_NATIVE = "onnxruntime.capi.onnxruntime_pybind11_state"
_ABSENT = object()

_lock = fork_safe_lock()
_installed = False
_entered = 0
_noting = False  # True from the first guard until uninstall()
_requests = 0  # number of calls of session constructors under a guard
_warned: set[tuple[str, int]] = set()  # file and line of each `with` that has warned
_changed: list[tuple[Any, dict[str, tuple[Any, Any]]]] = []  # class, {name: (value before, value now)}


def install(*, except_: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = ()) -> None:
    """Put the guard in force until :func:`uninstall` or the end of the process. Calling it twice is fine.

    From then on every ``onnxruntime.InferenceSession`` of this process that asks for CUDA, or names no provider, is a
    GPUSession, or its constructor raises GPUSession's error. Other providers beside CUDA are left out if they cannot be
    used here. A session that asks only for the CPU or for other providers opens unchanged. So does a session that runs
    on the GPU by another provider of the program; :func:`ortgpu.sessions` lists it. ``set_providers`` follows the same
    rules. Call this at the start of a program whose libraries create their own sessions.

    The guard is also in force in Python processes that this process starts from then on. These include workers of
    multiprocessing, joblib, concurrent.futures and a local Ray cluster, and other programs. They inherit the variable
    ORTGPU_ENFORCE. They also inherit PYTHONPATH, unless the environment loads the guard at the start of Python.

    Args:
        except_: modules ("nudenet", including submodules) and models ("vad.onnx", "models/*.onnx", a path). Their
            sessions open unchanged and unguarded, with any providers. The variable ORTGPU_ENFORCE_EXCEPT adds more
            names, separated by commas. Exceptions of several calls add up.

    Raises:
        TypeError, ValueError: ``except_``, or the variable, names neither modules nor models.

    Not promised: the guard does not reach earlier sessions, or processes that started earlier or with another
    environment. It does not reach sessions made without the constructor of that class, as by ``onnxruntime.capi``'s
    native class, onnxruntime-genai, or the model packages of 1.32.
    """
    exemptions.declare(except_)
    _set(installed=True)


def uninstall() -> None:
    """Undo all calls of :func:`install`. Open ``with enforce()`` blocks stay in force.

    Verified sessions stay GPUSessions. Processes that started meanwhile stay guarded.
    """
    _set(installed=False)


def is_enforced() -> bool:
    return _installed or _entered > 0


class Enforcement:
    """The context manager and decorator that :func:`enforce` returns. It can be used any number of times."""

    def __init__(self) -> None:
        self._before: list[int] = []  # the value of _requests at the start of each open block

    def __enter__(self) -> Enforcement:
        before = _requests
        _set(entered=1)
        self._before.append(before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._before.pop() if self._before else None
        _set(entered=-1)
        if kind is None and before == _requests and not is_enforced():
            _warn_of_no_session(sys._getframe(1))

    def __call__(self, function: F) -> F:
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"enforce() decorates functions, not {function!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("enforce() cannot decorate a generator: it would stay in force while that is suspended")
        guarded: Any
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def guarded(*args: Any, **kwargs: Any) -> Any:
                with _InForce():
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                with _InForce():
                    result = function(*args, **kwargs)
                # A coroutine function behind another decorator, or a callable object, has not run yet.
                return self._guarding(result) if inspect.iscoroutine(result) else result

        decorated: F = guarded
        return decorated

    async def _guarding(self, coroutine: Any) -> Any:
        with _InForce():
            return await coroutine


class _InForce:
    """The guard during a call of a function. It does not warn if the function makes no session."""

    def __enter__(self) -> None:
        _set(entered=1)

    def __exit__(self, *_: object) -> None:
        _set(entered=-1)


def _warn_of_no_session(caller: FrameType) -> None:
    level = 3
    # An ExitStack calls __exit__ from contextlib. The warning names the block of the program.
    while caller.f_globals.get("__name__") == "contextlib" and caller.f_back is not None:
        caller, level = caller.f_back, level + 1
    place = (caller.f_code.co_filename, caller.f_lineno)
    if place not in _warned:
        _warned.add(place)
        warnings.warn(
            "no InferenceSession was made in this process while this enforce() block was in force. A library that "
            "makes its sessions later, at its first call for instance, makes them without the guard: call "
            "ortgpu.install() at the start of the program instead, or make that first call in the block",
            stacklevel=level,
        )


@overload
def enforce() -> Enforcement: ...
@overload
def enforce(function: F) -> F: ...
def enforce(function: Any = None) -> Any:
    """Put the guard in force for a block or a function: ``with enforce():``, ``@enforce()``, ``@enforce``.

    It reaches all sessions created anywhere in the process while the block or function runs. If several blocks are
    open, it stays in force until the last one ends. A coroutine function is guarded until its coroutine ends. The guard
    does not reach later sessions of a library; use :func:`install` for these. If a block creates no session and ends
    without an exception, it warns, once for each ``with`` in the source.

    Raises:
        TypeError: the decorated object is a class or a generator, or is not callable.
    """
    return Enforcement() if function is None else Enforcement()(function)


def _set(*, installed: bool | None = None, entered: int = 0) -> None:
    global _installed, _entered, _noting
    # Read the variable also for a block: a mistake in it is to show here, not in the constructor of a session.
    exempt = exemptions.list_all() if installed or entered > 0 else frozenset()
    with this_thread.holds, _lock:
        _installed = _installed if installed is None else installed
        if installed:
            inheritance.hand_on(exempt)
        elif installed is False:
            exemptions.forget()
            inheritance.take_back()
        _entered = max(0, _entered + entered)
        if installed is not None or entered > 0:
            _noting = installed is not False
        if not is_enforced():
            if not _noting:
                _restore()
            return
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    # Not under the lock: this may wait for a thread that imports ONNX Runtime, and that thread waits for the lock.
    try:
        module = _imported()
        if module is not None:
            _change(module)
    except BaseException:  # Python does not call __exit__ after an interrupt, so undo the change here.
        if entered > 0:
            _set(entered=-1)
        raise


def _imported() -> ModuleType | None:
    """Return the module of the class InferenceSession, or None if the program has not imported ONNX Runtime."""
    if "onnxruntime" not in sys.modules:
        return None
    try:
        # Import the package before its submodule, or two importing threads can collide.
        importlib.import_module("onnxruntime")
        return importlib.import_module(_HOME)
    except Exception:  # noqa: BLE001 - a package that fails to import makes no session
        return None


def _change(module: ModuleType) -> None:
    cls = getattr(module, "InferenceSession", None) if module.__name__ == _HOME else None
    with this_thread.holds, _lock:
        in_use = is_enforced() or _noting
        if not isinstance(cls, type) or not in_use or any(changed_class is cls for changed_class, _ in _changed):
            return
        names = {"__init__": _guarded_init, "set_providers": _guarded_set_providers}
        changes = {}
        for name, make in names.items():
            changes[name] = (cls.__dict__.get(name, _ABSENT), make(getattr(cls, name)))
            setattr(cls, name, changes[name][1])
        _changed.append((cls, changes))


def _restore() -> None:
    """Restore the original methods. If other code has wrapped a method meanwhile, it stays and calls the original."""
    take_out(_finder)
    for cls, changes in _changed:
        for name, (before, now) in changes.items():
            if cls.__dict__.get(name) is not now:
                continue
            if before is _ABSENT:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
    _changed.clear()


def _prepare(name: str) -> None:
    if name == _NATIVE and is_enforced():
        runtime.prepare_import()


_finder: Any = ImportHook((_HOME, _NATIVE), _prepare, _change)


# The methods of the class while a guard is in force


def _guarded_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(  # noqa: N807 - tracebacks show this name
        self: Any,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **kwargs: Any,
    ) -> None:
        global _requests
        guarded = is_enforced()
        if guarded:
            with this_thread.holds, _lock:  # The increment is not atomic.
                _requests += 1
        if not guarded or _is_gpu_session(self) or exemptions.is_exempt(self, path_or_bytes):
            original(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            _note(self, providers, provider_options, sess_options)
            return
        arguments = (path_or_bytes, sess_options, providers, provider_options)
        if not verification.construct(self, original, arguments, kwargs, sys._getframe(1)):
            classes.construct(self, arguments, kwargs)

    return __init__


def _guarded_set_providers(original: Any) -> Any:
    @functools.wraps(original)
    def set_providers(self: Any, providers: Any = None, provider_options: Any = None) -> None:
        if not is_enforced() or _is_gpu_session(self) or exemptions.is_exempt(self, self._model_path):
            original(self, providers, provider_options)
            _note(self, providers, provider_options)
            return
        if not verification.set_providers(self, original, providers, provider_options):
            classes.set_providers(self, original, providers, provider_options)

    return set_providers


def _note(session: Opened, *request: Any) -> None:
    if _noting and not _is_gpu_session(session):  # After uninstall() other code may still call our method.
        verification.note(session, *request)


def _is_gpu_session(session: object) -> bool:
    session_class = getattr(sys.modules.get("ortgpu.session.gpu_session"), "GPUSession", None)
    return session_class is not None and isinstance(session, session_class)
