"""What programs with a GPUSession on the CPU share: see tests/support/cpu_session.py. One that hangs says where."""

import faulthandler
import gc
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import ortgpu
from ortgpu import GPUSession
from tests.support import children

warnings.simplefilter("ignore")  # of the CPU that is used instead
# A forked child sets its own alarm: there, a second dump_traceback_later would wait for the thread of the first.
faulthandler.dump_traceback_later(float(os.environ[children.DEADLINE_VARIABLE]), exit=True)
if sys.platform != "win32":
    faulthandler.register(signal.SIGALRM, chain=True)

# model("neg (float[n] x) => (float[n] y) { y = Neg(x) }"), made before: onnx takes long to import.
NEG = (
    b'\x08\x08:8\n\r\n\x01x\x12\x01y"\x03Neg:\x00\x12\x03negZ\x10\n\x01x\x12\x0b\n\t\x08\x01\x12\x05\n\x03\x12\x01n'
    b"b\x10\n\x01y\x12\x0b\n\t\x08\x01\x12\x05\n\x03\x12\x01nB\x04\n\x00\x10\x11"
)


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


def report(value):
    children.report("json", value)


def stub_runtime(path):
    import ctypes

    from ortgpu.running.cudart import CudaRuntime

    library = ctypes.CDLL(path)
    library.stub_pinned_bytes.restype = library.stub_device_bytes.restype = ctypes.c_size_t
    return CudaRuntime(path, 0), library
