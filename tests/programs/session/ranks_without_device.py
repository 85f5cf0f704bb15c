"""Programs of ``tests/session/test_ranks_without_device.py``."""

from __future__ import annotations

from tests.programs.machines import report


def opened() -> None:
    import sys
    import types
    import warnings

    import onnxruntime

    import ortgpu
    from ortgpu import GPUSession

    model = sys.argv[1]
    if len(sys.argv) > 2:  # as much of PyTorch as is asked for its current device
        is_used, current = int(sys.argv[2]) >= 0, lambda: int(sys.argv[2])
        sys.modules["torch"] = types.SimpleNamespace(
            cuda=types.SimpleNamespace(is_initialized=lambda: is_used, current_device=current)
        )

    def opened(make):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = make()
        said = [str(warning.message) for warning in caught if "for_rank" in str(warning.message)]
        files = [warning.filename for warning in caught if "for_rank" in str(warning.message)]
        return [session.device.ordinal, len(said), set(files) <= {__file__}]

    def guarded():
        with ortgpu.enforce():
            return onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])

    options = [("CUDAExecutionProvider", {"device_id": 0})]
    report(
        {
            "plain": opened(lambda: GPUSession(model)),
            "named": opened(lambda: GPUSession(model, device=0)),
            "by option": opened(lambda: GPUSession(model, providers=options)),
            "guarded": opened(guarded),
        }
    )
