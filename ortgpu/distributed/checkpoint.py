"""Checkpoints of data-parallel training: complete or absent, and readable by any number of ranks.

Every rank of data-parallel training holds the whole model, so one file holds all of it. A checkpoint is a folder
``step-N`` in a folder of the job. It has ONNX Runtime's file, the caller's files, and a manifest with size and SHA-256
of each. It is written under another name, and renamed once all of it is on the disk. A crash leaves the older
checkpoints unchanged, and at most a folder ``.partial-*``: no function here reads it, and the next save removes it. One
process at a time writes into a folder, and locks it. Another is refused, except on Windows and NFS.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..environment.ranks import Rank, current_rank
from ..errors import DistributedError, Fix, manual, python
from .diagnosis.packages import require_training

if sys.platform != "win32":
    import fcntl

FORMAT: Final = 1  # The manifest's format changes when older manifests cannot be read any more.
_MANIFEST: Final = "manifest.json"
_STATE: Final = "state.ckpt"
_PARTIAL: Final = ".partial-"
_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)")
_NO_SYNC: Final = (errno.EINVAL, errno.EBADF)  # Some file systems cannot sync folders: PostgreSQL's fsync_fname.


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    ``world_size`` is the number of ranks that trained when it was saved. Training can continue with any other number:
    it changes only how a program distributes its data.
    """

    folder: Path
    step: int
    world_size: int
    files: tuple[str, ...]  # names of the caller's files
    has_state: bool

    def path(self, name: str) -> Path:
        """Return the path of a file of the caller. Raises KeyError if there is none of this name."""
        if name not in self.files:
            raise KeyError(name)
        return self.folder / name

    def load_state(self) -> Any:
        """Load ONNX Runtime's ``CheckpointState``, with the optimizer's state.

        Raises:
            TrainingUnavailableError: and others, as :func:`ortgpu.distributed.require_training` raises.
            DistributedError: ONNX Runtime cannot read its file, or none was saved.
        """
        if not self.has_state:
            files = f"files: {', '.join(self.files) or 'none'}"
            fix = manual("read the files by path(); checkpoint.save(..., state) writes the state, too")
            raise _error(f"{self.folder} holds no state of ONNX Runtime", [files], fix)
        require_training()
        from onnxruntime.training.api import CheckpointState

        try:
            return CheckpointState.load_checkpoint(str(self.folder / _STATE))
        except Exception as error:  # a bare RuntimeError of orttraining_pybind_state.cc
            fix = manual("open it with the release of ONNX Runtime that wrote it")
            raise _error(f"ONNX Runtime cannot read {self.folder / _STATE}", [str(error)], fix) from error


def save(
    folder: str | os.PathLike[str],
    step: int,
    state: Any = None,
    *,
    files: Iterable[str | os.PathLike[str]] = (),
    rank: Rank | None = None,
) -> Path | None:
    """Write a checkpoint on rank 0. The other ranks return None at once.

    Args:
        folder: the folder of the job; created if it is missing.
        step: the number of steps that were trained. There must be no checkpoint of this step yet.
        state: ONNX Runtime's ``CheckpointState``; saved with the state of the optimizer.
        files: further files, copied under their own names.
        rank: the rank of this process; by default from the launcher's variables.

    Returns:
        The folder of the checkpoint.

    Not promised: that another rank sees it when this returns. Let all ranks wait for rank 0 (a barrier) before one of
    them reads. On a network file system it may take longer.

    Raises:
        DistributedError: the step is saved already, another process is saving there, a file cannot be read, or the
            folder cannot be written. Older checkpoints are unchanged.
        LauncherConflictError: without ``rank``, if the launcher's variables contradict each other.
        TypeError: the step is no whole number, or ``files`` is one path.
        ValueError: the step is negative, two files have one name, or one has a name that is used here.
    """
    own_rank = current_rank() if rank is None else rank
    step = operator.index(step)
    if isinstance(files, (str, bytes, os.PathLike)):
        raise TypeError(f"files is an iterable of paths, not one: [{files!r}]")
    sources = [Path(source) for source in files]
    names = [source.name for source in sources]
    if step < 0 or len(set(names)) < len(names) or {_MANIFEST, _STATE, ""} & set(names):
        raise ValueError(f"step {step} is negative, or not every file has a name of its own: {', '.join(names)}")
    if own_rank.rank != 0:
        return None
    root = Path(folder)
    target = root / f"step-{step}"
    try:
        _make(root)
        with _only_writer(root):
            if target.exists():
                fix = manual("continue from the newest checkpoint (checkpoint.load), or save into another folder")
                raise _error(f"{target} exists already", ["a checkpoint is never overwritten"], fix)
            _write(target, sources, state, step, own_rank.world_size)
    except DistributedError:
        raise
    except Exception as error:  # ONNX Runtime raises a bare RuntimeError if it cannot write
        summary = f"the checkpoint of step {step} could not be written to {root}"
        how = "let the files be readable, and the folder writable and with room: older checkpoints may be deleted"
        raise _error(summary, [str(error) or type(error).__name__], manual(how)) from error
    return target


