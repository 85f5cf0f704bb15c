"""A program that runs a stream of batches through a model as fast as the GPU takes them.

    python examples/throughput.py [--allow-cpu]

Exit code 0: all batches were run. 1: no GPU can be used and the CPU was not allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import onnx.parser

from ortgpu import GPUError, GPUSession

MEAN = """
<ir_version: 8, opset_import: ["": 17]>
mean (float[n, 3, 224, 224] images) => (float[n, 3] means) { means = ReduceMean<axes = [2, 3], keepdims = 0>(images) }
"""


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches, as if they were read and decoded. There may be no end: at most ``in_flight`` of them are held."""
    for number in range(count):
        yield {"images": np.full((16, 3, 224, 224), number, dtype=np.float32)}


def main(allow_cpu: bool) -> int:
    model = onnx.parser.parse_model(MEAN).SerializeToString()
    try:
        # cuda_graph=True also makes single small batches faster; see THROUGHPUT.md
        session = GPUSession(model, allow_cpu=allow_cpu)
    except GPUError as error:
        print(f"No GPU can be used ({error.code}): {error.summary}")
        return 1
    with session:
        for option, (value, reason) in session.options_chosen.items():
            print(f"{option}={value}: {reason}")
        for number, (means,) in enumerate(session.map(batches(20), in_flight=4)):  # in the order of the batches
            assert means[0, 0] == number
        print("20 batches on", session.device)

        # An array that is refilled: from pinned memory `run` copies to the GPU at full speed
        images = session.pinned_empty((1, 3, 224, 224), np.float32)
        for number in range(3):
            images[:] = number
            print("mean:", session.run(None, {"images": images})[0][0, 0])
    return 0


if __name__ == "__main__":
    sys.exit(main("--allow-cpu" in sys.argv[1:]))
