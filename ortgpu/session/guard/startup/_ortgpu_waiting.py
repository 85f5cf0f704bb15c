"""An import hook, by which the guard waits for ONNX Runtime, and what ORTGPU_ENFORCE=1 does with it.

Every interpreter imports this module at its start, so it imports only modules that are loaded already. The guard is
loaded with ``onnxruntime``. Any Python 3 can read this file; one too old for the guard gets an ImportError when it
imports ONNX Runtime. A copy lies beside the installed package, for ``ortgpu_enforce.pth``; see build_backend.py.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class ImportHook:
    """A finder that calls ``before`` with the name of a module, and ``after`` with the module that was executed.

    It does so in the loader, not in ``find_spec``. Python holds the global import lock during ``find_spec``, so another
    thread that imports the same modules as ``before`` could deadlock.
    """

    def __init__(
        self, names: "tuple[str, ...]", before: "Callable[[str], None]", after: "Callable[[Any], None]"
    ) -> None:
        self._names = names
        self.before = before
        self.after = after

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self._names:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(self, spec)
                return spec
        return None


class _Loader:
    """A wrapper of the original loader, which it restores before the module is executed."""

    def __init__(self, hook: "ImportHook", spec: "Any") -> None:
        self._hook = hook
        self._spec = spec
        self._loader = spec.loader

    def create_module(self, spec: "Any") -> object:
        self._hook.before(spec.name)
        return self._loader.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook.after(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def is_wanted() -> bool:
    """Return True if ORTGPU_ENFORCE asks for the guard.

    What does not say no is a yes: `docker --env-file` hands on the quotes around a 1, other files a carriage return.
    """
    return os.environ.get("ORTGPU_ENFORCE", "").lower() not in ("", "0", "false", "no", "off")


def _wait() -> None:
    """Put the guard in force when this process imports ONNX Runtime."""

    def install(_: str) -> None:
        try:
            _install()
        except Exception as error:
            raise ImportError(
                "ORTGPU_ENFORCE is set, and the guard cannot watch the sessions of "
                + sys.executable
                + ", and so keeps it from using ONNX Runtime: "
                + str(error)
            ) from error
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)

    def nothing(_: object) -> None:
        pass

    hook: Any = ImportHook(("onnxruntime",), install, nothing)
    sys.meta_path.insert(0, hook)


def _install() -> None:
    try:
        import ortgpu
    except ImportError as error:
        if error.name != "ortgpu":
            raise
        ortgpu = _import_ours()
    ortgpu.install()  # a public name, since old copies of this file stay installed


def _import_ours() -> "Any":
    """Import the ortgpu that contains this file, without adding its folder to ``sys.path``."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    place = _HERE
    for _ in range(4):  # startup, guard, session, ortgpu
        place = os.path.dirname(place)
    spec = PathFinder.find_spec("ortgpu", [place])
    if spec is None or spec.loader is None:
        raise ImportError("ortgpu is not at " + _HERE + " any more")
    module = module_from_spec(spec)
    sys.modules["ortgpu"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "_ortgpu_waiting" and is_wanted():  # not where the guard imports it, as a part of ortgpu
    _wait()
