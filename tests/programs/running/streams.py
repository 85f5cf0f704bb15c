"""Programs of ``tests/running/test_streams.py``."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import types

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ortgpu import GPUSession
from ortgpu.running import cudart, streams
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, report, stub_runtime

os.environ["STUB_CUDART_LATE"] = "1"
runtime, stub = stub_runtime(sys.argv[1])
cudart.context_is_active = lambda ordinal: True  # type: ignore[attr-defined]  # its name in there
streams.runtime_of = lambda device: runtime if device.is_gpu else None  # type: ignore[attr-defined]  # its name in there
session = GPUSession(NEG)
session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0)
session._gpu_runner.caller = ()
DEFAULT, PER_THREAD, side = 1, 2, runtime.new_stream()


def pinned():
    address = ctypes.c_void_p()
    runtime.allocate_pinned(16, address)
    array = np.frombuffer((ctypes.c_char * 16).from_address(address.value), np.float32)
    array[:] = 0
    return array


def copy(to, source, stream):
    runtime.copy(to.ctypes.data, source.ctypes.data, 16, stream)


x, y, new, kept = pinned(), pinned(), pinned(), pinned()
new[:] = 5


def write(stream):
    x[:] = 0
    copy(x, new, stream)


def bound():
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, [4], x.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, [4], y.ctypes.data)
    session.run_with_iobinding(binding)
    return float(y[0])


def by_values():
    return float(session.run_with_ort_values(None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})[0].numpy()[0])


def by_vector():
    taken, given = native.OrtValueVector(), native.OrtValueVector()
    taken.push_back(onnxruntime.OrtValue.ortvalue_from_numpy(x)._ortvalue)
    device = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
    session.run_with_ortvaluevector(onnxruntime.RunOptions(), ["x"], taken, ["y"], given, [device])
    return float(given[0].numpy()[0])


WAYS = {"bound": bound, "by_values": by_values, "by_vector": by_vector}


def library(stream):
    # As much of PyTorch as is asked for its current stream
    current = lambda ordinal: types.SimpleNamespace(cuda_stream=stream)
    cuda = types.SimpleNamespace(is_initialized=lambda: True, current_stream=current)
    return types.SimpleNamespace(cuda=cuda, _C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: stream))


def cupy(stream):
    current = lambda ordinal: types.SimpleNamespace(ptr=stream)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=current))


def another_stream_is_not_waited_for() -> None:
    sys.modules["torch"] = library(0)
    write(side)
    report([bound(), stub.stub_late_copies()])


def memory_of_an_output_is_read_before_it_is_written_again() -> None:
    x[:], y[:] = 5, 7
    copy(kept, y, DEFAULT)
    report([bound(), float(kept[0])])


def the_callers_device_stays_the_current_one() -> None:
    stub.cudaSetDevice(1)
    write(DEFAULT)
    result, current = bound(), ctypes.c_int()
    stub.cudaGetDevice(ctypes.byref(current))
    report([result, current.value, stub.stub_capture_mode()])


def a_session_in_a_stream_of_the_callers_waits_on_the_gpu() -> None:
    own = runtime.new_stream()
    session._gpu_runner.caller = (streams.CallerStreams(runtime, own, ()),)
    write(DEFAULT)
    streams.wait_for_caller(session)
    before = [float(x[0]), runtime.pending([own, DEFAULT]) == [own, DEFAULT]]
    copy(kept, x, own)
    streams.order_results(session)
    copy(y, kept, PER_THREAD)
    after = float(y[0])
    runtime.synchronise(PER_THREAD)
    report([before, after, float(kept[0]), float(y[0])])


def nothing_is_added_to_a_stream_that_the_caller_captures() -> None:
    own = runtime.new_stream()
    session._gpu_runner.caller = (streams.CallerStreams(runtime, own, ()),)
    write(DEFAULT)
    stub.stub_begin_capture(ctypes.c_void_p(own))
    streams.wait_for_caller(session)
    streams.order_results(session)
    report([runtime.pending([own, DEFAULT]) == [DEFAULT], runtime.end_capture(own)])


def pytorch_that_has_not_used_cuda_is_not_asked() -> None:
    asked = []
    for cuda in (None, types.SimpleNamespace(), types.SimpleNamespace(is_initialized=lambda: False)):
        sys.modules["torch"] = types.SimpleNamespace(**({} if cuda is None else {"cuda": cuda}))
        write(DEFAULT)
        asked.append(bound())
    sys.modules["cupy"] = types.SimpleNamespace()
    write(DEFAULT)
    report([*asked, bound()])


def a_run_reads_what_its_caller_has_queued() -> None:
    from ortgpu.provider.lifetime import ContextCheck

    way, context = sys.argv[2], int(sys.argv[3])
    if context:
        session._gpu_context = ContextCheck(lambda: 0, ctypes.c_ulonglong(context), 7)
    results = [WAYS[way]()]
    for written in (DEFAULT, PER_THREAD):
        write(written)
        results.append(WAYS[way]())
    for name, module in (("torch", library(side)), ("cupy", cupy(side))):
        sys.modules[name] = module
        write(side)
        results.append(WAYS[way]())
        del sys.modules[name]
    report([results, stub.stub_late_copies(), stub.stub_events(), stub.stub_capture_mode()])
