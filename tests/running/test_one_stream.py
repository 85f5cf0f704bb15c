"""Sessions with one stream for all runs: each run sets their device, because ONNX Runtime does not."""

from __future__ import annotations

import pytest

from tests.support.cpu_session import child

WAYS = ("run", "run_on_device", "run_with_iobinding", "run_with_ort_values", "map", "run_async", "batched")


@pytest.mark.parametrize(
    "option", ["use_ep_level_unified_stream", "enable_cuda_graph", "user_compute_stream", "gpu_external_alloc"]
)
def test_each_way_to_run_sets_the_device_first(option: str) -> None:
    """Each time the right results come from a thread whose device was set before ONNX Runtime ran."""
    found = child("running.one_stream.each_way_to_run_sets_the_device_first", option)
    assert found == {way: [True, True] for way in WAYS}


@pytest.mark.parametrize("option", ["none", "another GPU is not there"])
def test_other_sessions_are_left_alone(option: str) -> None:
    assert child("running.one_stream.other_sessions_are_left_alone", option) == ["PlainRunner", None, True]


def test_an_error_of_run_async_reaches_the_callback() -> None:
    text, raised = child("running.one_stream.an_error_of_run_async_reaches_the_callback")
    assert "as a run may" in text
    assert raised == "ValueError"


def test_runs_with_the_plans_of_further_shapes_set_the_device() -> None:
    assert child("running.one_stream.runs_with_the_plans_of_further_shapes_set_the_device") == ["set", "run"] * 3


def test_a_handler_amid_a_run_makes_its_run_async_itself() -> None:
    """Its thread would wait for its own turn, and both runs would use one stream."""
    order = child("running.one_stream.a_handler_amid_a_run_makes_its_run_async_itself")
    assert order == ["amid a run", "[-1.0, -1.0]", "after it", "[-1.0, -1.0]", "later"]
