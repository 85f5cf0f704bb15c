"""A program with exceptions to the guard: ``guard_exemptions.py MODEL EXCEPTION...``. It reports who is guarded."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def outcome(action: Callable[[], Any]) -> str:
    try:
        return ",".join(action().get_providers())
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    import onnxruntime

    import ortgpu
    from tests.support.children import report

    nudging: Any = importlib.import_module("nudging")  # its module is not called tests.programs.nudging
    given, *exceptions = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(), "models")
    folder.mkdir()
    for name in ("vad.onnx", "other.onnx"):
        shutil.copy(given, folder / name)
    model, other = str(folder / "vad.onnx"), str(folder / "other.onnx")
    if exceptions:
        ortgpu.install(except_=exceptions)
    else:
        ortgpu.install()
    kept: list[Any] = []

    def keep(session: Any) -> Any:
        kept.append(session)
        return session

    report(
        "json",
        {
            "library": outcome(lambda: keep(nudging.detect(other))),
            "library, bytes": outcome(lambda: nudging.detect(Path(model).read_bytes())),
            "library, cuda": outcome(lambda: nudging.detect(other, providers=[CUDA])),
            "library's class": outcome(lambda: nudging.Detector(other)),
            "library moves": outcome(
                lambda: nudging.move(onnxruntime.InferenceSession(other, providers=[CPU]), CUDA, CPU)
            ),
            "program, model": outcome(lambda: keep(onnxruntime.InferenceSession(model))),
            "program, path": outcome(lambda: onnxruntime.InferenceSession(Path(model))),
            "program, other model": outcome(lambda: onnxruntime.InferenceSession(other)),
            "program, bytes": outcome(lambda: onnxruntime.InferenceSession(Path(model).read_bytes())),
            "sessions": [[record.kind, record.fell_back] for record in ortgpu.sessions()],
        },
    )
