"""The import hook of the guard for ONNX Runtime, and the only reader of ORTGPU_ENFORCE.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ImportHook:
    """A finder that calls ``before`` with the name of a module, and ``after`` with the executed module.

    The loader makes both calls, not ``find_spec``. Python holds the global import lock during ``find_spec``, so another
    thread could deadlock if it imports the same modules as ``before``.
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


def take_out(hook: ImportHook) -> None:
    """Remove a hook, by a new list. A thread that is searching the old list must not skip a finder."""
    sys.meta_path = [finder for finder in sys.meta_path if finder is not hook]


class _Loader:
    """A wrapper of the original loader. It restores the original before the module is executed."""

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

    Any value but a no means yes: `docker --env-file` keeps the quotes around a 1, and other files a carriage return.
    """
    return os.environ.get("ORTGPU_ENFORCE", "").lower() not in ("", "0", "false", "no", "off")
