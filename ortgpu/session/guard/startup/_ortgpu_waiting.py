"""A hook for ORTGPU_ENFORCE=1 that puts the guard in force when the process imports ONNX Runtime.

Every interpreter imports this module at its start, so it imports only modules that are loaded already. The guard is
loaded with ``onnxruntime``. Any Python 3 can read this file; one too old for the guard gets an ImportError when it
imports ONNX Runtime. A copy lies beside the installed package, for ``ortgpu_enforce.pth``; see build_backend.py.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Waiting:
    """An import hook that puts the guard in force when ONNX Runtime is imported.

    It does so in ``create_module``, not in ``find_spec``. Python holds the global import lock during ``find_spec``, so
    another thread that imports the same modules as the guard could deadlock.
    """

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "onnxruntime":
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(self, spec.loader)
                return spec
        return None


class _Loader:
    """A wrapper of the original loader that installs the guard first."""

    def __init__(self, waiting: "_Waiting", loader: "Any") -> None:
        self._waiting = waiting
        self._loader = loader

    def create_module(self, spec: "Any") -> object:
        try:
            _install()
        except Exception as error:
            raise ImportError(
                "ORTGPU_ENFORCE is set, and the guard cannot watch the sessions of "
                + sys.executable
                + ", and so keeps it from using ONNX Runtime: "
                + str(error)
            ) from error
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        spec.loader = self._loader
        return self._loader.create_module(spec)

    def exec_module(self, module: object) -> None:
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


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


if os.environ.get("ORTGPU_ENFORCE", "").lower() not in ("", "0", "false", "no", "off"):
    sys.meta_path.insert(0, _Waiting())
