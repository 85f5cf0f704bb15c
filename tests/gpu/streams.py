"""Programs about work that is still queued on the GPU when a session runs; see programs.py."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import CUDA
from tests.support.children import report

SIZE = 1 << 18
DELAY = 500_000  # cycles of the GPU, a quarter of a millisecond
HOST = "h (float[n] x, int64[m] shape) => (float[a, b] y) { y = Reshape(x, shape) }"


def neg() -> bytes:
    from onnx import parser

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
    model: bytes = parser.parse_model(text).SerializeToString()
    return model


class Ways:
    """The ways to give a session memory of the GPU. Each returns the element of the result that is looked at."""

    def __init__(self, session: Any, options: Any = None) -> None:
        import torch

        self.session, self.options = session, options
        self.x, self.y = torch.zeros(SIZE, device="cuda"), torch.empty(SIZE, device="cuda")

    def bind_input(self) -> Any:
        import numpy as np

        binding = self.session.io_binding()
        binding.bind_input("x", "cuda", 0, np.float32, [SIZE], self.x.data_ptr())
        binding.bind_output("y", "cuda", 0, np.float32, [SIZE], self.y.data_ptr())
        self.session.run_with_iobinding(binding, self.options)
        return self.y[7]

    def bind_ortvalue_input(self) -> Any:
        binding = self.session.io_binding()
        binding.bind_ortvalue_input("x", self.value())
        binding.bind_ortvalue_output("y", self.value(self.y))
        self.session.run_with_iobinding(binding, self.options)
        return self.y[7]

    def run_with_ort_values(self) -> Any:
        return self.session.run_with_ort_values(None, {"x": self.value()})[0].numpy()[7]

    def run_with_ortvaluevector(self) -> Any:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as native

        taken, given = native.OrtValueVector(), native.OrtValueVector()
        taken.push_back(self.value()._ortvalue)
        device = onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()
        self.session.run_with_ortvaluevector(onnxruntime.RunOptions(), ["x"], taken, ["y"], given, [device])
        return given[0].numpy()[7]

    def run_of_an_ortvalue(self) -> Any:
        return self.session.run(None, {"x": self.value()})[0][7]

    def run_of_a_tensor(self) -> Any:
        return self.session.run(None, {"x": self.x})[0][7]

    def run_on_device(self) -> Any:
        import torch

        (result,) = self.session.run_on_device(None, {"x": self.x})
        return torch.from_dlpack(result)[7]

    def map_of_ortvalues(self) -> Any:
        return next(iter(self.session.map([{"x": self.value()}])))[0][7]

    def map_of_tensors(self) -> Any:
        return next(iter(self.session.map([{"x": self.x}])))[0][7]

    def value(self, tensor: Any = None) -> Any:
        import onnxruntime

        return onnxruntime.OrtValue.from_dlpack(self.x if tensor is None else tensor)


ALL = (
    "bind_input", "bind_ortvalue_input", "run_with_ort_values", "run_with_ortvaluevector", "run_of_an_ortvalue",
    "run_of_a_tensor", "run_on_device", "map_of_ortvalues", "map_of_tensors",
)  # fmt: skip
PLAIN = ALL[:5]


def streams() -> dict[str, tuple[Any, Any]]:
    """By name: the context in which memory is written, and that in which the session runs."""
    import torch

    stream: Any = torch.cuda.stream
    external: Any = torch.cuda.ExternalStream
    side: Any = torch.cuda.Stream()
    found: dict[str, tuple[Any, Any]] = {
        "torch's default stream": (contextlib.nullcontext, contextlib.nullcontext),
        "torch's current stream": (lambda: stream(side), lambda: stream(side)),
        "the default stream, torch in another": (contextlib.nullcontext, lambda: stream(side)),
        "the per-thread default stream": (lambda: stream(external(2)), contextlib.nullcontext),
    }
    with contextlib.suppress(ImportError):
        cupy: Any = importlib.import_module("cupy")
        of_cupy = cupy.cuda.Stream(non_blocking=True)
        found["CuPy's current stream"] = (lambda: stream(external(of_cupy.ptr)), lambda: of_cupy)
    return found


def wrong(ways: Ways, way: Callable[[], Any], writing: Any, running: Any, rounds: int) -> int:
    import torch

    count = 0
    for number in range(1, rounds + 1):
        with writing():
            torch.cuda._sleep(DELAY)
            ways.x.fill_(float(number))
        with running():
            count += float(way()) != -number
    return count


def races(rounds: int, plain_rounds: int = 0, which: list[str] | None = None) -> None:
    """How often each way reads old data, by stream; in sessions that have a stream of the caller's, too."""
    import onnxruntime
    import torch

    from ortgpu import GPUSession

    warnings.simplefilter("ignore")
    own: Any = torch.cuda.Stream()
    options = {"user_compute_stream": str(own.cuda_stream)}
    not_waiting = onnxruntime.RunOptions()
    not_waiting.add_run_config_entry("disable_synchronize_execution_providers", "1")
    kinds: dict[str, tuple[Any, Any, tuple[str, ...], int]] = {
        "session": (GPUSession(neg()), None, ALL, rounds),
        "session in the caller's stream": (GPUSession(neg(), providers=[(CUDA, options)]), None, ALL, rounds),
        "session that does not wait": (
            GPUSession(neg(), providers=[(CUDA, options)]), not_waiting, ("bind_input", "bind_ortvalue_input"), rounds,
        ),
    }  # fmt: skip
    if plain_rounds:
        kinds["plain"] = (onnxruntime.InferenceSession(neg(), providers=[CUDA]), None, PLAIN, plain_rounds)
    found: dict[str, int] = {}
    for kind, (session, run_options, names, count) in kinds.items():
        ways = Ways(session, run_options)
        for name in names:
            for stream, (writing, running) in streams().items():
                way = getattr(ways, name)
                found[f"{kind}, {name}, {stream}"] = wrong(ways, way, writing, running, count)
    report("wrong", found)


def written_over(rounds: int) -> None:
    """How often a run writes to memory of an output that the caller's queued work still has to read."""
    import torch

    from ortgpu import GPUSession

    ways = Ways(GPUSession(neg()))
    kept, count = torch.empty(SIZE, device="cuda"), 0
    for number in range(1, rounds + 1):
        ways.x.fill_(float(number))
        ways.y.fill_(0.0)
        torch.cuda._sleep(DELAY)
        kept.copy_(ways.y)
        ways.bind_input()
        count += float(kept[7]) != 0
    report("wrong", count)


def read_on_the_host(rounds: int) -> None:
    """How often an input that ONNX Runtime takes on the CPU is copied from the GPU before it is written."""
    import numpy as np
    import torch
    from onnx import parser

    from ortgpu import GPUSession

    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {HOST}').SerializeToString()
    session = GPUSession(model, cpu_nodes="allow")
    x, shape = torch.zeros(12, device="cuda"), torch.tensor([1, 12], device="cuda")
    count = 0
    for number in range(rounds):
        sides = [(2, 6), (3, 4)][number % 2]
        torch.cuda._sleep(DELAY)
        shape.copy_(torch.tensor(sides, pin_memory=True), non_blocking=True)
        binding = session.io_binding()
        binding.bind_input("x", "cuda", 0, np.float32, [12], x.data_ptr())
        binding.bind_input("shape", "cuda", 0, np.int64, [2], shape.data_ptr())
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        count += binding.copy_outputs_to_cpu()[0].shape != sides
    report("wrong", count)


PROGRAMS: dict[str, Callable[..., None]] = {
    "races": races,
    "written_over": written_over,
    "read_on_the_host": read_on_the_host,
}
