"""Programs of ``tests/pytest_plugin/test_testing.py``."""

from __future__ import annotations


def what_warms_up_a_gpu() -> None:
    import contextlib

    import onnxruntime

    from ortgpu import testing
    from ortgpu.provider.devices import Device

    models = []

    @contextlib.contextmanager
    def on_the_cpu(device):
        cpu = ["CPUExecutionProvider"]
        yield lambda model: models.append(model) or onnxruntime.InferenceSession(model, providers=cpu)

    testing.gpu_sessions = on_the_cpu
    gpus = [Device("cuda", ordinal, None, None, None, None, None) for ordinal in (0, 0, 1)]
    for gpu in gpus:
        testing._warm_up(gpu)
    assert len(models) == 4, models
