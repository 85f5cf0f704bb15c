"""The search of ``tune``: what it keeps, what it rejects and why, with the CPU in the place of a GPU."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx.parser
import pytest

from ortgpu.environment.child_process import ChildFailedError
from ortgpu.provider.records import Choice, read_record
from ortgpu.provider.settings import AUTOMATIC, SETTINGS
from ortgpu.running.comparing import Comparison, compare
from ortgpu.session.tune import tune
from ortgpu.session.tuning import tuning
from ortgpu.session.tuning.children import Beginning, Child, Place, Trial, Wanted, only_tuner
from ortgpu.session.tuning.trial import results
from ortgpu.session.tuning.tuning import Search, tune_at
from tests.support.tuning_faults import (
    CPU,
    FAULTY,
    HOPELESS,
    VANISHING,
    open_all_hang,
    open_by_batch,
    open_exhaustive_hangs,
)

pytestmark = pytest.mark.timeout(300)  # a search is many children


@pytest.fixture(autouse=True)
def _a_lock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for the tuner of another, which has the same CPU in the place of a GPU."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have a search try these settings alone: each candidate takes seconds."""
    monkeypatch.setattr(tuning, "SETTINGS", {name: SETTINGS[name] for name in names})
    monkeypatch.setattr(tuning, "AUTOMATIC", tuple(name for name in names if name in AUTOMATIC))


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a second for the search of plain ONNX Runtime, which hangs, and longer for what a busy machine delays."""
    ask = Child.ask

    def asked(self: Child, function: Any, *arguments: Any, timeout: float) -> Any:
        return ask(self, function, *arguments, timeout=1 if {"search": "exhaustive"} in arguments else timeout)

    monkeypatch.setattr(Child, "ask", asked)


def by_settings(trials: tuple[Trial, ...], **settings: str) -> Trial:
    return next(each for each in trials if settings.items() <= each.settings.items())


def test_the_fastest_is_kept_and_written(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "workspace")
    seen: list[Trial] = []
    path = tmp_path / "record.json"
    found = tune_at(CPU, Wanted(network, batches=(2,), budget=60), path, on_trial=seen.append)
    assert found.automatic.settings == {"search": "heuristic", "workspace": "small"}
    assert 0 < found.automatic.ratio < 1  # how much less depends on what else runs on the machine
    assert found.record == path
    assert found.compared_with == "the CPU's float32"
    settings = [each.settings for each in seen]
    assert settings[: len(found.trials)] == [each.settings for each in found.trials]
    assert settings.count(found.automatic.settings) == 2  # what is chosen is measured once more
    assert sum(each.verdict == "kept" for each in found.trials) >= 1
    record = read_record(path)
    assert (record.automatic, record.named) == (found.automatic, found.named)
    assert record.shapes == ({"x": [2, 16, 24, 24]},)
    assert record.dimensions == {"batch": 2}
    json.dumps(found.as_dict())


def test_candidates_at_fault_are_rejected(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is wrong in one channel, one when two runs are at work, one ends its process, and one hangs."""
    only(monkeypatch, "layout", "search", "workspace")
    monkeypatch.setattr(tuning, "_SHORTEST", 20)  # a busy machine must not make a sound candidate look hung
    impatient(monkeypatch)
    found = tune_at(FAULTY, Wanted(network, batches=(1,), budget=100), tmp_path / "record.json")
    wrong = by_settings(found.trials, layout="channels-last")
    assert wrong.verdict.startswith("rejected: output 'v7' is")
    race = by_settings(found.trials, layout="channels-last, biases fused")
    assert race.verdict.startswith("rejected: output 'v7' is")
    ended = by_settings(found.trials, workspace="small")
    how = "it ended with" if sys.platform == "win32" else "SIGABRT"
    assert ended.verdict.startswith(f"rejected: the process ended: {how}")
    (hung,) = [each for each in found.trials if each.settings == {"search": "exhaustive"}]
    assert hung.verdict == "rejected: it did not end in time"
    assert found.automatic.settings == found.named.settings == {"search": "heuristic"}
    assert [each.settings for each in found.trials if each.verdict == "kept"] == [{"search": "heuristic"}]


