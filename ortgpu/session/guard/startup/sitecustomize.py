"""Run by every Python that `ortgpu exec` starts, and by those that they start: the guard waits for ONNX Runtime.

The environment's own ``sitecustomize`` is run afterwards, as if this one were not there.
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


import _ortgpu_waiting  # noqa: E402, F401 - beside this file, and not of a package

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
_run_the_next()
