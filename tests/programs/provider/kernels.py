"""Programs of ``tests/provider/test_kernels.py``."""

from __future__ import annotations

from tests.programs.machines import report


def place() -> None:
    import sys
    from pathlib import Path

    import onnxruntime

    from ortgpu import preload
    from ortgpu.provider.options import recording_options
    from ortgpu.provider.placement import read_placement

    preload()
    onnxruntime.set_default_logger_severity(4)
    on_gpu = []
    for path in Path(sys.argv[1]).iterdir():
        try:
            providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
            session = onnxruntime.InferenceSession(path, recording_options(), providers=providers)
        except Exception:
            continue  # a type that the operator does not take, or that no provider has a kernel for
        assert session.get_providers() == providers
        nodes = read_placement(session).nodes
        if all(node.provider == providers[0] for node in nodes):
            on_gpu.append(path.stem)
    report(on_gpu)
