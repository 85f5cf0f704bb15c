"""A tool that may run on the CPU, because its user said so: a laptop, a test, a machine whose GPU is in repair.

    python examples/allow_cpu.py [--allow-cpu]

Exit code 0: ran, on the GPU or, with --allow-cpu, where it could. 1: no GPU can be used and the CPU was not allowed.
The CPU is never chosen in silence: the session warns with the error that it stands for, and says where it is.
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
        print("To run on the CPU all the same, add --allow-cpu.")
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
