"""Programs of ``tests/running/test_bindings.py``."""

from __future__ import annotations

from tests.programs.machines import report


# The arena of ONNX Runtime is the real one, over libraries of CUDA that compute nothing.
def full() -> None:
    import numpy as np
    import onnx.parser
    import onnxruntime

    from ortgpu import GPUSession

    text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
    limit = {"gpu_mem_limit": str(64 << 20)}
    model = onnx.parser.parse_model(text).SerializeToString()
    session = GPUSession(model, providers=[("CUDAExecutionProvider", limit)], pinned_memory_limit=0)
    big, small = np.zeros(64 << 20, np.float32), np.zeros(4, np.float32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(big)

    def outcome(action):
        try:
            return {"returned": repr(action())}
        except Exception as error:
            return {"type": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__}

    def bound(feed):
        binding = session.io_binding()
        binding.bind_cpu_input("x", feed)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0].shape

    report(
        {
            "run": outcome(lambda: session.run(None, {"x": big})),
            "bind_cpu_input": outcome(lambda: bound(big)),
            "bind_ortvalue_input": outcome(lambda: session.io_binding().bind_ortvalue_input("x", value)),
            "then": outcome(lambda: bound(small)),
            "wrong": outcome(lambda: session.io_binding().bind_cpu_input("z", small)),
        }
    )
