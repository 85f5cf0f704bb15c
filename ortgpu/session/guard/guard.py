"""The guard: every InferenceSession that this process creates keeps the promise of a GPUSession.

    ortgpu.install()            # at the start of a program; or ORTGPU_ENFORCE=1, or `ortgpu exec`
    library_that_makes_its_own_sessions()

It reaches every session that the process makes from then on. ``with ortgpu.enforce():`` and ``@ortgpu.enforce()`` reach
those that are made while the block or function runs, and not those that a library makes later, at its first call for
instance. The class itself is changed, until :func:`uninstall`. So it does not matter by what name it was imported,
when, or whether a subclass of it was defined before. While a guard is in force, what a session asks for decides:

1. CUDA or TensorRT, alone or with others; nothing at all (``providers`` None or empty); or all that
   ``get_available_providers()`` returns, which is asking for nothing in more words: it is opened and verified as a
   GPUSession is, and becomes one (of a class of the same name, so that ``isinstance`` holds for both); or the
   constructor raises the error that names the cause. What stands beside CUDA in the list and cannot be had, as
   TensorRT where it is not installed, is left out, and so is ``enable_fallback``.
2. A name that is no provider, or a malformed list: refused with :class:`ProviderRequestError`.
3. Only the CPU, or only other providers (OpenVINO, say): passes unchanged, and is listed by ``ortgpu.sessions()``.
4. Providers that its SessionOptions carry, those of plugins: passes without ONNX Runtime's fallback, and is refused
   where they leave it on the CPU alone.

``set_providers`` of a session follows the same rule, and a session that was verified refuses what would take it off
CUDA. Importing this module imports nothing heavy, and not ONNX Runtime, which is changed when it is imported.

After a block or function, sessions are made as if there were no guard; ``ortgpu.sessions()`` tells which of them asked
for CUDA, or for nothing, and are not on CUDA.

In force means for the whole process, all threads and tasks, also with ``enforce()``: a library that loads its model in
a worker thread would otherwise escape. Not covered: sessions made before, other processes unless ``ortgpu exec``
started them, and what does not go through the constructor of the Python class (``onnxruntime.capi``'s native one,
onnxruntime-genai, the model packages of 1.32).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ...process.background import fork_safe_lock

if TYPE_CHECKING:
    from types import TracebackType

F = TypeVar("F", bound=Callable[..., Any])

_HOME = "onnxruntime.capi.onnxruntime_inference_collection"  # where the class is defined, in every release since 1.18
_NATIVE = "onnxruntime.capi.onnxruntime_pybind11_state"
_ABSENT = object()

_lock = fork_safe_lock()
_installed = False
_entered = 0
_noting = False  # once a guard was in force, until uninstall()
_requests = 0  # constructors of sessions that were called under a guard
_warned: set[tuple[str, int]] = set()  # file and line of a `with`
_changed: list[tuple[Any, dict[str, tuple[Any, Any]]]] = []  # class: name: what was there, what is there now


def install() -> None:
    """Put the guard in force until :func:`uninstall`, or the end of the process. Calling it twice is fine.

    While it is in force, every ``onnxruntime.InferenceSession`` that this process makes and that asks for CUDA, or for
    nothing, is a GPUSession, or its constructor raises what GPUSession raises. One that asks for the CPU alone, or for
    other providers alone, is let through, and listed by :func:`ortgpu.sessions`. This is the form for a library that
    makes its sessions when it likes: call it at the start of the program.

    Not promised: anything about sessions made before, other processes, and sessions that do not come from that class.
    """
    _set(installed=True)


def uninstall() -> None:
    """Undo :func:`install`, however often it was called; ``with enforce()`` blocks that are open stay in force.

    Sessions that were verified stay what they are.
    """
    _set(installed=False)


def is_enforced() -> bool:
    """Whether a guard is in force in this process."""
    return _installed or _entered > 0


class Enforcement:
    """What :func:`enforce` returns: a context manager and a decorator, which can be used any number of times."""

    def __init__(self) -> None:
        self._before: list[int] = []  # requests before each block that is open

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
        import inspect

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
                # A coroutine function behind another decorator, or a callable object: nothing of it has run yet.
                return self._guarding(result) if inspect.iscoroutine(result) else result

        decorated: F = guarded
        return decorated

    async def _guarding(self, coroutine: Any) -> Any:
        with _InForce():
            return await coroutine


class _InForce:
    """The guard, for a function that is called: whether it makes sessions is its own business."""

    def __enter__(self) -> None:
        _set(entered=1)

    def __exit__(self, *_: object) -> None:
        _set(entered=-1)


def _warn_of_no_session(caller: FrameType) -> None:
    import warnings

    level = 3
    while caller.f_globals.get("__name__") == "contextlib" and caller.f_back is not None:  # the block of an ExitStack
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

    It reaches sessions that are made, anywhere in the process, while the block or function runs; with several open at
    once, until the last one ends. A coroutine function is guarded until its coroutine ends. Sessions that a library
    makes later it does not reach: use :func:`install` for those. A block that ends without an exception, and in which
    no session was made, warns of that, once for each ``with`` in the source.

    Raises:
        TypeError: what is decorated is a class or a generator, or cannot be called.
    """
    return Enforcement() if function is None else Enforcement()(function)


