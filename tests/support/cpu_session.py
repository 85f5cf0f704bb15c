"""Programs with a GPUSession on the CPU, each in a child with a deadline: the code of a test, behind a prelude."""

from __future__ import annotations

import textwrap
from typing import Any

import onnx.parser

from tests.support.children import child_environment, run_python

# Made here: a child that makes no model of its own does without onnx, which takes long to import.
_NEG = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
)
PRELUDE = (
    f"NEG = {_NEG.SerializeToString()!r}"
    + """
import gc, itertools, json, logging, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")  # of the CPU that is used instead
import numpy as np
import ortgpu
from ortgpu import GPUSession

def model(text):
    import onnx.parser
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()

def feeds(count, size=4):
    return [{"x": np.full(size, number, dtype=np.float32)} for number in range(count)]

def threads():
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("ortgpu"))

def outcome(action):
    try:
        return {"returned": action()}
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}

from tests.support import children  # programs on a machine of the laboratory end before this line

def report(value):
    children.report("json", value)

def stub_runtime(path):
    import ctypes
    from ortgpu.running.cudart import CudaRuntime
    library = ctypes.CDLL(path)
    library.stub_pinned_bytes.restype = library.stub_device_bytes.restype = ctypes.c_size_t
    return CudaRuntime(path, 0), library
"""
)


# A forked child sets its own alarm: there, a second dump_traceback_later would wait for the thread of the first
WATCHED = """
import faulthandler
faulthandler.dump_traceback_later({}, exit=True)
if sys.platform != "win32":
    faulthandler.register(signal.SIGALRM, chain=True)
"""


def child(code: str, *arguments: str, deadline: float = 60) -> Any:
    """What the code reported. It finds ``arguments`` in sys.argv. One that hangs says where."""
    env = child_environment({"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1"})
    program = PRELUDE + WATCHED.format(deadline) + textwrap.dedent(code)
    return run_python(program, *arguments, env=env, deadline=deadline + 30).ok().json
