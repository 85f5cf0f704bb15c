"""The search of ``ortgpu.tune`` for the fastest settings of a model on its GPU."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...model.files import ModelSource, source_of
from ...provider.float16 import halve
from ...provider.records import Choice, Key, Record, VoidRecordError, default_path, make_own_folders, read_record
from ...provider.settings import AUTOMATIC, FEW_THREADS, SETTINGS, Settings, described
from ...running.made_inputs import shape_of
from ...running.onnxruntimes import gpu_session_class
from .children import GIVEN, ON_CPU, Beginning, Child, Place, Trial, Tuning, Wanted, Work, first_line, only_tuner
from .trial import begin, measure, prepare, results

logger = logging.getLogger("ortgpu")

_Key = tuple[tuple[str, str], ...]

_GAIN = 0.99  # ratio of times; a smaller gain is noise, and not worth another setting
_SECONDS = 0.4  # seconds to measure each batch of a candidate
_HOPELESS = 1.5  # A setting with a higher ratio of times is not combined with others.
_FLOAT16 = 0.4  # share of the search time for float16, if float16 is a candidate
_SEARCHING = 0.8  # share of the budget; the rest is for a second measurement of the best
_PATIENCE = 2  # budgets to wait for another tuner of the GPU: tuners that began together end together
_SHORTEST = 15.0  # seconds; each child gets at least this long
_STARTS = 4  # patience with a candidate, in start times of the first child


def tune_unless_tuned(model: ModelSource, device: int | None) -> None:
    """Tune as :func:`tune` does, unless no record can be kept, or another process wrote one in the meantime."""
    with contextlib.suppress(TuningNotNeededError):
        tune_at(Place(), Wanted(model, device, once=True))


class TuningNotNeededError(Exception):
    """A record exists, or no record can be kept."""


def tune_at(
    place: Place,
    wanted: Wanted,
    record: str | os.PathLike[str] | None = None,
    kind: Callable[..., Search] | None = None,
    on_trial: Callable[[Trial], object] = lambda _: None,
) -> Tuning:
    """Tune as :func:`ortgpu.tune` does, at another place, or with another search.

    Tests use the CPU instead of a GPU. Benchmarks use a search that tries more.
    """
    started = time.monotonic()
    session_class = gpu_session_class() if place.ordinal is not None else None
    wanted = replace(wanted, model=source_of(wanted.model))
    with Child() as child:
        beginning: Beginning = child.open(begin, wanted, place, session_class)
        try:
            path, no_record = _path_of_record(wanted, record, beginning), None
        except VoidRecordError as error:  # The measurements are useful without a record.
            path, no_record = None, str(error)
            logger.warning("no record of tune can be kept: %s", no_record)
            if wanted.once:
                raise TuningNotNeededError from None
        opening = time.monotonic() - started
        name = (beginning.gpu.uuid if beginning.gpu is not None else None) or "cpu"
        with only_tuner(name, _PATIENCE * wanted.budget):
            if wanted.once and path is not None:
                with contextlib.suppress(FileNotFoundError, VoidRecordError):
                    if read_record(path).key == beginning.key:
                        raise TuningNotNeededError
            since = time.monotonic() - opening  # The budget does not include the wait for the lock.
            search = (kind or Search)(wanted, place, beginning, child, since)
            search.on_trial = on_trial
            search.run()
            shapes = tuple({name: list(shape_of(value)) for name, value in feed.items()} for feed in beginning.feeds)
            if search.unsound is not None:
                path, no_record = None, search.unsound
            # Write the record under the lock: the next tuner looks for it there.
            if isinstance(beginning.key, Key) and path is not None:
                Record(beginning.key, search.automatic, search.named, shapes, beginning.dimensions).write(path)
                logger.info("tuned: %s, written to %s", described(search.automatic.settings), path)
    return Tuning(
        str(beginning.gpu or "CPU"),
        search.automatic,
        search.named,
        path,
        no_record,
        search.compared_with,
        search.trials,
        search.left_out,
        shapes,
        time.monotonic() - started,
    )


def _path_of_record(wanted: Wanted, record: str | os.PathLike[str] | None, begun: Beginning) -> Path:
    """Return the path of the record, in a folder. Raises VoidRecordError, or OSError for the caller's folder."""
    if isinstance(begun.key, str):
        raise VoidRecordError(begun.key)
    if record is not None:
        _check_writable(Path(record).parent)
        return Path(record)
    path = default_path(wanted.model, begun.gpu.name if begun.gpu is not None else None)
    if path is None:
        raise VoidRecordError("platformdirs is not installed, or this user has no home folder")
    try:
        make_own_folders(path.parent)
        _check_writable(path.parent)
    except OSError as error:
        raise VoidRecordError(str(error)) from None
    # Sessions never load a float16 record by themselves, only by its name.
    return path.with_suffix(".float16.json") if wanted.precision == "float16" else path


