"""Start-up code of every Python under `ortgpu exec`. It makes the guard wait for ONNX Runtime.

It then runs the environment's own ``sitecustomize``.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


import _ortgpu_waiting  # noqa: E402, F401 - a module beside this file

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_run_the_next()