def test_a_fault_in_the_sixth_run_is_seen(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of all timed runs count."""
    only(monkeypatch, "layout")
    found = tune_at(VANISHING, Wanted(network, batches=(1,), budget=60), tmp_path / "record.json")
    late = by_settings(found.trials, layout="channels-last, biases fused")
    assert late.verdict.startswith("rejected: output 'v7' is")


@pytest.mark.parametrize(("opener", "patience"), [(open_exhaustive_hangs, 20), (open_all_hang, 1)])
def test_a_candidate_that_hung_is_never_kept(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Any, patience: float
) -> None:
    """The search of plain ONNX Runtime hangs as a candidate, and no other candidate is faster than plain."""
    only(monkeypatch, "search")
    monkeypatch.setattr(tuning, "_SHORTEST", patience)
    monkeypatch.setattr(tuning, "_STARTS", 0)
    impatient(monkeypatch)
    path = tmp_path / "record.json"
    found = tune_at(Place(None, opener), Wanted(network, batches=(1,), budget=30), path)
    hung = by_settings(found.trials, search="exhaustive")
    assert hung.verdict == "rejected: it did not end in time"
    assert {"search": "exhaustive"} not in (found.automatic.settings, found.named.settings)
    if opener is open_all_hang:
        assert (found.record, found.automatic) == (None, Choice({}, 1.0))
        assert found.no_record == "ONNX Runtime's default settings were rejected: it did not end in time"
        assert not path.exists()
    else:
        assert read_record(path).automatic.settings == {"search": "heuristic"}
        assert [each.settings for each in found.trials if each.verdict == "kept"] == [{"search": "heuristic"}]


def test_a_model_that_the_cpu_cannot_run_in_time_is_compared_with_plain(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Child.ask

    def without_cpu(self: Child, function: Any, *arguments: Any, timeout: float) -> Any:
        if function is results:
            raise ChildFailedError("it did not end in time", timed_out=True)
        return ask(self, function, *arguments, timeout=timeout)

    monkeypatch.setattr(Child, "ask", without_cpu)
    only(monkeypatch, "layout")
    found = tune_at(FAULTY, Wanted(network, batches=(1,), budget=60), tmp_path / "record.json")
    why = "plain ONNX Runtime on the GPU, since the CPU gave no results: it did not end in time"
    assert found.compared_with == why
    assert by_settings(found.trials, layout="channels-last").verdict.startswith("rejected: output 'v7' is")


def test_a_batch_for_a_model_that_has_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was measured with the batch of the model, and nothing said so."""
    monkeypatch.setattr(tuning, "Search", NoSearch)
    fixed = tmp_path / "fixed.onnx"
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[3, 4] x) => (float[3, 4] y) { y = Relu(x) }'
    fixed.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    for batches, left_out in (((1,), ()), ((2, 8), ("batches of 2, 8: the model has no free batch dimension",))):
        found = tune_at(CPU, Wanted(fixed, batches=batches), tmp_path / "record.json")
        assert found.left_out == left_out
        assert found.shapes == ({"x": [3, 4]},)


def test_shapes_of_several_batches_are_not_fixed(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "Search", NoSearch)
    found = tune_at(CPU, Wanted(network, batches=(1, 2)), tmp_path / "record.json")
    assert found.left_out == ("shapes fixed: a session has those of one batch",)