def _check_writable(folder: Path) -> None:
    """Make a folder. Raises OSError if no file can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def results_of_cpu(
    child: Child, model: ModelSource, feeds: Sequence[Mapping[str, Any]], patience: float
) -> tuple[tuple[list[Any], ...] | None, str]:
    """Return the results of the CPU, or None if they take too long, and a description of the reference."""
    try:
        return child.ask(results, model, ON_CPU, feeds, timeout=patience), "the CPU's float32"
    except Exception as error:  # noqa: BLE001 - any error means that there are no results of the CPU
        return None, f"plain ONNX Runtime on the GPU, since the CPU gave no results: {first_line(error)}"


class Search:
    """A hill climb over the table of settings: each step keeps the best change, until none is better."""

    #: The reason why no settings can be recommended, once the search has ended; None if there are some.
    unsound: str | None = None
    on_trial: Callable[[Trial], object]  # called with each trial when it has ended

    def __init__(self, wanted: Wanted, place: Place, begun: Beginning, child: Child, started: float) -> None:
        self._wanted, self._begun, self._child = wanted, begun, child
        self._started = started
        self._seconds = min(_SECONDS, wanted.budget / 100)
        self.end = started + wanted.budget * _SEARCHING
        self._patience = max(_SHORTEST, _STARTS * (time.monotonic() - started))
        self._seen: dict[_Key, Trial] = {}
        # Each value has its last ratio to the time without it. float16 is tried before values that gain nothing.
        self._gains: dict[tuple[str, str], float] = {("precision", "float16"): 0.5}
        self.left_out = begun.left_out  # each candidate that was not tried to the end, with the reason
        self._late: dict[_Key, str] = {}  # candidates that came up after the end of the time
        self.compared_with = ""
        self._place = replace(place, ordinal=begun.gpu.ordinal) if begun.gpu is not None else place
        self._half: bytes | None = None

    def run(self) -> None:
        """Find ``automatic`` and ``named``."""
        wanted, begun = self._wanted, self._begun
        patience = max(_SHORTEST, wanted.budget / 3)
        right, self.compared_with = results_of_cpu(self._child, wanted.model, begun.feeds, patience)
        if wanted.precision == "float16":
            try:
                self._half = self._child.ask(halve, wanted.model, timeout=patience)
            except Exception as error:  # noqa: BLE001 - the converter raises exceptions of any class
                self.left_out += (f"precision float16: {first_line(error)}",)
        self._child.prepare(prepare, Work(replace(wanted, feeds=None), self._place, begun, right, self._half))
        plain: Settings = {"search": "exhaustive"} if begun.convolves else {}
        start: Settings = {"search": "heuristic"} if begun.convolves else {}  # the settings of untuned sessions
        # The climb over all settings also tries the automatic ones, so their own climb comes last.
        end = self.end
        if self._half is not None:
            self.end -= _FLOAT16 * max(0.0, end - time.monotonic())
        exact = self._climb(start, self.spaces(tuple(name for name in SETTINGS if name != "precision")))
        self.end = end
        best_of_all = self._climb(exact, self.spaces(tuple(SETTINGS)))
        tried = [trial.settings for trial in self.trials if trial.settings.keys() <= {"search", *AUTOMATIC}]
        automatic = self._climb(min(tried, key=self._ratio, default=start), self.spaces(AUTOMATIC))
        self.try_all([start, automatic, best_of_all], again=True)
        # Plain ONNX Runtime's search is a candidate, too. If this candidate was rejected, it is no choice.
        rejection = next((trial for trial in self.trials if trial.settings == plain and trial.ratio is None), None)
        first = Choice(plain, 1.0) if rejection is None else Choice(start, self._ratio(start))
        if rejection is not None and math.isinf(first.ratio):
            first, self.unsound = Choice({}, 1.0), f"ONNX Runtime's default settings were {rejection.verdict}"
        self.automatic = self._better(self._better(first, start, gain=1.01), automatic)
        self.named = self._better(self.automatic, best_of_all)
        for key in {_key(self.automatic.settings), _key(self.named.settings)} & self._seen.keys():
            self._seen[key] = replace(self._seen[key], verdict="kept")
        self.left_out += tuple(reason for key, reason in self._late.items() if key not in self._seen)
        if wanted.providers:
            self._patience = max(self._patience, wanted.budget)
            trial = self._measure({GIVEN: " ".join(name for name, _ in wanted.providers)}, 2 * self._seconds)
            self._keep(replace(trial, verdict="as given") if trial.ratio is not None else trial)

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._seen.values())

    def spaces(self, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        """Return the settings that can matter to this model, each with its values."""
        beginning, single = self._begun, self._wanted.threads == 1
        matters = {
            "precision": self._half is not None,
            "graph": single and beginning.captures,
            "shapes": bool(beginning.dimensions),
            "layout": beginning.convolves,
            "search": beginning.convolves,
            "workspace": beginning.convolves,
            "cudnn": not beginning.needs_cudnn,
            "threads": (os.cpu_count() or 1) > 2 * FEW_THREADS,
            "depth": not single,
            "staging": not single,
        }
        return [(name, tuple(SETTINGS[name])) for name in matters if name in names and matters[name]]

    def _climb(self, best: Settings, spaces: Sequence[tuple[str, Sequence[str]]]) -> Settings:
        """Return the best settings within reach of ``best`` by changes of one setting at a time."""
        while True:
            pairs = [(name, value) for name, values in spaces for value in values]
            pairs.sort(key=lambda pair: self._gains.get(pair, 1.0))
            promising = [pair for pair in pairs if self._gains.get(pair, 1.0) < _HOPELESS]
            changes = [normal({**best, name: value}) for name, value in promising]
            self.try_all([best, *changes])
            for pair, change in zip(promising, changes, strict=True):
                if _key(change) in self._seen and change != best:
                    self._gains[pair] = self._ratio(change) / min(self._ratio(best), sys.float_info.max)
            best_change = min((best, *changes), key=self._ratio)
            if not self._ratio(best_change) < self._ratio(best) * _GAIN:  # Both are infinite if the time was up.
                return best
            best = best_change

    def _ratio(self, settings: Settings) -> float:
        """Return the time relative to plain ONNX Runtime's; infinity for a rejected or untried candidate."""
        if not settings:
            return 1.0
        trial = self._seen.get(_key(settings))
        return math.inf if trial is None or trial.ratio is None else trial.ratio

    def _better(self, best: Choice, settings: Settings, gain: float = _GAIN) -> Choice:
        ratio = self._ratio(settings)
        return Choice(settings, ratio) if ratio < best.ratio * gain else best

    def try_all(self, candidates: Sequence[Settings], *, again: bool = False) -> None:
        """Try each new candidate, or with ``again`` all of them once more."""
        new = {_key(choice): choice for choice in candidates if choice and (again or _key(choice) not in self._seen)}
        for key, settings in new.items():
            if again or time.monotonic() < self.end:
                self._keep(self._measure(settings, 2 * self._seconds if again else self._seconds))
            else:
                self._late[key] = f"{described(settings)}: no time left"

    def _measure(self, settings: Settings, seconds: float) -> Trial:
        try:
            trial: Trial = self._child.ask(measure, settings, seconds, timeout=self._patience)
        except Exception as error:  # noqa: BLE001 - the error of a candidate must not end the search
            trial = Trial(settings, verdict=f"rejected: {first_line(error)}")
        if trial.ratio is None:
            self._child.end()  # The candidate may have corrupted the process.
        return trial

    def _keep(self, trial: Trial) -> None:
        before = self._seen.get(_key(trial.settings))
        if before is not None and before.ratio is not None and trial.ratio is not None:
            trial = max(before, trial, key=lambda each: each.ratio or 0)  # The smaller ratio may have been luck.
        self._seen[_key(trial.settings)] = trial
        self.on_trial(trial)


_PLAIN = {name: next(iter(values)) for name, values in SETTINGS.items() if name != "search"}


def normal(settings: Settings) -> Settings:
    """Return the settings without plain ONNX Runtime's own values; the search always stays."""
    return {name: value for name, value in settings.items() if value != _PLAIN.get(name)}


def _key(settings: Settings) -> _Key:
    return tuple(sorted(settings.items()))
