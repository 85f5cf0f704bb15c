"""``ortgpu.tune``: find the settings with which a model is fastest on its GPU, and keep them in a record."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...model.files import ModelSource, write_temporary
from ...provider.lifetime import device_of
from ...provider.records import Choice, Key, Record, VoidRecordError, default_path, read_record
from ...provider.requests import parse
from ...provider.runtime import load_runtime
from ...provider.settings import AUTOMATIC, FEW_THREADS, MAP_DEPTH, SETTINGS, Settings, described
from .children import GIVEN, ON_CPU, Beginning, Child, ChildFailedError, Place, Trial, Work, first_line, only_tuner
from .comparing import Comparison, several_runs
from .feeds import shape_of

if TYPE_CHECKING:
    from ...provider.devices import Device, DeviceRequest
    from ...provider.interfaces import VerifiedSession

logger = logging.getLogger("ortgpu")

_Key = tuple[tuple[str, str], ...]
Objective = Literal["latency", "throughput"]
Precision = Literal["float32", "float16"]

BUDGET = 60.0  # seconds
_BATCHES: Mapping[Objective, tuple[int, ...]] = {"latency": (1,), "throughput": (32,)}
_THREADS: Mapping[Objective, int] = {"latency": 1, "throughput": MAP_DEPTH}  # runs at a time
_GAIN = 0.99  # of the time: less is noise, and is not worth another setting
_SECONDS = 0.4  # to measure each batch of a candidate
_HOPELESS = 1.5  # times as long as without a setting: it is not combined with others
_FLOAT16 = 0.4  # of the time to search is for float16, where that is a candidate
_SEARCHING = 0.8  # of the budget; the rest is for measuring the best once more, and for where others diverge
_PATIENCE = 2  # budgets, for which another tuner of the GPU is waited for: those that began together end together
_LONGEST_START = 120.0  # seconds of the first child, which has everything to load
_SHORTEST = 15.0  # seconds that any child may take


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of :func:`tune`.

    Attributes:
        device: the GPU.
        automatic: the best settings that sessions apply by themselves.
        named: the best settings of all, for sessions that name the record: ``GPUSession(model, tuned=record)``.
        record: the file. None: none was written, because ``no_record``.
        compared_with: what results were compared with.
        trials: all candidates, in the order in which they were tried.
        left_out: what was not tried, and why.
        shapes: of the inputs, for each batch.
        seconds: that it took.
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


def tune(
    model: ModelSource,
    *,
    device: Device | DeviceRequest = None,
    feeds: Sequence[Mapping[str, Any]] | None = None,
    batches: Sequence[int] | None = None,
    objective: Objective = "latency",
    precision: Precision = "float32",
    budget: float = BUDGET,
    record: str | os.PathLike[str] | None = None,
    on_trial: Callable[[Trial], object] = lambda _: None,
    providers: Sequence[Any] = (),
) -> Tuning:
    """Measure which settings suit a model on its GPU, compare every result, and keep the best in a record.

    Each candidate has a deadline in a child process, in turns with plain ONNX Runtime. Its results may be twice
    as far from those of the CPU in float32 as plain ONNX Runtime's are. Only one process of this user at a time tunes
    on a GPU. Other work on the GPU spoils the measurement.

    Args:
        model: path or bytes.
        device: as for GPUSession.
        feeds: inputs to measure with, one mapping for each batch. Without them inputs are made up: batches of
            ``batches`` items, other free dimensions are 1.
        objective: "latency" measures single runs with their arrays on the GPU, by default one item; "throughput" four
            runs at a time from arrays to arrays, as ``map`` makes them, by default 32 items.
        precision: "float16" also tries float16 inside, with inputs and outputs as they are. Its results may be off by
            2e-2 of the largest value of an output.
        budget: seconds after which no further candidate is tried.
        record: where to write the record, instead of the user's cache folder.
        on_trial: called with each trial when it has ended.
        providers: as for GPUSession, to be measured as they are given at the end, for the budget again: TensorRT, say,
            which is no candidate and was never run here. No record has them.

    Raises:
        GPUError: the model cannot be opened on the GPU.
        UnknownInputError: no inputs can be made up. It is a ValueError.
        TimeoutError: another process tuned on this GPU all the time, or the model takes minutes to open.
        OSError: ``record`` cannot be written.
        ValueError: an argument is invalid.
        Exception: ONNX Runtime's own, if it refuses the model or the inputs.

    Not promised: the same choice each time. Settings whose times differ by 1 % or less are equal to this function.
    """
    if objective not in _BATCHES:
        raise ValueError(f'objective must be "latency" or "throughput", not {objective!r}')
    if precision not in ("float32", "float16"):
        raise ValueError(f'precision must be "float32" or "float16", not {precision!r}')
    shapes = tuple(batches or _BATCHES[objective])
    if (feeds is not None and not feeds) or min(shapes) < 1:
        raise ValueError("there must be a feed, or a batch, and batches must be of one item or more")
    given = tuple(parse(list(providers), None).as_arguments())
    wanted = Wanted(model, device, feeds, shapes, objective, precision, budget, on_trial, given)
    return tune_at(Place(), wanted, record)


def tune_unless_tuned(model: ModelSource, device: int | None) -> None:
    """Tune as :func:`tune` does, unless another process did so while this one waited for it, or no record can be."""
    with contextlib.suppress(_OfNoUseError):
        tune_at(Place(), Wanted(model, device, once=True))


class _OfNoUseError(Exception):
    """There is a record now, or there can be none."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of :func:`tune`."""

    model: ModelSource
    device: Any = None
    feeds: Sequence[Mapping[str, Any]] | None = None
    batches: tuple[int, ...] = (1,)
    objective: Objective = "latency"
    precision: Precision = "float32"
    budget: float = BUDGET
    on_trial: Callable[[Trial], object] = lambda _: None
    providers: tuple[tuple[str, dict[str, str]], ...] = ()
    once: bool = False  # not if another process has written the record meanwhile, or there can be none


