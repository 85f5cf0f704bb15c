"""Children that measure: candidates may end their process, spoil it, or never end."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...environment.child import cause_of_death, kill_group, python_command
from ...environment.packages.plugins import environ_of_child
from ...environment.ranks import runtime_folder
from ...provider.devices import Device
from ...provider.records import Key
from ...provider.settings import Settings

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

GIVEN = "providers"  # in the place of settings: the caller's
REQUEST, ANSWER = "request.pickle", "answer.pickle"
_PROGRAM = """
import sys
from ortgpu import GPUSession  # first: it loads what onnxruntime links, where that links CUDA
from ortgpu.session.tuning.trial import main
main(sys.argv[1])
"""
_TICK = 0.2  # seconds between looks at the lock
_LOOK = 0.01  # and at the answer of a child


@dataclass(frozen=True, slots=True)
class Place:
    """The device on which candidates run, and the function that opens their sessions, as "module:function".

    Tests have the CPU in the place of a GPU, and openers whose sessions are at fault.
    """

    ordinal: int | None = 0  # None: the CPU
    opener: str = "ortgpu.session.tuning.trial:open_session"


ON_CPU = Place(None)  # which computes in float32


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a search must know of a model on a device.

    Attributes:
        gpu: None on the CPU.
        feeds: the inputs of each batch, made up unless they were given.
        dimensions: the sizes of free dimensions by their names, where these tell them for one batch.
        key: of the record, or why there can be none.
        convolves, needs_cudnn: what nodes there are, as ONNX Runtime placed them.
        captures: True if sessions capture CUDA graphs of the model.
        left_out: what cannot be measured, and why.
    """

    gpu: Device | None
    feeds: tuple[Mapping[str, Any], ...]
    dimensions: Mapping[str, int]
    key: Key | str
    convolves: bool
    needs_cudnn: bool
    captures: bool
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """A model and what it is run with.

    Attributes:
        model: its path.
        half: the path of the same model in float16, if there is one.
        feeds: the inputs of each batch.
        right: the results of the CPU for each; None where it took too long.
        dimensions: the sizes of free dimensions, where there is one batch.
        threads: runs at the same time, staged as in ``map``; 1 measures single runs, with their arrays on the device.
        given: providers of the caller, with their options.
    """

    model: str
    place: Place
    feeds: tuple[Mapping[str, Any], ...]
    right: tuple[list[Any], ...] | None = None
    dimensions: Mapping[str, int] = field(default_factory=dict)
    half: str | None = None
    threads: int = 1
    given: tuple[tuple[str, dict[str, str]], ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, and what became of it.

    Attributes:
        settings: those that differ from plain ONNX Runtime's; ``GIVEN`` names the providers of the caller.
        ratio: time relative to plain ONNX Runtime's, the geometric mean over the batches. None: it was rejected.
        seconds: of a run of each batch.
        error: largest distance of a result from the right one, relative to the largest value of the output. None: there
            was no result to compare, or it has no distance, since it is of another shape or not finite.
        verdict: "kept", "not the fastest", or why it was rejected.
        divergence: where results first go wrong, as far as that was looked for.
    """

    settings: Settings
    ratio: float | None = None
    seconds: tuple[float, ...] = ()
    error: float | None = None
    verdict: str = "not the fastest"
    divergence: str | None = None


def first_line(error: BaseException) -> str:
    """Return the beginning of an exception, for a table."""
    name = "" if isinstance(error, ChildFailedError) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


class ChildFailedError(Exception):
    """A child did not do its work, for the reason in the text. ``timed_out``: it was killed at its deadline."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Child:
    """A process that answers one request after another; another one, where the last has ended.

    Args:
        folder: for this user alone. Requests and answers are files in it.

    Attributes:
        errors: the file with what the process writes to its standard error.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.errors = Path(folder, "errors.txt")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, function: str, *arguments: Any, timeout: float) -> Any:
        """Call a function of :mod:`ortgpu.session.tuning.trial`.

        Raises:
            ChildFailedError: the process ended, or was killed after ``timeout`` seconds.
            Exception: what the function raised.
        """
        answer = Path(self._folder, ANSWER)
        answer.unlink(missing_ok=True)
        Path(self._folder, REQUEST).write_bytes(pickle.dumps((function, arguments)))
        end = time.monotonic() + timeout
        process = self._process
        if process is None or process.poll() is not None:  # it may have ended after its last answer
            self.end()
            process = self._process = self._started()
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, which is seen below
                process.stdin.write(b"\n")
                process.stdin.flush()
        while not answer.exists() and process.poll() is None:
            if time.monotonic() > end:
                self.end()
                raise ChildFailedError("it did not end in time", timed_out=True)
            time.sleep(_LOOK)
        if not answer.exists():
            self.end()
            raise ChildFailedError(f"the process ended: {self._why(process.returncode)}")
        kind, found = pickle.loads(answer.read_bytes())  # noqa: S301 - by our own child
        if kind == "raised":
            raise found
        return found

    def end(self) -> None:
        """End the process, which a candidate may have spoilt. The next request starts another one."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _started(self) -> subprocess.Popen[bytes]:
        variables = {name: value for name, value in environ_of_child().items() if name != "ORTGPU_ENFORCE"}
        try:
            with self.errors.open("wb") as errors:
                return subprocess.Popen(
                    python_command(_PROGRAM, self._folder),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=variables,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            raise ChildFailedError(f"no process was started: {error}") from None

    def _why(self, code: int) -> str:
        said = self.errors.read_text("utf-8", "replace")
        words = [line for line in said.splitlines() if line.strip()][-1:]
        return ": ".join([cause_of_death(code) or f"it ended with {code}", *words])


@contextlib.contextmanager
def only_tuner(device: str, patience: float) -> Iterator[None]:
    """Hold the lock of a device, so that no two processes of this user measure on it at the same time.

    Raises:
        TimeoutError: another one held it for ``patience`` seconds.
    """
    path = runtime_folder() / f"tuning-{device}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        end = time.monotonic() + patience
        while not _is_locked_now(descriptor):
            if time.monotonic() > end:
                raise TimeoutError(f"another process tunes on this GPU; it holds {path}")
            time.sleep(_TICK)
        yield
    finally:
        os.close(descriptor)


def _is_locked_now(descriptor: int) -> bool:
    """Lock a file for this process, until it is closed. Return False if another one has it."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, 0):  # of Linux, of Windows, of Wine
            raise
        return False
    return True
