"""What children of test_release_matrix.py do: the source of a function is passed on, so each imports what it uses."""

from __future__ import annotations

from typing import Any


def load_libraries() -> dict[str, Any]:
    import os
    import re
    import sys

    import ortgpu

    found = ortgpu.preload()
    assert found.provider is not None
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = {line.split(None, 5)[5].strip() for line in file if "/" in line}
    return {
        "problem": found.provider.problem,
        "cuda": found.provider.cuda_major,
        "needed": found.provider.needed,
        "ok": found.ok,
        "libraries": {
            lib.soname: {"path": lib.path, "source": lib.source, "required": lib.required} for lib in found.libraries
        },
        "missing": [(lib.soname, [(file.path, file.problem) for file in lib.rejected]) for lib in found.missing],
        "roots": found.roots,
        "cudnn_cuda_major": found.cudnn_cuda_major,
        "driver_missing": found.driver_missing,
        "mapped": sorted(path for path in mapped if re.match(r"lib(cu|nv)", os.path.basename(path))),
        "imported": sorted({"onnxruntime", "onnx", "rich", "click"} & set(sys.modules)),
    }


def open_provider() -> str | None:
    """What the loader says of the provider file, once its libraries are loaded."""
    from ortgpu.provider.preloading import preload, why_provider_does_not_load

    provider = preload().provider
    import onnxruntime as onnxruntime  # 1.27.0 needs what was loaded, and every provider needs it

    assert provider is not None
    return why_provider_does_not_load(provider)


def raise_without_driver(model: bytes) -> dict[str, Any]:
    """The error as a program sees it that has the model in memory."""
    from ortgpu import GPUSession
    from ortgpu.errors import GPUError

    try:
        GPUSession(model)
    except GPUError as error:
        return {"type": type(error).__name__, "text": str(error), "others": [str(other) for other in error.others]}
    return {"type": None}


def use_on_cpu(path: str, model: bytes) -> dict[str, Any]:
    """Everything that a session does which is not about the GPU."""
    import gc
    import pathlib
    import queue
    import warnings
    import weakref

    import numpy

    from ortgpu import GPUSession
    from ortgpu.errors import CPUExecutionWarning, ExecutionError, ProviderRequestError

    warnings.simplefilter("ignore", CPUExecutionWarning)
    import onnxruntime  # 1.27.0 can be imported since ortgpu has loaded what it links

    x = numpy.array([[1, 2], [-3, 4]], dtype=numpy.float32)
    y = numpy.maximum(x @ numpy.array([[1, 0], [0, -1]], dtype=numpy.float32), 0)
    seen: dict[str, Any] = {}

    def same(outputs: Any) -> bool:
        return bool(numpy.array_equal(outputs[0], y))

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = GPUSession(model, options, disabled_optimizers=["ConstantFolding"], allow_cpu=True)
    seen["providers"] = session.get_providers()
    seen["device"] = str(session.device)
    seen["placed"] = session.placement.by_provider if session.placement.known else None
    seen["fallback"] = session._enable_fallback
    seen["is a session"] = isinstance(session, onnxruntime.InferenceSession)
    seen["names"] = [node.name for node in (*session.get_inputs(), *session.get_outputs())]
    seen["metadata"] = session.get_modelmeta().graph_name
    seen["options kept"] = session.get_session_options().intra_op_num_threads
    seen["run"] = same(session.run(None, {"x": x}))
    seen["run with options"] = same(session.run(["y"], {"x": x}, onnxruntime.RunOptions()))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    seen["run with values"] = same([result.numpy() for result in session.run_with_ort_values(["y"], {"x": value})])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    seen["run with binding"] = same(binding.copy_outputs_to_cpu())
    results: queue.Queue[Any] = queue.Queue()
    session.run_async(["y"], {"x": x}, lambda outputs, *_: results.put(outputs), None)
    seen["run in background"] = same(results.get(timeout=20))

    seen["refused"] = {}
    for name, arguments in (("enable_fallback", ()), ("set_providers", (["CPUExecutionProvider"],))):
        try:
            getattr(session, name)(*arguments)
        except ProviderRequestError:
            seen["refused"][name] = True

    del binding, value
    native = weakref.ref(session._sess)
    session.close()
    session.close()
    gc.collect()
    seen["closed means freed"] = native() is None
    seen["closed"] = {}
    uses = {
        "run": lambda: session.run(None, {"x": x}),
        "run_with_ort_values": lambda: session.run_with_ort_values(["y"], {}),
        "run_async": lambda: session.run_async(["y"], {"x": x}, print, None),
        "run_with_iobinding": lambda: session.run_with_iobinding(session.io_binding()),
        "io_binding": session.io_binding,
        "get_inputs": lambda: list(session.get_inputs()),
        "get_outputs": lambda: session.get_outputs()[0],
        "get_modelmeta": lambda: session.get_modelmeta().graph_name,
        "end_profiling": session.end_profiling,
        "get_profiling_start_time_ns": lambda: session.get_profiling_start_time_ns() + 0,
    }
    for name, use in uses.items():
        try:
            use()
        except Exception as error:  # noqa: BLE001 - which one is what the test asks about
            seen["closed"][name] = f"{type(error).__name__}: {error}"
        else:
            seen["closed"][name] = "works"

    with GPUSession(pathlib.Path(path), allow_cpu=True) as from_path:
        seen["from a path"] = same(from_path.run(None, {"x": x}))
    try:
        from_path.run(None, {"x": x})
    except ExecutionError:
        seen["closed on leaving"] = True
    return seen


