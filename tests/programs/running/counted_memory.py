"""The program of ``tests/running/test_memory.py`` on a machine that counts memory."""

from __future__ import annotations

from tests.programs.machines import report


def counted() -> None:
    MIB = 1 << 20

    import ctypes

    import numpy as np
    import onnx.parser

    from ortgpu import GPUSession
    from ortgpu.running.cudart import runtime_on

    big, small = np.zeros((64, MIB // 4), np.float32), np.zeros((1, MIB // 4), np.float32)
    text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'
    model = onnx.parser.parse_model(text).SerializeToString()

    def held():
        return device_bytes() - before

    def arena():
        return session.memory.arena

    session = GPUSession(model)
    device_bytes = runtime_on(0)._library.stub_device_bytes
    device_bytes.restype = ctypes.c_size_t
    session.close()
    before, steps = device_bytes(), {}

    def step(name):
        steps[name] = [held(), arena()]

    for arguments in ({}, {"providers": [("CUDAExecutionProvider", {"gpu_mem_limit": str(1 << 30)})]}):
        session = GPUSession(model, **arguments)
        session.run(None, {"x": small})
        step("small")
        session.run(None, {"x": big})
        step("big")
        session.trim()
        step("trimmed")
        session.run(None, {"x": small})
        step("again")
        value = session.run_on_device(None, {"x": big})[0]
        step("kept")
        session.trim()
        step("trimmed with a value")
        del value
        session.trim()
        step("trimmed without")
        session.close()
        steps["closed"] = [held(), 0]
        report_to = "limited" if arguments else "unlimited"
        if not arguments:
            unlimited = dict(steps)
    report({"unlimited": unlimited, "limited": steps})
