"""A program in which one changed import replaces onnxruntime.InferenceSession by GPUSession.

    python examples/drop_in.py [MODEL]

Exit code 0: the model ran on the GPU. If no GPU can be used, the exception ends the program (exit code 1) and names the
cause and a fix; `InferenceSession` would have run the model on the CPU instead.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser

from ortgpu import GPUSession as InferenceSession

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def main(path: str | None = None) -> None:
    model = path or onnx.parser.parse_model(RELU).SerializeToString()

    session = InferenceSession(model)

    print("inputs:", [(x.name, x.type, x.shape) for x in session.get_inputs()])
    print("running on", session.device)
    if path is None:
        print("result:", session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0])


if __name__ == "__main__":
    main(*sys.argv[1:2])
