"""A pool that runs one model on every GPU of this machine, from one process.

    python examples/pool.py [--allow-cpu]

Exit code 0: done. 1: no GPU can be used and --allow-cpu was not given; the error names the cause and a fix.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser

from ortgpu import GPUError, GPUSessionPool

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def main(*, allow_cpu: bool) -> int:
    model = onnx.parser.parse_model(RELU).SerializeToString()
    batches = ({"x": np.full((64, 4), number - 5, np.float32)} for number in range(100))
    try:
        pool = GPUSessionPool(model, devices="all", allow_cpu=allow_cpu)
    except GPUError as error:
        print(error)
        return 1
    with pool:
        print("running on", *pool.devices, sep="\n  ")

        # many requests: results come in the order of the batches, whichever GPU ran them
        total = sum(int(outputs[0].sum()) for outputs in pool.map(batches))
        print("sum of all results:", total)

        # a single one, for a server: a concurrent.futures.Future
        future = pool.submit(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})
        print("result:", future.result()[0])

        for lost in pool.lost:  # GPUs that failed; their requests were run again on others
            print("lost:", lost.device, lost.error.summary)
    return 0


if __name__ == "__main__":
    sys.exit(main(allow_cpu="--allow-cpu" in sys.argv[1:]))
