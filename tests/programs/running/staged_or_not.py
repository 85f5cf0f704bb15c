"""Programs of ``tests/running/test_staging.py``."""

from __future__ import annotations

from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, model, report


def which_sessions_stage() -> None:
    from ortgpu.provider.devices import Device
    from ortgpu.running import staging

    GPU = Device("cuda", 0, None, None, None, None, None)
    OPTIONS = {"CUDAExecutionProvider": {"enable_cuda_graph": "0"}, "CPUExecutionProvider": {}}

    def stages(text, options=OPTIONS, device=GPU, **arguments):
        # A session that says of itself that it is on a GPU
        session = GPUSession(model(text) if isinstance(text, str) else text, **arguments)
        session.device = device or session.device
        session._provider_options = options
        return staging.may_stage(session)

    small = "t (float[100, 3] x) => (float[100, 3] y) { y = Neg(x) }"
    large = "t (float[9, 1000000] x) => (float[9, 1000000] y) { y = Neg(x) }"
    texts = "t (string[n] x) => (string[n] y) { y = Identity(x) }"
    grows = "t (float[1] x, int64[1] s) => (float[n] y) { y = Expand(x, s) }"
    not_utf8 = model("t (float[batch] x) => (float[batch] y) { y = Neg(x) }").replace(b"batch", b"b\xe4t\xffh")
    tiled = "t (float[5000000] x, int64[1] s) => (float[batch] y) { y = Tile(x, s) }"
    not_utf8_out = model(tiled).replace(b"batch", b"b\xe4t\xffh")  # which is not looked at first
    graphs = {**OPTIONS, "CUDAExecutionProvider": {"enable_cuda_graph": "1"}}
    stream = {**OPTIONS, "CUDAExecutionProvider": {"has_user_compute_stream": "1", "user_compute_stream": "42"}}
    report(
        [
            stages(NEG),
            stages(large),
            stages(grows),
            stages(small),
            stages(texts),
            stages(NEG, device=None),
            stages(NEG, graphs),
            stages(NEG, {"TensorrtExecutionProvider": {}, **OPTIONS}),
            stages(NEG, pinned_memory_limit=0),
            type(GPUSession(NEG)._gpu_runner).__name__,
            stages(NEG, stream),
            stages(not_utf8),
            stages(not_utf8_out),
        ]
    )
