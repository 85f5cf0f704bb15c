"""Checkpoints: whole or not there, whatever happens to the writer or to the files."""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ortgpu
from ortgpu.distributed import Rank, checkpoint
from ortgpu.errors import DistributedError, TrainingUnavailableError
from tests.support.children import run_python
from tests.support.fork_server import run_forked

DEADLINE = 60.0
TWO = Rank(0, 2, 0, 2)


class Recorded:
    """Writes what ONNX Runtime's CheckpointState writes: one file, by a path as text."""

    def __init__(self, content: bytes = b"parameters and moments") -> None:
        self.content = content

    @staticmethod
    def save_checkpoint(state: Recorded, checkpoint_uri: str, include_optimizer_state: bool = False) -> None:
        Path(checkpoint_uri).write_bytes(state.content + str(include_optimizer_state).encode())


def problem(action: Callable[[], object]) -> DistributedError:
    with pytest.raises(DistributedError) as caught:
        action()
    assert pickle.loads(pickle.dumps(caught.value)).as_dict() == caught.value.as_dict()
    assert caught.value.fixes
    return caught.value


def damaged(folder: Path) -> list[str]:
    error = problem(lambda: checkpoint.load(folder))
    assert error.phase == "checkpoint"
    assert str(folder / "step-2") in error.summary
    return list(error.evidence)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with two checkpoints of two ranks."""
    settings = tmp_path / "settings.json"
    settings.write_text('{"rate": 0.1}', encoding="utf-8")
    for step in (1, 2):
        checkpoint.save(tmp_path / "job", step, Recorded(), files=[settings], rank=TWO)
    return tmp_path / "job"


def test_what_was_saved_is_found_again(job: Path) -> None:
    found = checkpoint.load(job)
    assert found == checkpoint.Checkpoint(job / "step-2", 2, 2, ("settings.json",), has_state=True)
    assert json.loads(found.path("settings.json").read_text(encoding="utf-8")) == {"rate": 0.1}
    assert (job / "step-2/state.ckpt").read_bytes() == b"parameters and momentsTrue", "with the optimizer's state"
    assert checkpoint.load(job, 1).step == 1
    assert checkpoint.steps(job) == (1, 2)
    with pytest.raises(KeyError):
        found.path("../step-1/settings.json")


def test_module_is_there_when_it_is_first_named() -> None:
    code = "import ortgpu; print(ortgpu.distributed.checkpoint.steps('/nowhere'))"
    done = run_python(code, deadline=DEADLINE).ok()
    assert done.stdout == "()\n"


def test_steps_are_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, step, Recorded(), rank=TWO)
    (tmp_path / "step-latest").mkdir()
    assert checkpoint.steps(tmp_path) == (9, 10, 100)
    assert checkpoint.load(tmp_path).step == 100


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert checkpoint.save(tmp_path / "job", 1, Recorded(), rank=Rank(1, 2, 1, 2)) is None
    assert not (tmp_path / "job").exists()


def test_rank_is_what_the_launcher_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    for name in os.environ.keys() & {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}:
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    checkpoint.save(tmp_path, 1, Recorded())
    assert checkpoint.load(tmp_path).world_size == 3


# What cannot be saved


def test_a_step_is_saved_once(job: Path) -> None:
    before = (job / "step-2/manifest.json").read_bytes()
    error = problem(lambda: checkpoint.save(job, 2, Recorded(b"other"), rank=TWO))
    assert "exists already" in error.summary
    assert (job / "step-2/manifest.json").read_bytes() == before


@pytest.mark.parametrize("files", [["state.ckpt"], ["a/x", "b/x"], ["manifest.json"], [""]], ids=str)
def test_names_that_would_collide(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name of its own"):
        checkpoint.save(tmp_path / "job", 1, files=files, rank=TWO)
    with pytest.raises(ValueError, match="negative"):
        checkpoint.save(tmp_path / "job", -1, rank=TWO)
    assert not (tmp_path / "job").exists()


class Failing(Recorded):
    @staticmethod
    def save_checkpoint(state: Recorded, checkpoint_uri: str, include_optimizer_state: bool = False) -> None:
        Path(checkpoint_uri).write_bytes(b"half")
        raise RuntimeError("orttraining_pybind_state.cc: no room")


def test_a_writer_that_fails_leaves_nothing(job: Path) -> None:
    error = problem(lambda: checkpoint.save(job, 3, Failing(), rank=TWO))
    assert error.evidence == ("orttraining_pybind_state.cc: no room",)
    assert sorted(os.listdir(job)) == ["step-1", "step-2"]
    assert checkpoint.load(job).step == 2


@pytest.mark.skipif(os.name == "nt", reason="there are no such limits on Windows")
def test_a_disk_without_room_leaves_nothing(job: Path) -> None:
    """The limit on the size of a file fails a write as a full disk does."""
    import resource

    large = job.parent / "large.bin"
    large.write_bytes(bytes(1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
    try:
        error = problem(lambda: checkpoint.save(job, 3, files=[large], rank=TWO))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in error.evidence[0]
    assert sorted(os.listdir(job)) == ["step-1", "step-2"]


@pytest.mark.skipif(os.name == "nt", reason="folders are not locked on Windows")
def test_another_writer_is_refused_meanwhile(job: Path) -> None:
    errors = []

    class Writing(Recorded):
        @staticmethod
        def save_checkpoint(state: Recorded, checkpoint_uri: str, include_optimizer_state: bool = False) -> None:
            errors.append(problem(lambda: checkpoint.save(job, 4, Recorded(), rank=TWO)))
            Recorded.save_checkpoint(state, checkpoint_uri, include_optimizer_state)

    checkpoint.save(job, 3, Writing(), rank=TWO)
    assert [error.summary for error in errors] == [f"another process is saving a checkpoint in {job}"]
    assert checkpoint.load(job).step == 3


@pytest.mark.skipif(os.name == "nt", reason="no process is forked on Windows")
def test_a_process_that_was_forked_meanwhile_keeps_no_writer_out(job: Path) -> None:
    """As the workers of a data loader are, while a thread saves."""
    forked = []

    class Forking(Recorded):
        @staticmethod
        def save_checkpoint(state: Recorded, checkpoint_uri: str, include_optimizer_state: bool = False) -> None:
            Recorded.save_checkpoint(state, checkpoint_uri, include_optimizer_state)
            number = os.fork()
            if number == 0:
                signal.pause()
            forked.append(number)

    try:
        checkpoint.save(job, 3, Forking(), rank=TWO)
        checkpoint.save(job, 4, Recorded(), rank=TWO)
    finally:
        for number in forked:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
    assert checkpoint.load(job).step == 4


def test_steps_that_load_would_not_find(job: Path) -> None:
    large = 10**20
    checkpoint.save(job, large, Recorded(), rank=TWO)
    assert checkpoint.load(job).step == large
    with pytest.raises(TypeError):
        checkpoint.save(job, 3.0, Recorded(), rank=TWO)  # type: ignore[arg-type]  # as it comes out of a division
    with pytest.raises(TypeError, match="not one"):
        checkpoint.save(job, 3, files=__file__, rank=TWO)
    assert sorted(os.listdir(job)) == ["step-1", f"step-{large}", "step-2"]


def test_what_onnx_runtime_says_where_it_cannot_write(job: Path) -> None:
    """The state is the large file of a checkpoint, and what fails for it is no OSError."""

    class Full(Recorded):
        @staticmethod
        def save_checkpoint(state: Recorded, checkpoint_uri: str, include_optimizer_state: bool = False) -> None:
            raise RuntimeError(f"Failed to save checkpoint to file: {checkpoint_uri}. errno:28")

    error = problem(lambda: checkpoint.save(job, 3, Full(), rank=TWO))
    assert "errno:28" in error.evidence[0]
    assert "with room" in error.fixes[0]
    assert sorted(os.listdir(job)) == ["step-1", "step-2"]


def test_a_file_that_is_not_there(job: Path) -> None:
    error = problem(lambda: checkpoint.save(job, 3, files=["/no/such/file"], rank=TWO))
    assert "/no/such/file" in error.evidence[0]
    assert sorted(os.listdir(job)) == ["step-1", "step-2"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = problem(lambda: checkpoint.save(tmp_path / "file/job", 1, Recorded(), rank=TWO))
    assert "step 1" in error.summary


# What is damaged


def test_files_that_are_cut_off_altered_or_gone(job: Path) -> None:
    state, settings = job / "step-2/state.ckpt", job / "step-2/settings.json"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1])
    settings.unlink()
    assert damaged(job) == ["settings.json: missing", f"state.ckpt: {len(whole) - 1} bytes, {len(whole)} were written"]
    state.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert damaged(job)[1] == "state.ckpt: altered: its SHA-256 is not the one that was written"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: None, "No such file"),
        (lambda text: text[:-20], "cut off"),
        (lambda text: "[]", "no manifest"),
        (lambda text: "{}", "no manifest"),
        (lambda text: "[" * 100_000, "no manifest"),
        (lambda text: text.replace('"world_size": 2', '"world_size": 4'), "altered"),
        (lambda text: text.replace('"step": 2', '"step": 1'), "altered"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2, and this release reads format 1"),
    ],
)
def test_manifest_that_is_not_the_one_written(change: Callable[[str], str | None], says: str, job: Path) -> None:
    manifest = job / "step-2/manifest.json"
    text = change(manifest.read_text(encoding="utf-8"))
    manifest.unlink() if text is None else manifest.write_text(text, encoding="utf-8")
    (line,) = damaged(job)
    assert line.startswith("manifest.json: ")
    assert says in line


def test_manifest_of_another_step(job: Path) -> None:
    (job / "step-1").rename(job / "step-7")
    error = problem(lambda: checkpoint.load(job))
    assert error.evidence == ("manifest.json: altered",)


def test_an_older_checkpoint_is_named_and_not_taken(job: Path) -> None:
    (job / "step-2/state.ckpt").unlink()
    error = problem(lambda: checkpoint.load(job))
    (fix,) = error.fixes
    assert fix.kind == "python"
    assert eval(fix, {"ortgpu": ortgpu}).step == 1
    (job / "step-1/state.ckpt").unlink()
    (fix,) = problem(lambda: checkpoint.load(job)).fixes
    assert not fix.executable


def test_nothing_to_load(tmp_path: Path, job: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no checkpoint in" in problem(lambda: checkpoint.load(tmp_path / "empty")).summary
    for absent in (tmp_path / "absent", "a\0b"):
        assert "is not a folder" in problem(functools.partial(checkpoint.load, absent)).evidence[0]
    error = problem(lambda: checkpoint.load(job, 5))
    assert "step 5" in error.summary
    assert error.evidence == ("steps that are there: 1, 2",)


# As a user who may read what others let him read, which root always may


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has other permissions")
@pytest.mark.parametrize(
    ("closed", "mode", "refused"),
    [(".", 0o300, 2), ("..", 0o600, 2), ("step-2", 0o000, 1), ("step-2/state.ckpt", 0o000, 1)],
)
def test_what_this_user_may_not_read_is_neither_absent_nor_damaged(closed: str, mode: int, refused: int) -> None:
    """Else a program trains anew where it has a checkpoint, or somebody deletes one that is whole."""

    def seen() -> list[str]:
        done = run_python("distributed.checkpoint.as_another_user", str(job), deadline=DEADLINE).ok()
        return done.stdout.splitlines()

    with tempfile.TemporaryDirectory() as name:  # tmp_path lies in a folder that only its owner may enter
        job = Path(name, "runs", "the job")
        for step in (1, 2):
            checkpoint.save(job, step, Recorded(), rank=TWO)
        for folder in (name, job.parent):
            os.chmod(folder, 0o755)
        (job / closed).chmod(mode)
        *_, last = lines = seen()
        assert [line.startswith("found") for line in lines] == [refused == 1, False]
        summary, evidence, _ = last.split("|")
        assert summary.endswith("cannot be read")
        assert "Permission denied" in evidence
        job.parent.chmod(0o755)
        (job / closed).chmod(0o755)
        assert seen() == ["found steps", "found 2"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_damages_nothing(number: int, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(checkpoint, "_digest", failing)
    error = problem(lambda: checkpoint.load(job))
    assert error.summary == f"{job / 'step-2'} cannot be read"
    assert os.strerror(number) in error.evidence[0]
    assert "fix the error above" in error.fixes[0]


def test_a_folder_that_cannot_be_listed_is_not_empty() -> None:
    error = problem(lambda: checkpoint.steps("/" + "a" * 300))
    assert "too long" in error.evidence[0]
    assert problem(lambda: checkpoint.load("/" + "a" * 300)).summary == error.summary


def test_shards_of_ort_trainer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ORT_checkpoint.ZeRO.0.2.ort.pt").touch()
    with pytest.raises(TrainingUnavailableError) as caught:
        checkpoint.load(tmp_path)
    assert caught.value.reason == "checkpoint shards"
    assert "aggregate_checkpoints of onnxruntime-training 1.16.3" in str(caught.value)


def test_checkpoint_without_a_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "job", 1, files=[__file__], rank=TWO)
    found = checkpoint.load(tmp_path / "job")
    assert not found.has_state
    assert "no state" in problem(found.load_state).summary


# A writer that is killed


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes are killed in another way on Windows")
def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(job: Path) -> None:
    """Before each thing that it does to the file system in turn, until one is left to finish."""
    for moment in range(40):
        done = run_forked("distributed.checkpoint.killed", str(job), str(moment), deadline=DEADLINE)
        assert done.returncode in (0, -signal.SIGKILL), done.output
        known = checkpoint.steps(job)
        assert [checkpoint.load(job, step).step for step in known] == list(known), f"killed at {moment}"
        assert known[:2] == (1, 2)
        if known != (1, 2):
            break
    assert moment > 8, "it was really killed on the way"
    assert known == (1, 2, 3)
    checkpoint.save(job, 4, Recorded(), rank=TWO)
    assert sorted(os.listdir(job)) == ["step-1", "step-2", "step-3", "step-4"], "what the killed ones left is gone"


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync: Any = os.fsync

    def recording_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def recording_rename(self: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        os.rename(self, target)
        return target

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("/proc tells which file a descriptor is")
    monkeypatch.setattr(os, "fsync", recording_sync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    checkpoint.save(tmp_path / "runs/job", 1, Recorded(), rank=TWO)
    assert done[:2] == ["runs", tmp_path.name], "the new folders too"
    assert sorted(done[2:4]) == ["manifest.json", "state.ckpt"]
    assert done[4:] == [".partial-1", "rename to step-1", "job"]


def test_a_file_system_that_synchronises_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync: Any = os.fsync

    def sync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files)
    checkpoint.save(tmp_path / "job", 1, Recorded(), rank=TWO)
    assert checkpoint.load(tmp_path / "job").step == 1
