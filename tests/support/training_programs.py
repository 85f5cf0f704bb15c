"""Programs for ranks of tests/training_matrix, run with the training environment's Python."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np


def generate(folder: Path) -> None:
    """Artifacts of y = x @ w + b with AdamW."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.training import artifacts

    random = np.random.default_rng(3)
    weights = {"w": random.normal(0, 1, (4, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    # The IR version is onnx's own newest, as an exporter writes it.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.checker.check_model(model)
    artifacts.generate_artifacts(
        model,
        requires_grad=list(weights),
        loss=artifacts.LossType.MSELoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(folder),
    )


def losses(artifacts: Path, state: Any, first: int, count: int) -> list[float]:
    from onnxruntime.training.api import Module, Optimizer

    module = Module(str(artifacts / "training_model.onnx"), state, str(artifacts / "eval_model.onnx"))
    optimizer = Optimizer(str(artifacts / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.05)
    module.train()
    found = []
    for step in range(first, first + count):
        x = np.random.default_rng([5, step]).normal(0, 1, (8, 4)).astype(np.float32)
        found.append(float(module(x, x[:, :2] * 2)))
        optimizer.step()
        module.lazy_reset_grad()
    return found


def save_and_go_on(artifacts: Path, folder: Path) -> list[float]:
    """Ten steps, a checkpoint, and the losses of the next ten."""
    from onnxruntime.training.api import CheckpointState

    from ortgpu.distributed import checkpoint

    state = CheckpointState.load_checkpoint(str(artifacts / "checkpoint"))
    losses(artifacts, state, 0, 10)
    checkpoint.save(folder, 10, state, files=[artifacts / "optimizer_model.onnx"])
    return losses(artifacts, state, 10, 10)


def resume(artifacts: Path, folder: Path) -> list[float]:
    from ortgpu.distributed import checkpoint

    return losses(artifacts, checkpoint.load(folder).load_state(), 10, 10)


def main(what: str, *arguments: str) -> object:
    if what == "generate":
        generate(Path(arguments[0]))
        return None
    if what == "train":  # whether the models that are written can be trained
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            from onnxruntime.training.api import CheckpointState

            state = CheckpointState.load_checkpoint(os.path.join(folder, "checkpoint"))
            return losses(Path(folder), state, 0, 2)
    function = {"save": save_and_go_on, "resume": resume}[what]
    return function(Path(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