def fail_inside_a_provider(model: bytes) -> dict[str, Any]:
    """A run that fails the way after which ONNX Runtime builds a session anew on the CPU."""
    import warnings

    from ortgpu import GPUSession
    from ortgpu.errors import CPUExecutionWarning
    from ortgpu.provider.devices import Device

    warnings.simplefilter("ignore", CPUExecutionWarning)
    from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

    class Failing:
        """The session's own, until it runs."""

        def __init__(self, real: object) -> None:
            self.real = real

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def run(self, *_: object) -> None:
            raise EPFail("[ONNXRuntimeError] : 11 : EP_FAIL : made by the test")

    session = GPUSession(model, allow_cpu=True)
    session.device = Device("cuda", 0, None, None, None, None, None)
    session._sess = Failing(session._sess)
    try:
        session.run(None, {"x": [[0.0, 0.0]]})
    except Exception as error:  # noqa: BLE001 - which one is what the test asks about
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None}


def use_with_many_feeds(model: bytes) -> dict[str, Any]:
    import logging
    import warnings

    import numpy as np

    import ortgpu
    from ortgpu.errors import CPUExecutionWarning, GPUError
    from ortgpu.running.cudart import CudaRuntime
    from ortgpu.running.pinned import PinnedMemory

    class Foreign:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self) -> object:
            return feeds[3]["x"].__dlpack__()

    warnings.simplefilter("ignore", CPUExecutionWarning)
    seen: dict[str, Any] = {}
    with ortgpu.GPUSession(model, allow_cpu=True, cuda_graph=True) as session:
        feeds = [{"x": np.full((5000, 2), number, np.float32)} for number in range(20)]
        expected = [session.run(None, feed)[0] for feed in feeds]
        mapped = list(session.map(iter(feeds), in_flight=3))
        seen["mapped"] = [bool((got[0] == right).all()) for got, right in zip(mapped, expected, strict=True)]
        try:
            seen["foreign"] = bool((session.run(None, {"x": Foreign()})[0] == expected[3]).all())
        except GPUError as error:
            seen["foreign"] = error.summary
        seen["chosen"] = session.options_chosen

    # The runtime that the provider would use, without a driver: it refuses, and ordinary memory takes the place
    messages: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("ortgpu").setLevel(logging.DEBUG)
    logging.getLogger("ortgpu").addHandler(Noting())
    path = ortgpu.preload().path_of("libcudart")
    assert path is not None
    memory = PinnedMemory(CudaRuntime(path, 0), 1 << 30)
    seen["staged"] = memory.staged(feeds[0])["x"] is feeds[0]["x"] and memory.empty(3).shape == (3,)
    seen["pinned"] = memory.bytes_held
    seen["why not"] = messages[-1]
    return seen


def use_under_guard(model: bytes, installed_first: bool) -> dict[str, Any]:
    """Sessions that somebody else makes; 1.27.0 cannot even be imported unless something loads what it links."""
    import sys

    import ortgpu

    finders = list(sys.meta_path)
    if installed_first:
        ortgpu.install()
    else:
        ortgpu.preload()
    from onnxruntime import InferenceSession

    class Subclass(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def __init__(self, content: bytes) -> None:
            super().__init__(content, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])

    seen: dict[str, Any] = {}
    with ortgpu.enforce():
        makers: dict[str, Any] = {"plain": InferenceSession, "subclass": Subclass}
        for name, make in makers.items():
            try:
                seen[name] = make(model).get_providers()
            except Exception as error:  # noqa: BLE001 - which one is what the test asks about
                seen[name] = type(error).__name__
        on_cpu = InferenceSession(model, providers=["CPUExecutionProvider"])
        on_cpu.set_providers(["CPUExecutionProvider"])
        try:
            on_cpu.set_providers(["CUDAExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - the same
            seen["set_providers"] = type(error).__name__
        seen["sessions"] = [(record.kind, *record.providers) for record in ortgpu.sessions()]
    seen["runs"] = on_cpu.run(None, {"x": [[1.0, 2.0]]})[0].tolist()
    ortgpu.uninstall()
    seen["restored"] = not hasattr(InferenceSession.__init__, "__wrapped__") and sys.meta_path == finders
    return seen