def tune_at(
    place: Place,
    wanted: Wanted,
    record: str | os.PathLike[str] | None = None,
    kind: Callable[..., Search] | None = None,
) -> Tuning:
    """Tune as :func:`tune` does, at another place, or with another search.

    Tests have the CPU in the place of a GPU, and benchmarks a search that goes on.
    """
    started = time.monotonic()
    runtime = load_runtime()
    if runtime.module is None:
        from ...diagnosis import diagnosing

        raise diagnosing.why_no_module(runtime)
    by_content = isinstance(wanted.model, bytes) or wanted.precision == "float16"
    feeds = tuple(dict(feed) for feed in wanted.feeds) if wanted.feeds is not None else None
    with model_in_folder(wanted.model) as (folder, model), Child(folder) as child:
        begun: Beginning = _asked(child, "begin", model, wanted.device, place, wanted.batches, feeds, by_content)
        try:
            path, no_record = _path_of_record(wanted, record, begun), None
        except VoidRecordError as error:  # what is measured is of use without it
            path, no_record = None, str(error)
            logger.warning("no record of tune can be kept: %s", no_record)
            if wanted.once:
                raise _OfNoUseError from None
        opening = time.monotonic() - started
        with only_tuner((begun.gpu.uuid if begun.gpu is not None else None) or "cpu", _PATIENCE * wanted.budget):
            if wanted.once and path is not None and _fits(path, begun.key):
                raise _OfNoUseError
            since = time.monotonic() - opening  # waiting is not searching
            search = (kind or Search)(wanted, place, begun, child, folder, model, since)
            search.run()
            shapes = tuple({name: list(shape_of(value)) for name, value in feed.items()} for feed in begun.feeds)
            if isinstance(begun.key, Key) and path is not None:  # before the next tuner looks for it
                Record(begun.key, search.automatic, search.named, shapes, begun.dimensions).write(path)
                logger.info("tuned: %s, written to %s", described(search.automatic.settings), path)
    return Tuning(
        str(begun.gpu or "CPU"),
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
    """Return where the record will be, in a folder that is made here.

    Raises:
        VoidRecordError: there can be none.
        OSError: none can be written where the caller wants it.
    """
    if isinstance(begun.key, str):
        raise VoidRecordError(begun.key)
    if record is not None:
        _check_writable(Path(record).parent)
        return Path(record)
    path = default_path(wanted.model, begun.gpu.name if begun.gpu is not None else None)
    if path is None:
        raise VoidRecordError("platformdirs is not installed")
    try:
        _check_writable(path.parent)
    except OSError as error:
        raise VoidRecordError(str(error)) from None
    return path.with_suffix(".float16.json") if wanted.precision == "float16" else path  # used by those who name it


def _check_writable(folder: Path) -> None:
    """Make a folder. Raises OSError if no file can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _fits(path: Path, key: Key | str) -> bool:
    try:
        return read_record(path).key == key
    except (FileNotFoundError, VoidRecordError):
        return False


def _asked(child: Child, function: str, *arguments: Any) -> Any:
    """Ask a child to open and run a model. Raises TimeoutError, RuntimeError, or what the function raises."""
    try:
        return child.ask(function, *arguments, timeout=_LONGEST_START)
    except ChildFailedError as error:
        if error.timed_out:
            raise TimeoutError(f"to open and run the model: {error}") from None
        raise RuntimeError(f"the model could not be opened and run: {error}") from None


def _results_of_cpu(
    child: Child, model: str, feeds: Sequence[Mapping[str, Any]], patience: float
) -> tuple[tuple[list[Any], ...] | None, str]:
    """Return the results of the CPU, or None if it gives none in time; and what results are compared with."""
    try:
        return child.ask("results", model, ON_CPU, feeds, timeout=patience), "the CPU's float32"
    except Exception as error:  # noqa: BLE001 - of whatever class: then there is nothing from the CPU
        return None, f"plain ONNX Runtime on the GPU, since the CPU gave no results: {first_line(error)}"


def compare_with_cpu(session: VerifiedSession, model: ModelSource, feed: Mapping[str, Any]) -> tuple[Comparison, str]:
    """Compare the results of an open session as :func:`tune` compares those of candidates.

    Return the comparison, whose fault says where results first go wrong, and what they were compared with.

    Raises:
        Exception: whatever plain ONNX Runtime or the session raises.
    """
    place = Place(device_of(session).ordinal)
    with model_in_folder(model) as (folder, path), Child(folder) as child:
        right, compared_with = _results_of_cpu(child, path, [feed], _LONGEST_START)
        (plain,) = _asked(child, "results", path, place, [feed])
        names = [output.name for output in session._outputs_meta]
        found = Comparison(names, right[0] if right is not None else None, plain)
        found.add_all(several_runs(session, feed))
        if found.wrong is not None:
            work = write_work(folder, Work(path, place, (feed,), right))
            found.wrong += f"; {_divergence(child, work, _settings_of(session), _LONGEST_START)}"
    return found, compared_with


def _settings_of(session: VerifiedSession) -> Settings:
    """Return the settings that a session has chosen."""
    chosen = {option: value for option, (value, _) in session._verified.options_chosen.items()}
    return {
        name: value
        for name, values in SETTINGS.items()
        for value, options in values.items()
        if options and options.items() <= chosen.items()
    }


def _divergence(child: Child, work: str, settings: Settings, timeout: float) -> str:
    """Return where the results of a candidate first go wrong, for a person."""
    try:
        where: str = child.ask("locate", work, settings, timeout=timeout)
    except Exception as error:  # noqa: BLE001 - of whatever class: the rejection stands
        return f"the tensor at fault was not found: {first_line(error)}"
    return where


def in_float16(model: ModelSource) -> bytes:
    """Return a model with float16 inside. A child converts it, which takes seconds.

    Raises:
        Exception: whatever the converter raises.
    """
    with model_in_folder(model) as (folder, path), Child(folder) as child:
        half = os.path.join(folder, "half.onnx")
        child.ask("halve", path, half, timeout=_LONGEST_START)
        return Path(half).read_bytes()


@contextlib.contextmanager
def model_in_folder(model: ModelSource) -> Iterator[tuple[str, str]]:
    """Yield a folder of this user alone for the time of the block, and the path of the model."""
    with tempfile.TemporaryDirectory(prefix="ortgpu-tuning-") as folder:
        path = os.path.join(folder, "model.onnx")
        if isinstance(model, bytes):
            write_temporary(path, model)
        yield folder, path if isinstance(model, bytes) else os.path.abspath(os.fsdecode(model))


def write_work(folder: str, work: Work) -> str:
    """Write what a child works on, and return the path of the file."""
    path = os.path.join(folder, "work.pickle")
    Path(path).write_bytes(pickle.dumps(work))
    return path


class Search:
    """A climb over the table of settings: of all changes of one setting the best is kept, until none is better."""

    def __init__(
        self, wanted: Wanted, place: Place, begun: Beginning, child: Child, folder: str, model: str, started: float
    ) -> None:
        self._wanted, self._begun, self._child, self._folder = wanted, begun, child, folder
        self._started = started
        self._seconds = min(_SECONDS, wanted.budget / 100)
        self.end = started + wanted.budget * _SEARCHING
        self._patience = max(_SHORTEST, 4 * (time.monotonic() - started))
        self._seen: dict[_Key, Trial] = {}
        # The last ratio of a value to the time without it; float16 is worth a try before what gains nothing
        self._gains: dict[tuple[str, str], float] = {("precision", "float16"): 0.5}
        self._left_out = list(begun.left_out)
        self._late: dict[_Key, str] = {}  # candidates that the time did not suffice for, when they were due
        self.compared_with = ""
        self._work = Work(
            model,
            replace(place, ordinal=begun.gpu.ordinal) if begun.gpu is not None else place,
            begun.feeds,
            dimensions=begun.dimensions,
            threads=_THREADS[wanted.objective],
            given=wanted.providers,
        )

    def run(self) -> None:
        """Find ``automatic`` and ``named``."""
        patience = max(_SHORTEST, self._wanted.budget / 3)
        right, self.compared_with = _results_of_cpu(self._child, self._work.model, self._begun.feeds, patience)
        self._work = replace(self._work, right=right, half=self._half(patience))
        self._file = write_work(self._folder, self._work)
        plain: Settings = {"search": "exhaustive"} if self._begun.convolves else {}
        start: Settings = {"search": "heuristic"} if self._begun.convolves else {}  # as sessions have it untuned
        # Settings that sessions apply by themselves are among all, so their own climb comes last
        end = self.end
        if self._work.half is not None:
            self.end -= _FLOAT16 * max(0.0, end - time.monotonic())
        exact = self._climb(start, self.spaces(tuple(name for name in SETTINGS if name != "precision")))
        self.end = end
        named = self._climb(exact, self.spaces(tuple(SETTINGS)))
        allowed = [each.settings for each in self.trials if each.settings.keys() <= {"search", *AUTOMATIC}]
        automatic = self._climb(min(allowed, key=self._ratio, default=start), self.spaces(AUTOMATIC))
        self.try_all([start, automatic, named], again=True)
        self.automatic = self._better(self._better(Choice(plain, 1.0), start, gain=1.01), automatic)
        self.named = self._better(self.automatic, named)
        self._look_where_they_diverge()
        if self._wanted.providers:
            self._measure_given()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was not tried to the end, and why."""
        return (*self._left_out, *(said for key, said in self._late.items() if key not in self._seen))

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._seen.values())

    def _half(self, patience: float) -> str | None:
        if self._wanted.precision != "float16":
            return None
        path = os.path.join(self._folder, "half.onnx")
        try:
            self._child.ask("halve", self._work.model, path, timeout=patience)
        except Exception as error:  # noqa: BLE001 - the converter raises what it likes
            self._left_out.append(f"precision float16: {first_line(error)}")
            return None
        return path

    def spaces(self, names: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
        """Return the settings that can matter to this model, each with its values."""
        begun, single = self._begun, self._wanted.objective == "latency"
        matters = {
            "precision": self._work.half is not None,
            "graph": single and begun.captures,
            "shapes": bool(begun.dimensions),
            "layout": begun.convolves,
            "search": begun.convolves,
            "workspace": begun.convolves,
            "cudnn": not begun.needs_cudnn,
            "threads": (os.cpu_count() or 1) > 2 * FEW_THREADS,
            "depth": not single,
            "staging": not single,
        }
        return [(name, tuple(SETTINGS[name])) for name in matters if name in names and matters[name]]

    def _climb(self, best: Settings, spaces: Sequence[tuple[str, Sequence[str]]]) -> Settings:
        """Return the best settings that changes of one setting at a time lead to."""
        while True:
            pairs = [(name, value) for name, values in spaces for value in values]
            pairs.sort(key=lambda pair: self._gains.get(pair, 1.0))
            tried = [pair for pair in pairs if self._gains.get(pair, 1.0) < _HOPELESS]
            changes = [normal({**best, name: value}) for name, value in tried]
            self.try_all([best, *changes])
            for pair, each in zip(tried, changes, strict=True):
                if _key(each) in self._seen and each != best:
                    self._gains[pair] = self._ratio(each) / min(self._ratio(best), sys.float_info.max)
            found = min((best, *changes), key=self._ratio)
            if not self._ratio(found) < self._ratio(best) * _GAIN:  # both are infinite where the time was up
                return best
            best = found

    def _ratio(self, settings: Settings) -> float:
        """Return the time relative to plain ONNX Runtime's; infinity for what was rejected or not tried."""
        if not settings:
            return 1.0
        trial = self._seen.get(_key(settings))
        return math.inf if trial is None or trial.ratio is None else trial.ratio

    def _better(self, best: Choice, settings: Settings, gain: float = _GAIN) -> Choice:
        ratio = self._ratio(settings)
        return Choice(settings, ratio) if ratio < best.ratio * gain else best

    def try_all(self, candidates: Sequence[Settings], *, again: bool = False) -> None:
        """Try all that were not tried yet, or all of them once more."""
        left = {_key(each): each for each in candidates if each and (again or _key(each) not in self._seen)}
        for key, settings in left.items():
            if again or time.monotonic() < self.end:
                self._keep(self._measure(settings, 2 * self._seconds if again else self._seconds))
            else:
                self._late[key] = f"{described(settings)}: the time was up"

    def _measure_given(self) -> None:
        self._patience = max(self._patience, self._wanted.budget)
        found = self._measure({GIVEN: " ".join(name for name, _ in self._wanted.providers)}, 2 * self._seconds)
        self._keep(replace(found, verdict="as given") if found.ratio is not None else found)

    def _measure(self, settings: Settings, seconds: float) -> Trial:
        try:
            self._child.ask("prepare", self._file, timeout=_LONGEST_START)
            found: Trial = self._child.ask("measure", self._file, settings, seconds, timeout=self._patience)
        except Exception as error:  # noqa: BLE001 - whatever a candidate does, the others are tried
            found = Trial(settings, verdict=f"rejected: {first_line(error)}")
        if found.ratio is None:
            self._child.end()  # it may be spoilt
        return found

    def _keep(self, trial: Trial) -> None:
        before = self._seen.get(_key(trial.settings))
        if before is not None and before.ratio is not None and trial.ratio is not None:
            trial = max(before, trial, key=lambda each: each.ratio or 0)  # the other may have been luck
        self._seen[_key(trial.settings)] = trial
        self._wanted.on_trial(trial)

    def _look_where_they_diverge(self) -> None:
        """Find the first diverging tensor of each rejected candidate, and set the verdicts."""
        for choice in (self.automatic, self.named):
            if (key := _key(choice.settings)) in self._seen:
                self._seen[key] = replace(self._seen[key], verdict="kept")
        for key, trial in self._seen.items():
            if trial.verdict.startswith(_WRONG):
                left = self._started + self._wanted.budget - time.monotonic()
                where = "not looked for: the time was up"
                if left >= _SHORTEST / 3:
                    where = _divergence(self._child, self._file, trial.settings, left)
                self._seen[key] = replace(trial, divergence=where)


_WRONG = "rejected: output"
_PLAIN = {name: next(iter(values)) for name, values in SETTINGS.items() if name != "search"}


def normal(settings: Settings) -> Settings:
    """Return the settings without those that plain ONNX Runtime has; the search is always named."""
    return {name: value for name, value in settings.items() if value != _PLAIN.get(name)}


def _key(settings: Settings) -> _Key:
    return tuple(sorted(settings.items()))