def load(folder: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Find the checkpoint of a step, by default the newest, and verify that it is complete and unchanged.

    It reads every byte once. Every rank may call it.

    Raises:
        DistributedError: there is none, or a part of it is missing, cut off or altered. ``evidence`` names each faulty
            file. An older checkpoint never takes its place, but ``fixes`` names the newest complete one. Or the
            checkpoint cannot be read, though it may be whole.
        TrainingUnavailableError: the folder holds a checkpoint of ORTTrainer. No package with training reads it.
    """
    root = Path(folder)
    recorded = steps(root)
    if not recorded and any(name.endswith(".ort.pt") for name in _names(root)):
        require_training("checkpoint shards")  # raises
    chosen_step = operator.index(step) if step is not None else max(recorded, default=None)
    if chosen_step is None or chosen_step not in recorded:
        what = f"no checkpoint of step {chosen_step}" if chosen_step is not None else "no checkpoint"
        there = f"steps that are there: {', '.join(map(str, recorded)) or 'none'}"
        fix = manual("name the folder that the job saves into, and one of the steps that are there")
        raise _error(f"there is {what} in {root}", [there if root.is_dir() else f"{root} is not a folder"], fix)
    try:
        checkpoint, problems = _verify(root, chosen_step)
    except OSError as error:
        raise _unreadable(root / f"step-{chosen_step}", error) from error
    if checkpoint is None:
        whole = next((step for step in reversed(recorded) if step != chosen_step and _is_whole(root, step)), None)
        fix = manual("no other checkpoint of this folder is whole: copy it again from where it came from")
        if whole is not None:
            fix = python(f"ortgpu.distributed.checkpoint.load({os.fspath(folder)!r}, step={whole})")
        raise _error(f"the checkpoint {root / f'step-{chosen_step}'} is damaged", problems, fix)
    return checkpoint


def steps(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the steps of the folder's checkpoints, ascending. :func:`load` verifies them. Empty if there is no folder.

    Raises:
        DistributedError: the folder cannot be read. It must not count as empty: a program would train from the start.
    """
    return tuple(sorted(int(match[1]) for name in _names(folder) if (match := _NAME.fullmatch(name))))


def _names(folder: str | os.PathLike[str]) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return []
    except OSError as error:
        raise _unreadable(Path(folder), error) from error


def _make(root: Path) -> None:
    """Create the folder and its parents, so that they outlast a crash."""
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in new:
        _sync(folder.parent)


@contextlib.contextmanager
def _only_writer(root: Path) -> Iterator[None]:
    """Lock the folder. The kernel releases the lock when this process ends."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = manual("give each job a folder of its own, and let rank 0 alone save")
            summary = f"another process is saving a checkpoint in {root}"
            raise _error(summary, ["one at a time writes there"], fix) from None
        except OSError:  # NFS locks only files that are open for writing: flock(2)
            pass
        yield
    finally:
        with contextlib.suppress(OSError):  # NFS, as above
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(descriptor)


def _write(target: Path, sources: Iterable[Path], state: Any, step: int, world_size: int) -> None:
    root = target.parent
    for partial_folder in root.glob(f"{_PARTIAL}*"):  # A killed save left it.
        shutil.rmtree(partial_folder)
    partial = root / f"{_PARTIAL}{step}"
    partial.mkdir()
    try:
        for source in sources:
            shutil.copyfile(source, partial / source.name)
        if state is not None:
            type(state).save_checkpoint(state, str(partial / _STATE), include_optimizer_state=True)
        files = {
            path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in sorted(partial.iterdir())
        }
        content = {"format": FORMAT, "step": step, "world_size": world_size, "files": files}
        text = json.dumps({"content": content, "sha256": _digest_of(content)}, indent=1)
        (partial / _MANIFEST).write_text(text, encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(target)
        _sync(root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_whole(root: Path, step: int) -> bool:
    try:
        return _verify(root, step)[0] is not None
    except OSError:
        return False


def _verify(root: Path, step: int) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint, or its faults, one line for each file. Raises OSError if it cannot be read."""
    folder = root / f"step-{step}"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        content: Mapping[str, Any] = manifest["content"]
        if content["format"] != FORMAT:
            return None, [f"{_MANIFEST}: format {content['format']}, and this release reads format {FORMAT}"]
        if manifest["sha256"] != _digest_of(content) or content["step"] != step:
            return None, [f"{_MANIFEST}: altered"]
        problems = [
            f"{name}: {problem}"
            for name, recorded in content["files"].items()
            if (problem := _compare(folder / name, recorded["size"], recorded["sha256"])) is not None
        ]
        names = tuple(name for name in content["files"] if name != _STATE)
        checkpoint = Checkpoint(folder, step, content["world_size"], names, _STATE in content["files"])
    except (FileNotFoundError, NotADirectoryError) as error:
        return None, [f"{_MANIFEST}: {error}"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, [f"{_MANIFEST}: cut off, or no manifest"]
    return (None, problems) if problems else (checkpoint, [])


def _compare(path: Path, size: int, digest: str) -> str | None:
    try:
        size_on_disk = path.stat().st_size
        if size_on_disk != size:
            return f"{size_on_disk} bytes, {size} were written"
        return None if _digest(path) == digest else "altered: its SHA-256 is not the one that was written"
    except FileNotFoundError:
        return "missing"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Call fsync, because a rename may reach the disk before the content of the file."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_SYNC):
            raise
    finally:
        os.close(descriptor)


def _unreadable(folder: Path, error: OSError) -> DistributedError:
    fix = manual("let this user read it and enter the folders above it, or fix the error above; then load again")
    return _error(f"{folder} cannot be read", [str(error)], fix)


def _error(summary: str, evidence: list[str], fix: Fix) -> DistributedError:
    return DistributedError(summary, evidence=evidence, fixes=[fix], phase="checkpoint")
