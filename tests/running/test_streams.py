"""Runs come after the GPU work that their caller has queued, and results before the work that it queues next.

The memory of the GPU is the host's here, and a copy in a stream is made as late as CUDA may make it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.running import streams
from ortgpu.running.streams import CallerStreams
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child


def ran(stubs: Stubs, program: str, *arguments: str) -> Any:
    return child(program, str(stubs.cudart), *arguments, behind="running.streams")


@pytest.mark.parametrize(
    ("asked", "number", "busy", "is_idle"),
    [(0, 7, False, True), (1, 7, False, False), (0, 8, False, False), (0, 7, True, False)],
    ids=["idle", "no answer", "another context", "busy"],
)
def test_streams_are_idle_in_the_context_of_the_session_alone(
    asked: int, number: int, busy: bool, is_idle: bool
) -> None:
    """In another context the question is about streams that a run does not wait for."""
    runtime: Any = SimpleNamespace(ordinal=0, stream_question=lambda: lambda stream: busy)
    context: Any = (lambda: asked, SimpleNamespace(value=number), 7)
    assert CallerStreams(runtime, None, (), context).is_idle() is is_idle
    assert CallerStreams(runtime, 5, (), context).is_idle() is False, "a stream of the caller's own"


class OfTwoGPUs:
    """The CUDA runtime for the second of two GPUs. It notes what waits for what."""

    ordinal = 1

    def __init__(self) -> None:
        self.busy: list[int] = []
        self.ordered: list[tuple[int, int | None]] = []
        self.capturing = False

    def stream_question(self) -> Any:
        return lambda stream: stream.value in self.busy

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def order(self, before: int, after: int | None) -> None:
        self.ordered.append((before, after))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and CuPy, each with another current stream on each GPU: 10 and 11, 20 and 21."""
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: True, current_stream=lambda ordinal: SimpleNamespace(cuda_stream=10 + ordinal)
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 10 + ordinal),
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=20 + ordinal)))
    monkeypatch.setattr(streams, "_raw_stream_of_torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.usefixtures("libraries")
def test_streams_on_the_gpu_of_the_session_are_waited_for_and_wait() -> None:
    """The current stream on the first GPU says nothing about a session on the second."""
    runtime: Any = OfTwoGPUs()
    order = CallerStreams(runtime, 5, ())
    order.wait()
    assert runtime.ordered == [(1, 5), (11, 5), (21, 5)]
    runtime.ordered.clear()
    order.order_results()
    assert runtime.ordered == [(5, 1), (5, 11), (5, 21)]


def test_nothing_is_added_to_a_capture_of_the_sessions_stream() -> None:
    runtime: Any = OfTwoGPUs()
    runtime.capturing = True
    order = CallerStreams(runtime, 5, ())
    order.wait()
    order.order_results()
    assert runtime.ordered == []


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("busy", "is_idle"), [(1, False), (10, True), (11, False), (20, True), (21, False)])
def test_work_in_a_stream_of_either_library_is_seen(busy: int, is_idle: bool) -> None:
    runtime: Any = OfTwoGPUs()
    runtime.busy = [busy]
    context: Any = (lambda: 0, SimpleNamespace(value=7), 7)
    order = CallerStreams(runtime, None, (), context)
    assert order.is_idle() is is_idle
    assert order.is_idle() is is_idle, "now that PyTorch's quicker question is known"


CONTEXTS = {"unknown": 0, "of the session": 7, "of another GPU": 8}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("way", ["bound", "by_values", "by_vector"])
def test_a_run_reads_what_its_caller_has_queued(stubs: Stubs, way: str, context: str) -> None:
    found = ran(
        stubs,
        "running.streams.a_run_reads_what_its_caller_has_queued",
        way,
        str(CONTEXTS[context]),
    )
    assert found == [[0] + [-5] * 4, 0, 0, 0]


def test_another_stream_is_not_waited_for(stubs: Stubs) -> None:
    """It is the caller's to order, as it is between the streams of PyTorch."""
    found = ran(
        stubs,
        "running.streams.another_stream_is_not_waited_for",
    )
    assert found == [0, 1]


def test_memory_of_an_output_is_read_before_it_is_written_again(stubs: Stubs) -> None:
    found = ran(
        stubs,
        "running.streams.memory_of_an_output_is_read_before_it_is_written_again",
    )
    assert found == [-5, 7]


def test_the_callers_device_stays_the_current_one(stubs: Stubs) -> None:
    found = ran(
        stubs,
        "running.streams.the_callers_device_stays_the_current_one",
    )
    assert found == [-5, 1, 0]


def test_a_session_in_a_stream_of_the_callers_waits_on_the_gpu(stubs: Stubs) -> None:
    """The calling thread does not wait: the copy is still to be made when the call returns."""
    found = ran(
        stubs,
        "running.streams.a_session_in_a_stream_of_the_callers_waits_on_the_gpu",
    )
    assert found == [[0, True], 0, 5, 5]


def test_nothing_is_added_to_a_stream_that_the_caller_captures(stubs: Stubs) -> None:
    found = ran(
        stubs,
        "running.streams.nothing_is_added_to_a_stream_that_the_caller_captures",
    )
    assert found == [True, None]


@pytest.mark.parametrize("call", ["bound()", "by_values()", "by_vector()"])
def test_queued_work_that_failed_is_told_as_a_run_tells_it(stubs: Stubs, call: str) -> None:
    found = ran(
        stubs,
        f"""
        os.environ["STUB_CUDART_FAIL"] = "cudaStreamQuery=700"
        report(outcome(lambda: {call}))
        """,
    )
    assert found["type"] == "PoisonedContextError"


def test_pytorch_that_has_not_used_cuda_is_not_asked(stubs: Stubs) -> None:
    found = ran(
        stubs,
        "running.streams.pytorch_that_has_not_used_cuda_is_not_asked",
    )
    assert found == [-5] * 4
