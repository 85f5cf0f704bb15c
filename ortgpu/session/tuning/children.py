"""Child processes for the measurements: a candidate may end its process, corrupt it, or never end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...environment.child_process import ChildFailedError, ChildProcess
from ...environment.ranks import runtime_folder
from ...model.files import ModelSource
from ...provider.devices import Device
from ...provider.records import Choice, Key
from ...provider.settings import MAP_DEPTH, Settings

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Objective = Literal["latency", "throughput"]
Precision = Literal["float32", "float16"]

BUDGET = 60.0  # seconds
GIVEN = "providers"  # Key of the trial that uses the caller's providers.
LONGEST_START = 120.0  # seconds for a new child, including the load of all libraries
_TICK = 0.2  # seconds between looks at the lock


@dataclass(frozen=True, slots=True)
class Place:
    """A device for the candidates, and the function that opens their sessions. Tests use the CPU and faulty ones."""

    ordinal: int | None = 0  # None: the CPU
    opener: Callable[..., Any] | None = None  # None: open_session of the trials


ON_CPU = Place(None)  # The CPU computes in float32.


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of :func:`ortgpu.tune`."""

    model: ModelSource
    device: Any = None
    feeds: Sequence[Mapping[str, Any]] | None = None
    batches: tuple[int, ...] = (1,)
    objective: Objective = "latency"
    precision: Precision = "float32"
    budget: float = BUDGET
    providers: tuple[tuple[str, dict[str, str]], ...] = ()
    #: Raise TuningNotNeededError if another process has written the record meanwhile, or no record can be kept.
    once: bool = False

    @property
    def threads(self) -> int:
        """Concurrent runs, staged as in ``map``; 1 measures single runs, with their arrays on the device."""
        return MAP_DEPTH if self.objective == "throughput" else 1


@dataclass(frozen=True, slots=True)
class Beginning:
    """The facts about a model on a device that a search needs."""

    gpu: Device | None  # None: the CPU
    feeds: tuple[Mapping[str, Any], ...]  # the inputs of each batch: the caller's, or made-up ones
    #: The sizes of free dimensions by their names: none if there are several batches, or if one has no name.
    dimensions: Mapping[str, int]
    key: Key | str  # of the record, or the reason why there can be no record
    convolves: bool
    needs_cudnn: bool
    captures: bool  # Sessions capture CUDA graphs of the model.
    left_out: tuple[str, ...]  # each candidate that cannot be measured, with the reason


@dataclass(frozen=True, slots=True)
class Work:
    """The conditions of all trials."""

    wanted: Wanted
    place: Place
    begun: Beginning
    right: tuple[list[Any], ...] | None  # the results of the CPU for each batch, unless the CPU took too long
    half: bytes | None  # the same model in float16, if there is one


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, and its result.

    Attributes:
        settings: the differences from plain ONNX Runtime's settings; ``GIVEN`` names the providers of the caller.
        ratio: time relative to plain ONNX Runtime's, the geometric mean over the batches. None: the candidate was
            rejected.
        seconds: the time of a run of each batch.
        error: largest distance of a result from the right one, relative to the largest value of the output. None: there
            was no result to compare, or the result has another shape or is not finite, and so has no distance.
        verdict: "kept", "not the fastest", or the reason of the rejection.
        divergence: None. Programs of 0.2.0 read it; ``ortgpu check --compare`` finds the first tensor that differs.
    """

    settings: Settings
    ratio: float | None = None
    seconds: tuple[float, ...] = ()
    error: float | None = None
    verdict: str = "not the fastest"
    divergence: None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of :func:`ortgpu.tune`.

    Attributes:
        automatic: the best settings that sessions apply by themselves.
        named: the best settings of all, for sessions that name the record: ``GPUSession(model, tuned=record)``.
        record: the file. None: no file was written; ``no_record`` says why.
        compared_with: the reference for all results.
        trials: all candidates, in the order of their trials.
        left_out: each candidate that was not tried, with the reason.
        shapes: the shapes of the inputs, for each batch.
    """

    device: str
    automatic: Choice
    named: Choice
    record: Path | None
    no_record: str | None
    compared_with: str
    trials: tuple[Trial, ...]
    left_out: tuple[str, ...]
    shapes: tuple[Mapping[str, list[int]], ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return {**asdict(self), "record": str(self.record) if self.record is not None else None}


def first_line(error: BaseException) -> str:
    """Return the beginning of an exception, for a table."""
    name = "" if isinstance(error, ChildFailedError) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


class Child:
    """A child process. It starts with the first request; after its end the next request starts another one."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None
        self._preparation: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def prepare(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have each new process call a function before it answers requests."""
        self.end()
        self._preparation = function, arguments

    def ask(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """Call a function in the child. Raises as :class:`ChildProcess` and its ``ask`` do.

        A new process takes longer, because it calls the prepared function first.
        """
        try:
            if self._process is None or not self._process.is_alive:  # The process may have ended after its last answer.
                self.end()
                self._process = ChildProcess(keeps_output=True)
                if self._preparation is not None:
                    prepare, prepared = self._preparation
                    self._process.ask(prepare, *prepared, timeout=LONGEST_START)
            return self._process.ask(function, *arguments, timeout=timeout)
        except ChildFailedError:
            self.end()
            raise

    def open(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that opens and runs a model. Raises TimeoutError, RuntimeError, or any exception of it."""
        try:
            return self.ask(function, *arguments, timeout=LONGEST_START)
        except ChildFailedError as error:
            if error.timed_out:
                raise TimeoutError(f"to open and run the model: {error}") from None
            raise RuntimeError(f"the model could not be opened and run: {error}") from None

    def end(self) -> None:
        """End the process: a candidate may have corrupted it. The next request starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


@contextlib.contextmanager
def only_tuner(device: str, patience: float) -> Iterator[None]:
    """Hold the lock of a device, so that no two processes of this user measure on it at the same time.

    Raises TimeoutError if another process holds it for ``patience`` seconds.
    """
    path = runtime_folder() / f"tuning-{device}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        end = time.monotonic() + patience
        while True:
            try:
                if sys.platform == "win32":
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                else:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:  # Linux, Windows and Wine report a held lock by three different numbers.
                if time.monotonic() > end:
                    raise TimeoutError(f"another process tunes on this GPU; it holds {path}: {error}") from None
            time.sleep(_TICK)
        yield
    finally:
        os.close(descriptor)
