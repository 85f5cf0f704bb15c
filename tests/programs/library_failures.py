"""What a user sees of a session that a library cannot open: ``library_failures.py MODEL WAY``."""

from __future__ import annotations

import logging
import sys
from typing import Any

import ortgpu


class Library:
    def __init__(self, model: str) -> None:
        self.load(model)

    def load(self, model: str) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(model)


if __name__ == "__main__":
    model, way = sys.argv[1:]
    if way == "guarded":
        ortgpu.install()
        Library(model)
    elif way == "own":
        ortgpu.GPUSession(model)
    elif way == "moved":
        import onnxruntime

        ortgpu.install()
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).set_providers(["CUDAExecutionProvider"])
    elif way == "running":
        session: Any = ortgpu.GPUSession(model, allow_cpu=True)
        session.close()
        session.run(None, {})
    elif way == "debugging":
        logging.basicConfig(level=logging.DEBUG)
        ortgpu.GPUSession(model)
    elif way.startswith("on the cpu"):
        if way.endswith("logging"):
            logging.basicConfig(format="%(levelname)s %(message)s")
        ortgpu.GPUSession(model, allow_cpu=True)
