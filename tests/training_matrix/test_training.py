"""Ranks train what one process trains, and go on from their checkpoints."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.lab.mounts import with_mounts
from tests.training_matrix.environments import MARKS, ROOT, bin_of, call, mpirun, program

pytestmark = MARKS


def losses_in(text: str) -> list[float]:
    return [float(line.rpartition("loss ")[2]) for line in text.splitlines() if "loss" in line]


EXAMPLE = str(ROOT / "examples/train_data_parallel.py")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_train_what_one_process_trains(ranks: int, training: Path) -> None:
    done = mpirun(training, ranks, EXAMPLE, "--steps", "20")
    words = done.stdout.splitlines()[-1].split()
    moved, apart = float(words[words.index("moved") + 1].rstrip(",")), float(words[words.index("from") - 1])
    assert moved > 0.1, "it trains"
    assert apart < 2e-6, "float32: a few units in the last place of parameters near 1"


def test_training_goes_on_with_other_numbers_of_ranks(training: Path, tmp_path: Path) -> None:
    """2, then 1, then 3, then 4 ranks, against one process all the way."""
    found: list[float] = []
    for ranks in (2, 1, 3, 4):
        done = mpirun(training, ranks, EXAMPLE, "--steps", "5", "--checkpoints", str(tmp_path))
        found += losses_in(done.stdout)
    alone = losses_in(mpirun(training, 1, EXAMPLE, "--steps", "20").stdout)
    assert len(found) == 20
    assert found == pytest.approx(alone, rel=1e-5)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-15", "step-20", "step-5"]
    manifest = json.loads((tmp_path / "step-20/manifest.json").read_text(encoding="utf-8"))
    assert manifest["content"]["world_size"] == 4


def test_a_rank_that_fails_ends_the_others(training: Path, tmp_path: Path) -> None:
    """Rank 0 cannot write the checkpoint for which the other one waits."""
    (tmp_path / "file").touch()
    start = ["mpirun", "--oversubscribe", "-np", "2", str(bin_of(training) / "python"), EXAMPLE, "--steps", "1"]
    done = call(training, *start, "--checkpoints", str(tmp_path / "file"))
    assert done.returncode == 1, done
    assert f"rank 0: the checkpoint of step 1 could not be written to {tmp_path / 'file'}" in done.stderr


@pytest.fixture(scope="session")
def artifacts(training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    program(training, "generate", str(folder))
    return folder


def test_losses_after_a_checkpoint_are_those_of_one_run(artifacts: Path, training: Path, tmp_path: Path) -> None:
    """AdamW, so the state of the optimizer counts; in another process."""
    went_on = program(training, "save", str(artifacts), str(tmp_path))
    resumed = program(training, "resume", str(artifacts), str(tmp_path))
    assert len(set(went_on)) == 10
    assert resumed == went_on, "to the last bit"
    assert (tmp_path / "step-10/optimizer_model.onnx").read_bytes() == (artifacts / "optimizer_model.onnx").read_bytes()


def test_state_that_onnx_runtime_cannot_read(artifacts: Path, training: Path, tmp_path: Path) -> None:
    """Whole by its checksum, and no state: ONNX Runtime's own error is a bare RuntimeError."""
    code = f"""
from ortgpu.distributed import Rank, checkpoint
class Wrong:
    @staticmethod
    def save_checkpoint(state, path, include_optimizer_state):
        open(path, "wb").write(b"no state")
checkpoint.save({str(tmp_path)!r}, 1, Wrong(), rank=Rank(0, 1, 0, 1))
try:
    checkpoint.load({str(tmp_path)!r}).load_state()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = call(training, str(bin_of(training) / "python"), "-c", code)
    assert done.stdout.startswith(f"DistributedError ONNX Runtime cannot read {tmp_path}/step-1/state.ckpt"), done


FULL = """
import os, sys
from onnxruntime.training.api import CheckpointState
from ortgpu.distributed import Rank, checkpoint

artifacts, folder = sys.argv[1:]
state = CheckpointState.load_checkpoint(artifacts + "/checkpoint")
state.properties["notes"] = "x" * 20_000  # more than ONNX Runtime's stream holds back until it is closed
older = os.path.join(folder, "older")
with open(older, "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(4096))
        except OSError:
            break
try:
    checkpoint.save(folder, 1, state, rank=Rank(0, 1, 0, 1))
except Exception as error:
    print(type(error).__name__, *error.evidence, *error.fixes)
print(sorted(os.listdir(folder)))
os.remove(older)
checkpoint.save(folder, 1, state, rank=Rank(0, 1, 0, 1))
print(checkpoint.load(folder).load_state() is not None)
"""


def test_a_full_disk(artifacts: Path, training: Path, tmp_path: Path) -> None:
    """In the words of ONNX Runtime, which writes the state; and there is room again where the fix is followed."""
    mounted = with_mounts([f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(tmp_path))}"])
    tried = call(training, *mounted, "true")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    done = call(training, *mounted, str(bin_of(training) / "python"), "-c", FULL, str(artifacts), str(tmp_path))
    assert done.returncode == 0, done
    assert "DistributedError" in done.stdout, done
    assert "orttraining_pybind_state.cc" in done.stdout, done
    assert "with room: older checkpoints may be deleted" in done.stdout, done
    assert done.stdout.endswith("['older']\nTrue\n"), done
