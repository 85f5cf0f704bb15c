"""A stand-in for ONNX Runtime, in case the ``sitecustomize`` beside this file did not run.

A launcher may put a folder with its own ``sitecustomize`` before this one. Importing this module gives ONNX Runtime
with the guard in force.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

import _ortgpu_waiting  # noqa: E402, F401 - a module beside this file

sys.path[:] = [entry for entry in sys.path if entry != _HERE]
del sys.modules[__name__]
__import__(__name__)  # This imports ONNX Runtime, and Python then returns it from sys.modules.
