"""Programs about machines and requests that a GPU refuses; see programs.py."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import CUDA, attempt, mapped_cuda_libraries
from tests.gpu.running import elementwise, negated
from tests.support.children import child_environment, report

OPEN_CONVOLUTION = """
import sys
from tests.gpu.programs import attempt, random_feed
from ortgpu import GPUSession

def opened():
    with GPUSession(sys.argv[1]) as session:
        return [list(value.shape) for value in session.run(None, random_feed(session, 1))]

attempt(sys.argv[2], opened)
"""


class FilledMemory:
    """Device memory of GPU 0 that this process holds, taken through the driver alone."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.blocks: list[ctypes.c_uint64] = []

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def leave(self, size: int) -> int:
        """Give back what was taken, take all but `size` bytes, and return what is free."""
        while self.blocks:
            self._call("cuMemFree_v2", self.blocks.pop())
        block = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(self.free() - size))
        self.blocks.append(block)
        return self.free()


def memory_is_full(model: str, left: list[int]) -> None:
    """Open `model` in fresh processes beside one that leaves so many MiB of the GPU free."""
    filled = FilledMemory()
    for mib in left:
        free = filled.leave(mib << 20) >> 20
        command = [sys.executable, "-W", "ignore", "-c", OPEN_CONVOLUTION, model, f"{mib} MiB left"]
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=60, env=child_environment(), check=False
        )
        report(f"{mib} MiB left: child", {"returncode": done.returncode, "free": free, "stderr": done.stderr[-2000:]})


def cuda_graphs() -> None:
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession
    from tests.support.known_placements import control_flow, island

    graphs = [(CUDA, {"enable_cuda_graph": "1"})]

    def replayed() -> object:
        """With bound values of fixed addresses: a replayed graph returns nothing from run()."""
        with GPUSession(elementwise(2), providers=graphs) as session:
            x = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float32), "cuda", 0)
            y = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(2, np.float32), "cuda", 0)
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", x)
            binding.bind_ortvalue_output("y", y)
            results = []
            for number in range(3):
                x.update_inplace(np.array([number, -2], np.float32))
                session.run_with_iobinding(binding)
                results.append(y.numpy().tolist())
            return results

    attempt("all on CUDA", replayed)
    attempt("island", lambda: GPUSession(island(), providers=graphs, cpu_nodes="allow").get_providers())
    attempt("control flow", lambda: GPUSession(control_flow(), providers=graphs, cpu_nodes="allow").get_providers())


def real_transform() -> bytes:
    """y = Rfft(x) over the last axis: the operator for which ONNX Runtime opens cuFFT."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    node = helper.make_node("Rfft", ["x"], ["y"], domain="com.microsoft", normalized=0, onesided=1, signal_ndim=1)
    graph = helper.make_graph(
        [node],
        "rfft",
        [value("x", TensorProto.FLOAT, [1, 8])],
        [value("y", TensorProto.FLOAT, [1, 5, 2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return data


def transform() -> None:
    import numpy as np

    from ortgpu import GPUSession

    def spectrum() -> object:
        with GPUSession(real_transform()) as session:
            value = session.run(None, {"x": np.ones((1, 8), np.float32)})[0]
            return [float(value.flat[0]), float(np.abs(value.reshape(-1)[1:]).max())]

    def negation() -> object:
        with GPUSession(elementwise(2)) as session:
            return negated(session)

    attempt("spectrum", spectrum)
    attempt("negation", negation)
    report("libraries", mapped_cuda_libraries())


def left_in_this_process(model: str) -> None:
    """As when something between a program and ONNX Runtime takes the GPU out of what is asked for."""
    import onnxruntime

    from ortgpu import GPUSession

    construct = onnxruntime.InferenceSession.__init__

    def without(self: Any, model: Any, options: Any = None, providers: Any = None, **others: Any) -> None:
        construct(self, model, options, providers=["CPUExecutionProvider"], **others)

    onnxruntime.InferenceSession.__init__ = without
    attempt("session", lambda: GPUSession(model).get_providers())


PROGRAMS: dict[str, Callable[..., None]] = {
    "left_in_this_process": left_in_this_process,
    "memory_is_full": memory_is_full,
    "cuda_graphs": cuda_graphs,
    "transform": transform,
}
