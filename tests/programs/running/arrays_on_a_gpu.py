"""Programs of ``tests/running/test_device_arrays.py``."""

from __future__ import annotations

import ctypes
import dataclasses
import sys

import numpy as np

from ortgpu import GPUSession
from ortgpu.running import cudart, device_arrays, streams
from tests.programs.on_cpu import NEG, report, stub_runtime
from tests.programs.running.device_arrays import Foreign

runtime, stub = stub_runtime(sys.argv[1])
cudart.context_is_active = lambda ordinal: True  # type: ignore[attr-defined]  # its name in there
session = GPUSession(NEG)
session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0)
streams.runtime_of = lambda device: runtime  # type: ignore[attr-defined]  # its name in there
array = Foreign(np.ones(4, np.float32), (2, 0))


def waiting_for_an_array_leaves_the_threads_device_as_it_was() -> None:
    stub.cudaSetDevice(1)
    device_arrays.wrap_arrays(session, {"x": array})
    current = ctypes.c_int()
    stub.cudaGetDevice(ctypes.byref(current))
    report([current.value, stub.stub_capture_mode()])