def test_the_best_over_all_feeds_is_kept(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is ten times as fast for one shape is of no use if it is four times as slow for the other."""
    only(monkeypatch, "layout", "workspace")
    feeds = [{"x": np.zeros((batch, 16, 24, 24), np.float32)} for batch in (1, 4)]
    found = tune_at(Place(None, open_by_batch), Wanted(network, feeds=feeds, budget=60), tmp_path / "record.json")
    assert found.named.settings == {"search": "heuristic", "layout": "channels-last"}
    assert found.shapes == ({"x": [1, 16, 24, 24]}, {"x": [4, 16, 24, 24]})
    assert read_record(tmp_path / "record.json").shapes == found.shapes
    assert all(len(each.seconds) == 2 for each in found.trials if each.ratio is not None)


def test_inputs_that_are_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence has no shape, and the search ended in an AttributeError."""
    monkeypatch.setattr(tuning, "Search", NoSearch)
    model = tmp_path / "sequence.onnx"
    text = '<ir_version: 8, opset_import: ["": 17]> g (seq(float[n]) x) => (int64 y) { y = SequenceLength(x) }'
    model.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    wanted = Wanted(model, feeds=[{"x": [np.ones(3, np.float32)]}])
    assert tune_at(CPU, wanted, tmp_path / "record.json").shapes == ({"x": []},)


def test_what_map_does_is_measured_for_throughput(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "depth", "staging")
    wanted = Wanted(network, batches=(2,), budget=60, objective="throughput")
    found = tune_at(CPU, wanted, tmp_path / "record.json")
    tried = [each.settings for each in found.trials if each.ratio is not None]
    assert {"search": "heuristic", "depth": "two"} in tried
    assert {"search": "heuristic", "depth": "eight"} in tried
    assert {"search": "heuristic", "staging": "none"} in tried


@pytest.mark.slow
def test_providers_of_the_caller_are_measured_as_given(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "workspace")
    cpu: tuple[Any, ...] = (("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"}),)
    for given, fails in ((cpu, False), ((("TensorrtExecutionProvider", {}), ("CPUExecutionProvider", {})), True)):
        found = tune_at(CPU, Wanted(network, batches=(2,), budget=60, providers=given), tmp_path / "record.json")
        trial = found.trials[-1]
        assert trial.settings["providers"].partition("ExecutionProvider")[0] in ("CPU", "Tensorrt")
        assert (trial.ratio is None) is fails
        assert trial.verdict.startswith("rejected: ProviderFallbackError" if fails else "as given")
        assert "providers" not in read_record(tmp_path / "record.json").named.settings


@pytest.mark.slow
def test_what_is_much_slower_alone_is_not_combined(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "search", "workspace")
    found = tune_at(HOPELESS, Wanted(network, batches=(1,), budget=100), tmp_path / "record.json")
    slow = [each for each in found.trials if each.settings["search"] == "exhaustive"]
    assert [each.settings for each in slow] == [{"search": "exhaustive"}]
    assert (slow[0].ratio or 0) > 3
    assert {"search": "heuristic", "workspace": "small"} in [each.settings for each in found.trials]


def test_a_search_ends_with_its_time(network: Path, tmp_path: Path) -> None:
    found = tune_at(CPU, Wanted(network, budget=0.1), tmp_path / "record.json")
    assert [each.settings for each in found.trials] == [{"search": "heuristic"}]
    assert any("no time left" in text for text in found.left_out)


