"""Programs of ``tests/session/test_portable_providers.py``."""

from __future__ import annotations

from tests.programs.machines import report


def opened() -> None:
    import logging
    import sys

    import onnxruntime

    from ortgpu import GPUSession

    lines = []

    class Noting(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("ortgpu").addHandler(Noting())
    logging.getLogger("ortgpu").setLevel("INFO")

    def opened(providers):
        lines.clear()
        try:
            session = GPUSession(sys.argv[1], providers=providers)
        except Exception as error:
            return [type(error).__name__, str(error)]
        return [session.get_providers(), [line for line in lines if line.startswith("left out")]]

    available, CUDA, CPU = onnxruntime.get_available_providers(), "CUDAExecutionProvider", "CPUExecutionProvider"
    report(
        {
            "available": opened(available),
            "reversed": opened(available[::-1]),
            "TensorRT first": opened([available[0], CUDA]),
            "TensorRT with options": opened([(available[0], {"trt_fp16_enable": "1"}), *available[1:]]),
            "DirectML": opened([CUDA, "DmlExecutionProvider", CPU]),
            "Azure": opened(["AzureExecutionProvider", CUDA, CPU]),
            "Azure alone": opened(["AzureExecutionProvider", CPU]),
        }
    )
