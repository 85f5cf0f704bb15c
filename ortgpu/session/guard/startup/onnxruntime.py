"""Found in the place of ONNX Runtime where the ``sitecustomize`` beside this file did not run.

So it is where a launcher put a folder with a ``sitecustomize`` of its own before this one. Whoever imports this module
gets ONNX Runtime, and the guard with it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

import _ortgpu_waiting  # noqa: E402, F401 - beside this file, and not of a package

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
del sys.modules[__name__]
__import__(__name__)  # ONNX Runtime; Python hands out what is in sys.modules then
