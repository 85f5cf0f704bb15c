"""What ``fit`` measures: on the CPU the host's memory, and the judgement of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.session import fitting
from ortgpu.session.fit_child import Measurement, Start
from tests.support.cpu_session import child

MIB = 1 << 20

LARGE = """
from ortgpu import fit
text = 'large (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'
large = model(text)
def sizes(fit):
    return [[[row.batch, row.shapes, row.peak is not None, row.error] for row in each.rows] for each in fit.models]
"""


def test_each_batch_is_run_and_on_the_cpu_it_is_host_memory() -> None:
    device, on_cpu, rows, text, seconds, json_text = child(
        LARGE
        + """
found = fit(large, batches=[1, 4], allow_cpu=True)
seconds = [row.first_run_seconds > 0 and row.run_seconds > 0 for row in found.models[0].rows]
report([found.device, found.on_cpu, sizes(found), str(found).splitlines(), seconds, json.dumps(found.as_dict())])
"""
    )
    assert (device, on_cpu) == ("cpu", True)
    assert rows == [[[1, {"x": [1, 1]}, True, None], [4, {"x": [4, 1]}, True, None]]]
    assert "host memory (no GPU is used)" in text[0]
    assert text[1].startswith("<bytes>: ")
    assert len(text) == 5, text
    assert seconds == [True, True]
    assert '"on_cpu": true' in json_text


def test_feeds_are_run_as_they_are_and_large_ones_take_more() -> None:
    peaks, shapes = child(
        LARGE
        + """
feeds = [{"x": np.zeros((rows, 1 << 18), np.float32)} for rows in (1, 200)]
found = fit(large, feeds=feeds, allow_cpu=True)
report([[row.peak for row in found.models[0].rows], [row.shapes["x"] for row in found.models[0].rows]])
"""
    )
    assert shapes == [[1, 1 << 18], [200, 1 << 18]]
    assert peaks[1] - peaks[0] > 200 * MIB


def test_several_models_are_told_whether_they_fit_together() -> None:
    found = child(
        LARGE
        + """
found = fit([large, NEG], batches=[1], allow_cpu=True)
report([len(found.models), found.fit_together, found.together > 0, str(found).splitlines()[-1]])
"""
    )
    assert found[:3] == [2, True, True]
    assert found[3].startswith("Together, at their smallest inputs: ")


def test_wrong_arguments_raise_before_a_child_starts_and_a_broken_model_raises_its_error() -> None:
    found = child(
        LARGE
        + """
wrong = [lambda: fit(3), lambda: fit([]), lambda: fit(large, batches=[0]), lambda: fit(large, batches=["1"]),
         lambda: fit(large, feeds={"x": 1}), lambda: fit(large, feeds=[]), lambda: fit(large, devise=1),
         lambda: fit("missing.onnx", [1], allow_cpu=True), lambda: fit(b"none", [1], allow_cpu=True),
         lambda: fit(large, feeds=[{"y": np.zeros(1, np.float32)}], allow_cpu=True)]
os.environ.pop("ORTGPU_ALLOW_CPU")
report([*[outcome(each)["type"] for each in wrong], outcome(lambda: fit(large))["type"]])
"""
    )
    assert found[:7] == ["TypeError", "TypeError", "ValueError", "TypeError", "TypeError", "ValueError", "TypeError"]
    assert found[7:10] == ["NoSuchFile", "InvalidProtobuf", "ValueError"]
    assert found[10] in ("DriverNotFoundError", "NoDeviceError")


def measured(peak: int | None, *, error: str | None = None) -> Measurement:
    return Measurement({"x": (1,)}, 10 * MIB, peak, peak, 0.1, 0.2, 0.3, error)


def fit_of(rows: list[tuple[int | None, Any]], free: int | None, total: int | None = 1000 * MIB) -> fitting.ModelFit:
    start = Start("cuda:0", free, total, 100 * MIB)  # type: ignore[arg-type]  # a device that is not looked at
    inputs = [(batch, None) for batch, _ in rows]
    return fitting._model_fit("a.onnx", inputs, [each for _, each in rows], start)


def test_what_fits_is_judged_with_the_context() -> None:
    found = fit_of([(1, measured(100 * MIB)), (8, measured(450 * MIB)), (32, measured(2370 * MIB))], 500 * MIB)
    assert [row.fits_now for row in found.rows] == [True, False, False]
    assert [row.fits_empty for row in found.rows] == [True, True, False]
    assert (found.largest_now, found.largest_empty) == (7, 13), "by the two largest batches"


def test_models_together_take_their_smallest_inputs_and_one_context() -> None:
    first = fit_of([(1, measured(100 * MIB)), (8, measured(450 * MIB))], 500 * MIB)
    second = fit_of([(1, measured(200 * MIB))], 500 * MIB)
    start = Start("cuda:0", 500 * MIB, 1000 * MIB, 100 * MIB)  # type: ignore[arg-type]  # not looked at
    assert fitting._together([first, second], start) == 400 * MIB
    assert fitting._together([first, fit_of([(1, measured(None))], 500 * MIB)], start) is None


def test_an_input_that_is_out_of_memory_is_a_row_and_not_known_is_none() -> None:
    found = fit_of([(1, measured(100 * MIB)), (64, measured(None, error="the GPU ran out of memory"))], None, None)
    assert [(row.fits_now, row.fits_empty) for row in found.rows] == [(None, None), (False, None)]
    assert (found.largest_now, found.largest_empty) == (None, None)
    lines = fitting._lines(found)
    assert lines[2].endswith("unknown")
    assert "the GPU ran out of memory" in lines[3]


@pytest.mark.parametrize("peaks", [(100, 100), (300, 200)])
def test_no_batch_is_estimated_from_memory_that_does_not_grow(peaks: tuple[int, int]) -> None:
    found = fit_of([(1, measured(peaks[0] * MIB)), (8, measured(peaks[1] * MIB))], 500 * MIB)
    assert found.largest_now is None
