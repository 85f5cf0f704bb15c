"""The import hook by which the guard reaches ONNX Runtime, and the one reader of ORTGPU_ENFORCE.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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


def take_out(hook: ImportHook) -> None:
    """Remove a hook. The list is replaced: a thread that looks for a module in the old one must not skip a finder."""
    sys.meta_path = [finder for finder in sys.meta_path if finder is not hook]


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
