"""Throughput on a GPU: map, pinned memory, CUDA graphs, and arrays that are on the GPU already."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ortgpu.provider.settings import THREADS
from tests.support.this_machine import GPUs

from .children import Report, run_program
from .plugin import built_in_only
from .throughput import REFILLED, REFILLED_SIZES

pytestmark = pytest.mark.ortgpu

# Relative to the largest value. Convolutions and matrix products run in TF32, and concurrent runs may choose other
# algorithms than the one before: that far two runs of plain ONNX Runtime differ.
TOLERANCE = 5e-3

# As in test_lifetime.py: what CUDA itself keeps.
MEMORY_MARGIN = 64 * 2**20

PINNED, ORDINARY, DEVICE = 1, 0, 2


@pytest.fixture(scope="module", params=["mlp", "resnet50"])
def mapped(request: pytest.FixtureRequest) -> Report:
    model: Path = request.getfixturevalue(request.param)
    batches = [1, 8, 3, 64, 8, 1, 32, 2] if request.param == "resnet50" else [1, 4096, 3, 100_000, 7, 20_000] * 5
    return run_program("mapped", {"model": model, "batches": batches}, deadline=150)


@pytest.mark.parametrize("how", ["ordinary", "one in flight", "pinned"])
def test_results_are_those_of_run(mapped: Report, how: str) -> None:
    found = mapped.returned(how)
    assert found["count"] in (8, 30)
    assert found["worst"] <= TOLERANCE


def test_large_arrays_go_through_pinned_memory(mapped: Report) -> None:
    assert mapped.returned("types of what is staged") == [PINNED]
    assert mapped.returned("in use") == 0


def test_a_map_leaves_nothing_behind(mapped: Report) -> None:
    copying = {name for name in mapped.returned("threads after an early end") if name.startswith("ortgpu-copy")}
    assert set(mapped.returned("threads after an early end")) == copying, "the session's own stay until it is closed"
    assert mapped.returned("threads after close") == []
    assert mapped.returned("pinned after close") == 0
    free = mapped["free"]
    assert free["before"] is None or free["after"] is None or free["before"] - free["after"] <= MEMORY_MARGIN


@pytest.fixture(scope="module")
def reused() -> Report:
    return run_program("reused_feeds", deadline=240)


WAYS = ("map", "map, no pinned memory", "map, one in flight", "map, captured", "pool.map", "submit")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFILLED)
def test_an_array_that_is_filled_again_for_each_feed(reused: Report, way: str, kind: str) -> None:
    library = kind.split()[0]
    if library in ("torch", "cupy") and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for size in REFILLED_SIZES:
        name = f"{way}, {kind}, {size}"
        if way in ("pool.map", "submit") and (kind == "cupy" or "GPU" in kind):
            assert reused.error(name).type == "ProviderRequestError"
        else:
            assert reused.returned(name) == []


def test_copies_of_feeds_are_given_back(reused: Report) -> None:
    assert set(reused["in use"]) == {0}
    assert reused["threads"] == []


def test_pinned_arrays_are_pinned_until_they_are_gone() -> None:
    report = run_program("pinned")
    assert report["types"] == {"pinned": PINNED, "ordinary": ORDINARY}
    assert report["result"] == -2
    assert report["after close, in use"] == {"type": PINNED, "value": 2}
    assert report["after close, collected"] == ORDINARY


def test_nothing_of_it_touches_another_gpu(gpus: GPUs) -> None:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs, and the driver shows {len(gpus.visible)}")
    report = run_program("second_device")
    assert report.returned("results") == [-n for n in range(8)]
    assert report["contexts"] == [False, True]
    assert report["type"] == [PINNED]


@pytest.fixture(scope="module", params=["mlp", "resnet50"])
def graphs(request: pytest.FixtureRequest) -> Report:
    model: Path = request.getfixturevalue(request.param)
    return run_program("graphs", {"model": model, "batches": [1, 4, 2, 8]}, deadline=200)


RUNS = [
    "first",
    "replayed",
    "replayed with other values",
    "first again",
    "main thread beside others",
    "mapped",
    "many shapes",
]


@pytest.mark.parametrize("runs", RUNS)
def test_captured_results_are_those_of_a_plain_session(graphs: Report, runs: str) -> None:
    assert graphs.returned(runs) <= TOLERANCE


def test_captured_results_in_threads(graphs: Report) -> None:
    errors = graphs["threads"]
    assert len(errors) == 4
    assert all(isinstance(error, float) and error <= TOLERANCE for error in errors), errors


def test_graphs_are_captured_and_replayed(graphs: Report) -> None:
    assert graphs["device"]["options"]["enable_cuda_graph"] == "1"
    said = graphs.child.stdout + graphs.child.stderr
    assert "Capturing the cuda graph for this model" in said
    assert "Replaying the captured" in said


def test_a_session_with_graphs_leaves_nothing_behind(graphs: Report) -> None:
    assert graphs.returned("threads after close") == []
    assert graphs.error("run after close").type == "ExecutionError"
    free = graphs["free"]
    assert free["before"] is None or free["after"] is None or free["before"] - free["after"] <= MEMORY_MARGIN


def test_copies_and_replays_come_in_their_order() -> None:
    report = run_program("graph_order")
    assert report["type"] == PINNED
    assert report.returned("pinned") == report.returned("ordinary") == []


@pytest.fixture(scope="module")
def graph_buffers() -> Report:
    return run_program("graph_buffers", deadline=150)


RUNS_OF_BUFFERS = [
    "captured",
    "replayed",
    "one feed, written to after each run",
    "main thread beside others",
]


@pytest.mark.parametrize("runs", RUNS_OF_BUFFERS)
def test_small_and_large_arrays_in_one_graph(graph_buffers: Report, runs: str) -> None:
    assert graph_buffers.returned(runs) == []


def test_arrays_of_all_sizes_in_graphs(graph_buffers: Report) -> None:
    assert graph_buffers.returned("wrong sizes") == []
    assert graph_buffers.returned("orders") == [True] * 4
    assert graph_buffers.returned("after an error") == ["InvalidArgument", True]
    assert graph_buffers["threads that ended with it"] is True


def test_small_and_large_arrays_in_threads(graph_buffers: Report) -> None:
    assert graph_buffers["threads"] == [[]] * 4


def test_results_of_a_graph_are_the_callers_own(graph_buffers: Report) -> None:
    assert graph_buffers.returned("type of a result") == [ORDINARY] * 2
    assert graph_buffers.returned("single outputs") == [-4, -3]
    assert graph_buffers.returned("an output computed on the CPU") == [[True, [3]], [True, [4]]] * 3


def test_pinned_memory_of_graphs_is_within_the_limit_and_given_back(graph_buffers: Report) -> None:
    assert graph_buffers.returned("pinned") is True
    assert graph_buffers["pinned after close"] == 0
    assert graph_buffers.returned("without pinned memory") == [True] * 50


def test_memory_and_replays_of_other_threads_spoil_no_capture() -> None:
    report = run_program("captures_beside_others")
    assert report.returned("captured") == [-size for size in range(1, 41)]
    assert report.returned("disturbed") is True


@pytest.fixture(scope="module")
def uncapturable() -> Report:
    return run_program("uncapturable")


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        pytest.param("control flow", "ProviderRequestError", "it has control flow, If", marks=built_in_only),
        ("input on the CPU", "ProviderRequestError", "its input 's' is read on the CPU"),
        ("input of no node", "ProviderRequestError", "its input 'u' is read on the CPU, or by no node"),
        ("output that is an input", "ProviderRequestError", "its output 'x' is its input"),
        ("nodes on the CPU", "PlacementError", "GlobalLpPool 'island'"),
        ("shape that depends on data", "ProviderRequestError", "output shapes depend on data"),
    ],
)
def test_what_cannot_be_captured_is_refused(uncapturable: Report, model: str, error: str, text: str) -> None:
    raised = uncapturable.error(model)
    assert raised.type == error, raised.text
    assert text in raised.text


def test_other_sessions_work_on_after_a_refusal(uncapturable: Report) -> None:
    assert uncapturable.returned("the same without") == 1
    assert uncapturable.returned("memory in another thread") == PINNED
    assert uncapturable.returned("another session") == -1


@pytest.fixture(scope="module")
def arrays() -> Report:
    report = run_program("arrays")
    if reason := report.get("without torch"):
        pytest.skip(f"needs PyTorch for CUDA: {reason}")
    return report


def test_tensors_on_the_gpu_go_in_without_a_copy(arrays: Report) -> None:
    assert arrays["same memory in"] == [True, "cuda", DEVICE]
    assert arrays.returned("run") is True
    assert arrays.returned("map") == [0, -1, -2, -3, -4]


def test_results_stay_on_the_gpu_without_a_copy(arrays: Report) -> None:
    device, same, right, again = arrays.returned("on device")
    assert (device, same, right) == ("cuda:0", True, True)
    assert again == (1 << 20) - 1


def test_what_still_computes_is_waited_for(arrays: Report) -> None:
    assert arrays.returned("producer is waited for") == [True, True]
    assert arrays.returned("producers of a map are waited for") == [0, -1, -2, -3]


def test_other_tensors(arrays: Report) -> None:
    assert arrays.returned("pinned tensor") == -1
    with_gaps = arrays.error("tensor with gaps")
    assert with_gaps.type == "ProviderRequestError"
    assert "pass a contiguous copy: x.contiguous() in PyTorch" in with_gaps.text
    error = arrays.error("wrong device")
    assert error.type == "ProviderRequestError"
    assert "input 'x' is on cuda:99" in error.text
    assert arrays.returned("captured") == [0, -1, -2]


def test_the_heuristic_search_is_chosen_unless_the_caller_chose(conv: Path) -> None:
    report: Any = run_program("chosen_options", {"model": conv})
    assert report["alone"]["options"]["cudnn_conv_algo_search"] == "HEURISTIC"
    assert set(report["alone"]["chosen"]) - {THREADS} == {"cudnn_conv_algo_search"}
    assert report["chosen"]["options"]["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert set(report["chosen"]["chosen"]) <= {THREADS}
