"""Programs of ``tests/diagnosis/test_runtime_words.py`` over the lab's driver."""

from __future__ import annotations

import json
import sys

from tests.programs.machines import report


def named() -> None:
    words = json.loads(sys.argv[1])

    import threading

    import numpy as np
    import onnx
    import onnx.parser
    import onnxruntime

    import ortgpu
    from ortgpu import GPUSession

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Identity(x) }'
    model = onnx.parser.parse_model(text).SerializeToString()
    session = GPUSession(model, pinned_memory_limit=0)
    other = GPUSession(model, pinned_memory_limit=0)
    x = np.ones(3, np.float32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    named = {}

    def bound(*calls):
        binding = session.io_binding()
        for method, *arguments in calls:
            getattr(binding, method)(*arguments)
        session.run_with_iobinding(binding)

    def asynchronous(name):
        ended, told = threading.Event(), []

        def callback(results, data, text):
            told.append(text)
            ended.set()

        session.run_async([name], {"x": x}, callback, None)
        assert ended.wait(30)
        raise RuntimeError(told[0])

    calls = {
        "run, feed": lambda name: session.run(None, {"x": x, name: x}),
        "run, output": lambda name: session.run([name], {"x": x}),
        "run_with_ort_values, feed": lambda name: session.run_with_ort_values(None, {"x": value, name: value}),
        "run_on_device, feed": lambda name: session.run_on_device(None, {"x": x, name: x}),
        "run_on_device, output": lambda name: session.run_on_device([name], {"x": x}),
        "bind_cpu_input": lambda name: bound(("bind_cpu_input", name, x)),
        "bind_input": lambda name: bound(("bind_input", name, "cuda", 0, np.float32, [3], 256)),
        "bind_output": lambda name: bound(("bind_cpu_input", "x", x), ("bind_output", name)),
        "bind_ortvalue_input": lambda name: bound(("bind_ortvalue_input", name, value)),
        "bind_ortvalue_output": lambda name: bound(("bind_cpu_input", "x", x), ("bind_ortvalue_output", name, value)),
        "run_async": asynchronous,
    }
    for way, call in calls.items():
        for name in words:
            try:
                call(name)
            except Exception as error:
                named.setdefault(way, []).append([type(error).__name__, isinstance(error, ortgpu.GPUError), str(error)])
    works = [each.run(None, {"x": x})[0].shape for each in (session, other)]
    report([named, works])


def sticky() -> None:
    import os

    import numpy as np
    import onnx.parser
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    from ortgpu import GPUSession

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Identity(x) }'
    model = onnx.parser.parse_model(text).SerializeToString()

    class Failing:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def run(self, *_):
            raise native.Fail("CUDA failure 700: an illegal memory access was encountered ; GPU=0")

    def outcome(action):
        try:
            action()
        except Exception as error:
            return type(error).__name__

    session, other = (GPUSession(model, pinned_memory_limit=0) for _ in range(2))
    del vars(session)["_gpu_runner"]  # type: ignore[attr-defined]  # set here, or of the type that it is
    session._sess = Failing(session._sess)
    feed = {"x": np.ones(3, np.float32)}
    found = []
    for code in ("0", "2", "719"):
        os.environ["STUB_CUDA_STICKY"] = code
        found.append([outcome(lambda: each.run(None, feed)) for each in (session, other)])
    report(found)


def unfit() -> None:
    words = sys.argv[1]

    import os

    import onnx.parser
    import onnxruntime

    import ortgpu

    os.environ["STUB_CUDA_CONTEXT"] = "0"  # the provider, which makes the context, is made after the model is read

    def model(node, type="float"):
        text = f'<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => ({type}[n] y) {{ y = {node} }}'
        made = onnx.parser.parse_model(text)
        made.graph.node[0].name = words
        return made

    models = [model("Relu(x)", "int64"), model("Concat<axis = 9>(x, x)"), model("Relu(x)"), model("Relu(x)")]
    models[2].graph.output[0].name = words
    models[3].graph.input[0].name = models[3].graph.node[0].input[0] = words
    models[3].graph.input.append(models[3].graph.input[0])
    refused = []
    for each in models:
        for kind in (ortgpu.GPUSession, onnxruntime.InferenceSession):
            try:
                kind(each.SerializeToString(), providers=["CUDAExecutionProvider"])
            except Exception as error:
                refused.append([type(error).__name__, str(error)])
    ortgpu.provider.lifetime.refuse_if_lost()
    report(refused)


def without_context() -> None:
    import os

    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    import ortgpu
    from ortgpu.diagnosis.probe.probing import RELU

    def fail(*_):
        raise native.Fail("CUDA failure 700: an illegal memory access was encountered")

    works = onnxruntime.InferenceSession._create_inference_session
    found = []
    for context, fails in (("0", True), ("1", False), ("1", True), ("1", False)):
        os.environ.update(STUB_CUDA_CONTEXT=context, STUB_CUDA_STICKY="700" if fails else "0")
        onnxruntime.InferenceSession._create_inference_session = fail if fails else works
        try:
            found.append(ortgpu.GPUSession(RELU).device.kind)
        except ortgpu.GPUError as error:
            found.append(type(error).__name__)
    report(found)


def refused() -> None:
    import onnx
    import onnx.parser
    import onnxruntime

    import ortgpu

    text = '<ir_version: 8, opset_import: ["": 17]> g (double[n] x) => (double[n] y) { y = Tan(x) }'
    model = onnx.parser.parse_model(text)
    model.graph.node[0].name = sys.argv[1]
    refused = []
    for kind in (ortgpu.GPUSession, onnxruntime.InferenceSession):
        try:
            kind(model.SerializeToString(), providers=["CUDAExecutionProvider"])
        except Exception as error:
            refused.append([type(error).__name__, str(error)])
    ortgpu.provider.lifetime.refuse_if_lost()
    report(refused)
