"""The start of every interpreter under ORTGPU_ENFORCE=1: put the guard in force when it imports ONNX Runtime.

This file imports only modules that are already loaded, and ``_ortgpu_hook`` beside it. The guard is loaded together
with ``onnxruntime``. Any Python 3 can read both files. A Python too old for the guard gets an ImportError when it
imports ONNX Runtime. Copies of both files lie beside the installed package for ``ortgpu_enforce.pth``; see
build_backend.py.

PYTEST_DONT_REWRITE (tells pytest not to rewrite this file: it would warn that the module is imported already)
"""

import os
import sys

from _ortgpu_hook import ImportHook, is_wanted, take_out  # a module beside this file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_OLDEST = (3, 10)  # oldest Python for ortgpu itself; older ones read only this file


def _wait() -> None:
    """Put the guard in force when this process imports ONNX Runtime."""

    def install(_: str) -> None:
        try:
            _install()
        except Exception as error:
            raise ImportError(
                "ORTGPU_ENFORCE is set, but the guard does not work in "
                + sys.executable
                + ", so `import onnxruntime` is blocked: "
                + str(error)
            ) from error
        take_out(hook)

    def nothing(_: object) -> None:
        pass

    hook: Any = ImportHook(("onnxruntime",), install, nothing)
    sys.meta_path.insert(0, hook)


def _install() -> None:
    if sys.version_info < _OLDEST:
        words = "it is Python {}.{}, and ortgpu needs {}.{} or newer"
        raise ImportError(words.format(*sys.version_info[:2] + _OLDEST))
    try:
        import ortgpu
    except ImportError as error:
        if error.name != "ortgpu":
            raise
        ortgpu = _import_ours()
    ortgpu.install()  # Old copies of this file stay installed, so they use a public name.


def _import_ours() -> "Any":
    """Import the ortgpu that contains this file, without adding its folder to ``sys.path``.

    A copy in site-packages has no such folder, and its parent folders may belong to another user.
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    place, inside = _HERE, True
    for name in ("startup", "guard", "session", "ortgpu"):
        place, folder = os.path.split(place)
        inside = inside and folder == name
    spec = PathFinder.find_spec("ortgpu", [place]) if inside else None
    if spec is None or spec.loader is None:
        raise ImportError("ortgpu is gone from " + _HERE + ". Reinstall ortgpu, or unset ORTGPU_ENFORCE")
    module = module_from_spec(spec)
    sys.modules["ortgpu"] = module
    spec.loader.exec_module(module)
    return module


if is_wanted():
    _wait()
# ortgpu_enforce.pth sets None, in case this file cannot be imported.
if sys.modules.get("onnxruntime", sys) is None:
    del sys.modules["onnxruntime"]
