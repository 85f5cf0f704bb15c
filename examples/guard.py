"""A program whose sessions are made by a library that knows nothing of ortgpu.

    python examples/guard.py

Exit code 0: the library's large model runs on the GPU, and the small one on the CPU, as its author decided. 1: no GPU
can be used, and the library's constructor raised the cause, where ONNX Runtime alone would have used the CPU.
Without any change to a program: `ortgpu exec -- python app.py`.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser
from onnxruntime import InferenceSession  # the guard also reaches classes that were imported before it

import ortgpu

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


class Library:
    """A library with a model that needs a GPU, and a model that is faster without."""

    def __init__(self, model: bytes) -> None:
        self.detector = InferenceSession(model, providers=["CPUExecutionProvider"])
        self.recognizer = InferenceSession(model, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


def main() -> int:
    model = onnx.parser.parse_model(RELU).SerializeToString()
    ortgpu.install()
    try:
        library = Library(model)
    except ortgpu.GPUError as error:
        print(f"No GPU can be used ({error.code}): {error.summary}")
        return 1
    for session in ortgpu.sessions():
        print(session)
    print("result:", library.recognizer.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
