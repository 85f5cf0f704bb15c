"""Programs with a GPUSession on the CPU, each in a child with a deadline: the code of a test, behind a prelude."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

PRELUDE = """
import gc, itertools, json, logging, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")  # of the CPU that is used instead
import numpy as np, onnx.parser
import ortgpu
from ortgpu import GPUSession

def model(text):
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()

NEG = model("neg (float[n] x) => (float[n] y) { y = Neg(x) }")

def feeds(count, size=4):
    return [{"x": np.full(size, number, dtype=np.float32)} for number in range(count)]

def threads():
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("ortgpu"))

def outcome(action):
    try:
        return {"returned": action()}
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}

def report(value):
    print(json.dumps(value))

def stub_runtime(path):
    import ctypes
    from ortgpu.running.cudart import CudaRuntime
    library = ctypes.CDLL(path)
    library.stub_pinned_bytes.restype = library.stub_device_bytes.restype = ctypes.c_size_t
    return CudaRuntime(path, 0), library
"""


# A forked child sets its own alarm: there, a second dump_traceback_later would wait for the thread of the first
WATCHED = """
import faulthandler
faulthandler.dump_traceback_later({}, exit=True)
faulthandler.register(signal.SIGALRM, chain=True)
"""


def child(code: str, *arguments: str, deadline: float = 60) -> Any:
    """What the code reported. It finds ``arguments`` in sys.argv. One that hangs says where."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + WATCHED.format(deadline) + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=deadline + 30,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
