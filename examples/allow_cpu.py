"""A tool that may run on the CPU if its user allows it: on a laptop, in a test, while a GPU is in repair.

    python examples/allow_cpu.py [--allow-cpu]

Exit code 0: the model ran, on the GPU or, with --allow-cpu, on the CPU. 1: no GPU can be used, and no CPU was allowed.
The CPU is never chosen in silence: the session issues a warning that carries the error.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx.parser

from ortgpu import CPUExecutionWarning, GPUError, GPUSession

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def main(allow_cpu: bool) -> int:
    model = onnx.parser.parse_model(RELU).SerializeToString()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CPUExecutionWarning)
            session = GPUSession(model, allow_cpu=allow_cpu)
    except GPUError as error:
        print(f"No GPU can be used ({error.code}): {error.summary}")
        print("To run on the CPU anyway, add --allow-cpu.")
        return 1
    for warning in caught:
        if isinstance(warning.message, CPUExecutionWarning):
            print("This will be slow:", warning.message.error.summary)
    with session:
        print("running on", session.device if session.device.is_gpu else "the CPU, as allowed")
        print("result:", session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})[0])
    return 0


if __name__ == "__main__":
    sys.exit(main("--allow-cpu" in sys.argv[1:]))
