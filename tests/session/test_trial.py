"""A trial of settings: where its session is, what it gets, and which results make a candidate lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from ortgpu.errors import ProviderFallbackError
from ortgpu.session.tuning import trial as module
from tests.support.made_sessions import NEG

trial: Any = module  # so that a test may stand in for whatever it calls

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
FEED = {"x": np.arange(4, dtype=np.float32)}


class Session:
    """ONNX Runtime's InferenceSession: it notes its arguments, and is bound to what a test says."""

    made: list[Any]
    bound: list[str]

    def __init__(self, model: Any, options: Any, *, providers: Any) -> None:
        self.options, self.providers, self.may_fall_back = options, providers, True
        type(self).made.append(self)

    def get_providers(self) -> list[str]:
        return self.bound

    def disable_fallback(self) -> None:
        self.may_fall_back = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    Session.made, Session.bound = [], [CUDA, CPU]
    monkeypatch.setattr(trial.onnxruntime, "InferenceSession", Session)
    return Session.made


def opened(settings: Any, ordinal: int | None, dimensions: Any = None) -> Any:
    return trial.open_session(NEG, settings, trial.Place(ordinal), dimensions or {})


@pytest.mark.parametrize(("ordinal", "options"), [(0, {}), (1, {"device_id": "1"})])
def test_it_is_on_the_gpu_that_is_tuned(ordinal: int, options: dict[str, str], made: list[Any]) -> None:
    session = opened({}, ordinal)
    assert session.providers == [(CUDA, options), CPU]
    assert not session.may_fall_back


def test_a_trial_on_the_cpu_says_nothing_about_the_gpu(made: list[Any]) -> None:
    Session.bound = [CPU]
    with pytest.raises(ProviderFallbackError, match="did not bind CUDA"):
        opened({}, 0)
    assert opened({}, None).providers == [CPU]


def test_it_has_the_options_of_its_settings(made: list[Any]) -> None:
    settings = {"layout": "channels-last", "search": "exhaustive", "threads": "few", "depth": "two"}
    session = opened(settings, 0)
    assert dict(session.providers[0][1]) == {"prefer_nhwc": "1", "cudnn_conv_algo_search": "EXHAUSTIVE"}
    assert session.options.intra_op_num_threads == 4
    assert opened({"layout": "channels-first"}, 0).options.intra_op_num_threads == 0


def test_dimensions_are_fixed_where_the_settings_say_so(monkeypatch: pytest.MonkeyPatch, made: list[Any]) -> None:
    sizes: dict[str, int] = {}
    options = SimpleNamespace(add_free_dimension_override_by_name=sizes.__setitem__)
    monkeypatch.setattr(trial, "_quiet", lambda: options)
    opened({"shapes": "free"}, 0, {"n": 8})
    assert sizes == {}
    opened({"shapes": "fixed"}, 0, {"n": 8})
    assert sizes == {"n": 8}


def value(name: str, *shape: Any) -> Any:
    return SimpleNamespace(name=name, shape=list(shape))


@pytest.mark.parametrize(
    ("inputs", "feeds", "expected"),
    [
        ([value("x", "n", 3)], [{"x": np.ones((8, 3))}], {"n": 8}),
        ([value("x", "n"), value("y", "n", "m")], [{"x": np.ones(8), "y": np.ones((8, 2))}], {"n": 8, "m": 2}),
        ([value("x", "n"), value("y", "n")], [{"x": np.ones(8), "y": np.ones(4)}], {}),
        ([value("x", None)], [{"x": np.ones(8)}], {}),
        ([value("x", "")], [{"x": np.ones(8)}], {}),
        ([value("x", "n")], [{"x": np.ones(8)}, {"x": np.ones(4)}], {}),
    ],
)
def test_shapes_are_fixed_only_where_each_name_has_one_size(inputs: Any, feeds: Any, expected: Any) -> None:
    assert trial._dimensions(inputs, feeds) == expected


# Measurements, on the CPU


def model(nodes: str) -> bytes:
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y, float[n] z) {{ {nodes} }}'
    made: bytes = onnx.parser.parse_model(text).SerializeToString()
    return made


PLAIN = model("y = Neg (x) z = Abs (x)")


def measured(candidate: bytes, monkeypatch: pytest.MonkeyPatch, feeds: Any = (FEED,)) -> Any:
    """Measure a candidate that computes ``candidate``, beside plain ONNX Runtime with PLAIN."""
    opened_by: list[bytes] = [PLAIN, candidate]

    def opener(given: Any, settings: Any, place: Any, dimensions: Any) -> Any:
        return onnxruntime.InferenceSession(opened_by.pop(0), providers=[CPU])

    monkeypatch.setattr(trial, "_prepared", None)
    place = trial.Place(None, opener)
    begun = trial.Beginning(None, tuple(feeds), {}, "", convolves=False, needs_cudnn=False, captures=False, left_out=())
    trial.prepare(trial.Work(trial.Wanted(PLAIN), place, begun, None, None))
    return trial.measure({}, 0.0)


def test_a_candidate_with_plains_results_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(PLAIN, monkeypatch)
    assert found.ratio is not None
    assert found.ratio > 0
    assert found.error == 0.0


@pytest.mark.parametrize("nodes", ["y = Neg (x) z = Neg (x)", "y = Abs (x) z = Abs (x)"])
def test_a_candidate_with_other_results_is_rejected(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(model(nodes), monkeypatch)
    assert found.verdict.startswith("rejected: output ")
    assert found.ratio is None


def test_each_batch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first all values are positive, where the two models agree."""
    feeds = [FEED, {"x": np.array([-1, 2], np.float32)}]
    found = measured(model("y = Neg (x) z = Identity (x)"), monkeypatch, feeds)
    assert found.verdict.startswith("rejected: output 'z'")


def test_a_result_that_is_not_written_is_no_result() -> None:
    """Otherwise it would look like the one of the last run."""
    session = onnxruntime.InferenceSession(PLAIN, providers=[CPU])
    expected = session.run(None, FEED)
    runs = [session.run_with_iobinding, lambda binding, options: None]
    made: Any = SimpleNamespace(
        io_binding=session.io_binding,
        get_outputs=session.get_outputs,
        run_with_iobinding=lambda binding, options: runs.pop(0)(binding, options),
    )
    run = trial._single(made, FEED, expected, trial.Place(None))
    assert [output.tolist() for output in run()[1][0]] == [output.tolist() for output in expected]
    assert all(np.isnan(output).all() for output in run()[1][0])