# Switching


def _set(*, installed: bool | None = None, entered: int = 0) -> None:
    global _installed, _entered, _noting
    with _lock:
        _installed = _installed if installed is None else installed
        _entered = max(0, _entered + entered)
        if installed is not None or entered > 0:
            _noting = installed is not False
        if not is_enforced():
            if not _noting:
                _restore()
            return
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    # Not under the lock: when another thread is importing ONNX Runtime, this waits for it, and it for the lock.
    try:
        module = _imported()
        if module is not None:
            _change(module)
    except BaseException:  # an interrupt: nobody leaves a block that was not entered
        if entered > 0:
            _set(entered=-1)
        raise


def _imported() -> ModuleType | None:
    """The module that defines the class, if something in this process has begun to import ONNX Runtime."""
    if "onnxruntime" not in sys.modules:
        return None
    try:
        # By itself first: who waits for the package with the import lock of a part of it, which the thread that imports
        # the package comes to, is let through half-way by Python, and one of them fails.
        importlib.import_module("onnxruntime")
        return importlib.import_module(_HOME)
    except Exception:  # noqa: BLE001 - a package that cannot be imported makes no session
        return None


def _change(module: ModuleType) -> None:
    cls = getattr(module, "InferenceSession", None)
    with _lock:
        in_use = is_enforced() or _noting
        if not isinstance(cls, type) or not in_use or any(known is cls for known, _ in _changed):
            return
        names = {"__init__": _guarded_init, "set_providers": _guarded_set_providers}
        changes = {}
        for name, make in names.items():
            changes[name] = (cls.__dict__.get(name, _ABSENT), make(getattr(cls, name)))
            setattr(cls, name, changes[name][1])
        _changed.append((cls, changes))


def _restore() -> None:
    """Put back what was there, except where somebody else has put something over it: that calls through."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for cls, changes in _changed:
        for name, (before, now) in changes.items():
            if cls.__dict__.get(name) is not now:
                continue
            if before is _ABSENT:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
    _changed.clear()


class _Finder:
    """Changes the class as soon as the module that defines it has been executed, whoever imports it, also again.

    Nothing is imported by it: Python holds the lock of all imports meanwhile, and another thread that is importing what
    is wanted here would wait for that one for ever.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (_HOME, _NATIVE):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec)
                return spec  # type: ignore[no-any-return]  # a finder may be anybody's
        return None


class _Loader:
    """The loader that was found; what prepares for the native module before it, and :func:`_change` after it."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec
        self._loader: Any = spec.loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == _NATIVE and is_enforced():
            from ...provider.runtime import prepare_import

            prepare_import()
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._spec.name == _HOME:
            _change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder: Any = _Finder()


# What the class does while a guard is in force


def _guarded_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(  # noqa: N807 - what a traceback shows, and wraps() leaves as it is
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
            with _lock:  # or a thread could put back the number that another has read
                _requests += 1
        if not guarded or _is_gpu_session(self):
            original(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            _note(self, providers, provider_options, sess_options)
            return
        from ...provider.living import register
        from .policy import check_carried, judge

        verdict = judge(providers, provider_options, sess_options)
        if verdict == "guarded":
            from .classes import open_verified

            open_verified(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
        elif verdict == "carried":
            original(self, path_or_bytes, sess_options, **{**kwargs, "enable_fallback": 0})
            self.disable_fallback()  # releases before 1.23 ignore that argument
            check_carried(self)
            register(self, "other")
        else:
            original(self, path_or_bytes, sess_options, providers, provider_options, **kwargs)
            register(self, verdict)

    return __init__


def _guarded_set_providers(original: Any) -> Any:
    @functools.wraps(original)
    def set_providers(self: Any, providers: Any = None, provider_options: Any = None) -> None:
        from .policy import judge

        if not is_enforced() or _is_gpu_session(self) or judge(providers, provider_options) != "guarded":
            original(self, providers, provider_options)
            _note(self, providers, provider_options)
        else:
            from .classes import open_again

            open_again(self, providers, provider_options)

    return set_providers


def _note(session: Any, *request: Any) -> None:
    """Let ortgpu.sessions() know of an unguarded session that asked for CUDA, or for nothing."""
    if not _noting or _is_gpu_session(session):  # uninstalled, where somebody else still calls what was there
        return
    from ...provider.living import register
    from .policy import judge

    if judge(*request) == "guarded":
        register(session, "unguarded")


def _is_gpu_session(session: Any) -> bool:
    """Also a session that the guard has opened, or is opening."""
    found = getattr(sys.modules.get("ortgpu.session.gpu_session"), "GPUSession", None)
    return found is not None and isinstance(session, found)
