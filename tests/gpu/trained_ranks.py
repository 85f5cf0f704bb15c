"""A rank of examples/train_data_parallel.py that computes on the CPU, and whose parameters NCCL averages on the GPUs.

    mpirun -np RANKS python tests/gpu/trained_ranks.py STEPS [DIR]

DIR is where checkpoints are.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEADLINE = 60.0  # seconds of one operation


def mean_by_nccl(world: Any) -> Callable[[np.ndarray], np.ndarray]:
    import torch

    from ortgpu.distributed import Collective, current_rank
    from ortgpu.distributed.worker import Communicator, load_nccl, make_unique_id
    from ortgpu.environment.gpu.cuda import initialise

    _, path = load_nccl()
    device = torch.device("cuda", current_rank().local_rank)
    torch.cuda.set_device(device)
    communicator = Communicator(world.rank, world.size, world.bcast(make_unique_id() if world.rank == 0 else None))
    uuid = (initialise().devices or ())[device.index].uuid
    print(f"rank {world.rank} averages by {path} on {uuid}", flush=True)  # noqa: T201 - for the test that starts it

    def wait() -> None:
        until = time.monotonic() + DEADLINE
        while not communicator.is_ready():
            if time.monotonic() > until:
                raise TimeoutError("NCCL is not ready")
            time.sleep(0.001)
        torch.cuda.synchronize()

    def mean(values: np.ndarray) -> np.ndarray:
        sent = torch.from_numpy(values).to(device)
        total = torch.full_like(sent, float("nan"))
        call = Collective("all_reduce", "float32", values.size)
        communicator.call(call, sent.data_ptr(), total.data_ptr(), torch.cuda.current_stream().cuda_stream)
        wait()
        averaged: np.ndarray = total.cpu().numpy() / np.float32(world.size)
        return averaged

    wait()
    return mean


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    example: Any = importlib.import_module("train_data_parallel")
    steps, *folder = sys.argv[1:]
    sys.exit(example.main(int(steps), Path(*folder) if folder else None, mean_by_nccl))