def test_a_model_that_does_not_run_raises_as_a_session_does(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(Exception, match=r"(?i)protobuf"):
        tune_at(CPU, Wanted(broken), tmp_path / "record.json")
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    "argument", [{"objective": "speed"}, {"precision": "int8"}, {"feeds": []}, {"batches": [4, 0]}, {"providers": [5]}]
)
def test_invalid_arguments(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|malformed"):
        tune("model.onnx", **argument)


def test_one_tuner_at_a_time() -> None:
    with only_tuner("test", 0), pytest.raises(TimeoutError, match="another process"), only_tuner("test", 0):
        pass
    with only_tuner("test", 0):
        pass


@pytest.mark.parametrize("captures", [True, False])
def test_a_graph_that_sessions_refuse_is_no_candidate(captures: bool) -> None:
    """ONNX Runtime captures it, and a session with the record was then refused, which had not asked for a graph."""
    told = () if captures else ("graph captured: its input 'mask' is read on the CPU, or by no node",)
    begun = Beginning(None, (), {}, "", convolves=False, needs_cudnn=False, captures=captures, left_out=told)
    search = Search(Wanted("model.onnx"), CPU, begun, Child(), 0.0)
    assert ("graph" in dict(search.spaces(tuple(SETTINGS)))) is captures
    assert search.left_out == told


class NoSearch(Search):
    """A search that tries nothing."""

    ends: ClassVar[list[float]] = []

    def run(self) -> None:
        self.ends.append(self.end)
        self.automatic = self.named = Choice({}, 1.0)


def test_waiting_for_another_tuner_takes_nothing_from_the_time_to_search(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two tuners had no time left: it tried nothing, and wrote that over the record of the first."""
    waited, kept, path = 1.5, [], tmp_path / "record.json"

    @contextlib.contextmanager
    def late(device: str, patience: float) -> Iterator[None]:
        with only_tuner(device, patience):
            time.sleep(waited)
            yield
            kept.append(path.exists())  # the next one looks for it

    monkeypatch.setattr(tuning, "only_tuner", late)
    before = time.monotonic()
    tune_at(CPU, Wanted(network, budget=10), path, NoSearch)
    assert NoSearch.ends[-1] >= before + waited + 0.8 * 10
    assert kept == [True]


def test_what_was_measured_is_told_where_the_cache_folder_cannot_be_written(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a container with a read-only file system, say, a minute of measuring ended in an OSError."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "record.json"
    monkeypatch.setattr(tuning, "default_path", lambda *_: path)
    found = tune_at(CPU, Wanted(network), kind=NoSearch)
    assert found.record is None
    assert repr(str(path.parent)) in str(found.no_record)  # as an OSError writes it, also for Windows
    assert "no record of tune can be kept" in caplog.text
    before = len(NoSearch.ends)
    with pytest.raises(OSError, match="file"):
        tune_at(CPU, Wanted(network), path, NoSearch)
    assert len(NoSearch.ends) == before


def test_a_session_that_waited_for_another_tuner_uses_its_record(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(tuning, "default_path", lambda *_: path)
    monkeypatch.setattr(tuning, "Place", lambda: CPU)
    monkeypatch.setattr(tuning, "Search", NoSearch)
    searches = []
    for content in ("", "{}", None):
        if content is not None:
            path.write_text(content)
        tuning.tune_unless_tuned(str(network), None)
        searches.append(len(NoSearch.ends))
    assert searches[1] == searches[0] + 1  # of a record that cannot be used
    assert searches[2] == searches[1]


def test_a_session_does_not_measure_what_no_record_can_keep(
    network: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model in ONNX Runtime's own format, say, was measured for a minute each time that it was opened."""
    monkeypatch.setattr(tuning, "default_path", lambda *_: None)
    monkeypatch.setattr(tuning, "Place", lambda: CPU)
    monkeypatch.setattr(tuning, "Search", NoSearch)
    before = len(NoSearch.ends)
    tuning.tune_unless_tuned(str(network), None)
    assert len(NoSearch.ends) == before
    assert "no record of tune can be kept: platformdirs is not installed" in caplog.text


# Comparing


RIGHT = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)


def off_by(most: float) -> Any:
    return (RIGHT + most * np.random.default_rng(0).uniform(-1, 1, RIGHT.shape)).astype(np.float32)


def test_results_may_be_twice_as_far_as_plains() -> None:
    assert compare(RIGHT, off_by(1e-3), off_by(1.5e-3))[1] is None
    error, wrong = compare(RIGHT, off_by(1e-3), off_by(3e-3))
    assert error == pytest.approx(3e-3, rel=0.1)
    assert "(limit " in str(wrong)
    assert compare(RIGHT, off_by(1e-3), off_by(3e-3), tolerance=2e-2)[1] is None


def test_rounding_is_no_fault() -> None:
    assert compare(RIGHT, RIGHT, off_by(5e-6))[1] is None
    assert compare(RIGHT, RIGHT, off_by(5e-5))[1] is not None


def test_one_wrong_channel_among_many_counts() -> None:
    found = off_by(1e-3)
    found[:, 50] = RIGHT[:, 50] * 1.5 + 0.01
    assert compare(RIGHT, off_by(1e-3), found)[1] is not None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_has_to_be_so_where_plains_is(value: float) -> None:
    right, spoilt = RIGHT.copy(), RIGHT.copy()
    right[0, 0] = value
    assert compare(right, right, right)[1] is None
    assert "inf or NaN" in str(compare(right, right, RIGHT)[1])
    spoilt[3, 3] = value
    assert "inf or NaN" in str(compare(RIGHT, RIGHT, spoilt)[1])


@pytest.mark.parametrize("spoilt", [RIGHT[:1], RIGHT * np.nan, RIGHT * np.inf])
def test_a_result_without_a_distance_is_null_in_json(spoilt: Any) -> None:
    """It was Infinity there, which no JSON has."""
    found = Comparison(["y"], [RIGHT], [RIGHT])
    found.add_all([[spoilt], [RIGHT]])
    assert (found.error, found.wrong is None) == (None, False)


def test_integers_are_equal_where_plains_are() -> None:
    right, plain = np.arange(4), np.array([0, 1, 2, 9])
    assert compare(right, plain, np.array([0, 1, 2, 7]))[1] is None
    assert compare(right, plain, np.array([0, 5, 2, 9]))[1] == "differs in 1 of 4 values"


def test_shapes_types_and_other_values() -> None:
    assert "shape" in str(compare(RIGHT, RIGHT, RIGHT[:1])[1])
    assert "type" in str(compare(RIGHT, RIGHT, RIGHT.astype(np.float64))[1])
    assert compare(["a"], ["a"], ["a"])[1] is None
    assert compare(["a"], ["a"], ["b"])[1] is not None
    empty = np.zeros((0, 3), np.float32)
    assert compare(empty, empty, empty) == (0.0, None)


def test_float16_inside_keeps_inputs_and_outputs(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "precision")
    wanted = Wanted(network, precision="float16", budget=60)
    found = tune_at(replace(CPU, opener=Place().opener), wanted, tmp_path / "record.json")
    halves = [each for each in found.trials if each.settings.get("precision") == "float16"]
    assert halves
    assert 0 < (halves[0].error or 0) < 2e-2
    assert read_record(tmp_path / "record.json").key.weights.startswith("sha256 ")


# What a search does with its trials, with a child that is made up


class MadeChild:
    def __init__(self, *answers: Any) -> None:
        self.answers, self.ended = [*answers], 0

    def ask(self, function: Any, *arguments: Any, timeout: float) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.ended += 1


def search_of(child: Any) -> Search:
    begun = Beginning(None, (), {}, "", convolves=True, needs_cudnn=False, captures=False, left_out=())
    search = Search(Wanted("model.onnx"), CPU, begun, child, time.monotonic())
    search.on_trial = lambda trial: None
    return search


def test_a_process_with_a_rejected_candidate_measures_no_other_one() -> None:
    """The candidate may have corrupted it."""
    rejected = Trial({"a": "3"}, verdict="rejected: output 'y'")
    child = MadeChild(Trial({"a": "1"}, 0.5), ChildFailedError("the process ended"), Trial({"a": "2"}, 0.7), rejected)
    search, ended = search_of(child), []
    for settings in ({"a": "1"}, {"a": "0"}, {"a": "2"}, {"a": "3"}):
        search._measure(settings, 1)
        ended.append(child.ended)
    assert ended == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("ratios", "kept"),
    [((0.5, 0.7), 0.7), ((0.7, 0.5), 0.7), ((0.5, None), None), ((None, 0.5), 0.5)],
)
def test_a_second_measurement_takes_no_luck_for_speed(ratios: Any, kept: float | None) -> None:
    search = search_of(MadeChild())
    for ratio in ratios:
        search._keep(Trial({"a": "1"}, ratio))
    assert [trial.ratio for trial in search.trials] == [kept]


@pytest.mark.parametrize(
    ("precision", "record", "name"),
    [
        ("float32", None, "model.json"),
        ("float16", None, "model.float16.json"),  # which no session loads by itself
        ("float16", "mine.json", "mine.json"),
    ],
)
def test_a_record_of_another_precision_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, record: str | None, name: str
) -> None:
    monkeypatch.setattr(tuning, "default_path", lambda model, gpu: tmp_path / "model.json")
    begun: Any = SimpleNamespace(key=None, gpu=None)
    wanted = Wanted("model.onnx", precision=precision)
    assert tuning._path_of_record(wanted, tmp_path / record if record else None, begun) == tmp_path / name
