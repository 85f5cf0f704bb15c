"""A job of one process for each GPU: all processes meet, then each opens a session on its own GPU.

    torchrun --nproc-per-node 2 examples/ranks.py        or
    mpirun -n 2 python examples/ranks.py                 or
    srun --ntasks 2 python examples/ranks.py

`python examples/ranks.py` alone is a job of one process. It needs the extra `distributed`. Exit code 0: each rank ran
the model on its GPU. 1: the ranks cannot work together, or one has no GPU. Rank 0 prints the whole error, the others a
line each: after the preflight only a rank itself knows what is wrong with it.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx.parser

from ortgpu import GPUError, GPUSession
from ortgpu.distributed import Rank, current_rank, preflight

RELU = """
<ir_version: 8, opset_import: ["": 17]>
relu (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }
"""


def work(rank: Rank) -> None:
    report = preflight(timeout=60)  # names a rank that does not come or has no GPU, before a deadline
    if rank.rank == 0:
        print("\n".join(str(difference) for difference in report.differences) or "all ranks are alike")
    with GPUSession.for_rank(onnx.parser.parse_model(RELU).SerializeToString()) as session:
        result = session.run(None, {"x": np.full((1, 4), rank.rank, np.float32)})[0]
        print(f"rank {rank.rank} of {rank.world_size} on {session.device}: {result}")


def main() -> int:
    rank = current_rank()
    try:
        work(rank)
    except GPUError as error:
        if rank.rank == 0:
            print(error)
        else:
            print(f"rank {rank.rank}: {type(error).__name__}: {error.summary}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
