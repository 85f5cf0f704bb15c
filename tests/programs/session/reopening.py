"""Programs of ``tests/session/test_reopening.py``."""

from __future__ import annotations

from tests.programs.machines import report


def program() -> None:
    import ctypes
    import os
    import sys
    import threading
    import time

    import numpy as np
    import onnx.numpy_helper
    import onnx.parser
    import onnxruntime

    from ortgpu import GPUSession
    from ortgpu.provider import lifetime
    from ortgpu.running.cudart import runtime_on
    from ortgpu.session import failures

    os.chdir(sys.argv[1])
    MIB = 1 << 20
    text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Add(y, w) }'
    graph = onnx.parser.parse_model(text)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((1, MIB // 4), np.float32), "w"))
    model = graph.SerializeToString()
    with open("model.onnx", "wb") as file:
        file.write(model)
    WORDS = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running {} node. Name:'c' Status Message: "
        "bfc_arena.cc:360 Available memory of 60518144 is smaller than requested bytes of 67108864"
    )

    def of(mebibytes):
        return {"x": np.zeros((mebibytes, MIB // 4), np.float32)}

    def fails(session, node):
        return type(failures.explained_run(session, RuntimeError(WORDS.format(node)))).__name__

    def outcome(action):
        try:
            return repr(action())
        except Exception as error:
            return [type(error).__name__, str(error).splitlines()[0]]

    GPUSession(model).close()
    device_bytes = runtime_on(0)._library.stub_device_bytes
    device_bytes.restype = ctypes.c_size_t
    before = device_bytes()

    def held():
        return device_bytes() - before

    found = {}

    session = GPUSession("model.onnx", memory="400MiB", device="auto")
    session.run(None, of(20))
    inner, request = session._sess, session._request
    found["words"] = [fails(session, node) for node in ("Relu", "MatMul")]
    session.run(None, of(1))
    found["another operator"] = session._sess is inner
    for node in ("Conv", "ConvTranspose", "FusedConv"):
        fails(session, node)
        del inner
        found[node] = session.run(None, of(1))[0].shape, session._sess is None
        inner = session._sess
        found[node + " held"] = [held(), session.memory.arena]
    found["request"] = session._request == request
    found["ways"] = []
    bound = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(of(1)["x"])
    bound.bind_ortvalue_input("x", value)
    bound.bind_output("z")
    done = threading.Event()
    ways = {
        "run_with_iobinding": lambda: session.run_with_iobinding(bound),
        "run_with_ort_values": lambda: session.run_with_ort_values(None, {"x": value}),
        "run_on_device": lambda: session.run_on_device(None, of(1)),
        "map": lambda: list(session.map([of(1)])),
        "run_async": lambda: (session.run_async(None, of(1), lambda *_: done.set(), None), done.wait(60)),
        "io_binding": session.io_binding,
        "trim": session.trim,
        "memory": lambda: session.memory,
    }
    for name, way in ways.items():
        inner = session._sess
        fails(session, "Conv")
        way()
        found["ways"].append([name, session._sess is not inner, lifetime.OUTDATED is session._gpu_context])
    del bound, inner

    wrong, stop = [], threading.Event()

    def use():
        while not stop.is_set():
            try:
                if session.run(None, of(2))[0].shape != (2, MIB // 4) or session.get_inputs()[0].name != "x":
                    wrong.append("result")
            except Exception as error:
                wrong.append(repr(error))

    at_work = [threading.Thread(target=use) for _ in range(4)]
    for each in at_work:
        each.start()
    for _ in range(20):
        fails(session, "Conv")
        time.sleep(0.01)
    stop.set()
    for each in at_work:
        each.join()
    found["threads"] = wrong, session.run(None, of(1))[0].shape

    fails(session, "Conv")
    os.environ["STUB_CUDA_MEMORY"] = "1000"
    found["no room"] = [outcome(lambda: session.run(None, of(1))), outcome(lambda: session.run(None, of(1)))]
    del os.environ["STUB_CUDA_MEMORY"]
    found["then"] = session.run(None, of(1))[0].shape

    unlimited = GPUSession("model.onnx")
    unlimited.run(None, of(20))
    inner = unlimited._sess
    fails(unlimited, "Conv")
    found["unlimited"] = unlimited.run(None, of(1))[0].shape, unlimited._sess is not inner
    del inner
    os.rename("model.onnx", "other.onnx")
    fails(session, "Conv")
    found["no file"] = [outcome(lambda: session.run(None, of(1))), outcome(lambda: session.run(None, of(1)))]
    session.close()
    unlimited.close()
    found["closed"] = held()
    report(found)
