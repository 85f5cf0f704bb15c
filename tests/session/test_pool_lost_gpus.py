"""GPUs that a GPUSessionPool loses: their work is done by another, as long as there is one."""

from __future__ import annotations

import pytest

from tests.lab.fixtures import Lab
from tests.support.pool_child import child

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("failure", ["ECC", "UNKNOWN", "CUDNN"])
def test_a_lost_gpu_is_taken_out_and_its_work_done_by_another(failure: str) -> None:
    found = child(f"""
        class Kept(logging.Handler):
            def emit(self, record): kept.append([record.levelname, record.getMessage()])
        kept = []
        logging.getLogger("ortgpu.pool").addHandler(Kept())
        made = open_pool(3, sessions_per_device=2)
        lost = [session for worker, session in zip(made._service.serving, made.sessions) if worker.place == 0]
        for session in lost:
            Watched(session, raising(*{failure}))
        report("values", [value_of(outputs) for outputs in made.map(feed(n) for n in range(50))])
        report("sizes", [len(made), len(made.devices), len(made.lost)])
        report("why", [str(made.lost[0].device), type(made.lost[0].error).__name__, made.lost[0].error.summary,
                       made.lost[0].error.__traceback__ is None])
        report("log", kept)
        report("session", [outcome(lambda: session.run(None, feed(1)))["type"] for session in lost])
        made.close()
        report("left", pool_threads())
    """)
    assert found["values"] == list(range(50))
    assert found["sizes"] == [4, 2, 1]
    assert found["why"][:2] == ["cuda:0", "ProviderFailureError"]
    assert found["why"][3] is True
    assert len(found["log"]) == 1
    level, text = found["log"][0]
    assert level == "WARNING"
    assert text == f"cuda:0 is out of the pool [provider-failure]: {found['why'][2]}"
    assert found["session"] == ["ProviderFailureError"] * 2
    assert found["left"] == []


def test_another_gpu_reads_what_the_feed_was() -> None:
    """The caller has written to its array again by then."""
    found = child("session.pool_lost_gpus.another_gpu_reads_what_the_feed_was")
    assert found["map"] == found["submit"] == list(range(20))
    assert found["map, lost"] == found["submit, lost"] == 1


def test_a_request_that_fails_on_two_gpus_takes_out_neither() -> None:
    found = child("session.pool_lost_gpus.a_request_that_fails_on_two_gpus_takes_out_neither")
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [3, 0]


def test_a_request_is_tried_again_once_only() -> None:
    found = child("session.pool_lost_gpus.a_request_is_tried_again_once_only")
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [1, 2]
    assert found["after"] == 5


def test_without_another_gpu_the_error_is_raised_and_a_doubtful_one_takes_nothing_out() -> None:
    found = child("session.pool_lost_gpus.without_another_gpu_the_error_is_raised_and_a_doubtful_one_takes_nothing_out")
    assert found["doubtful"]["type"] == "ProviderFailureError"
    assert found["after"] == 5


def test_failures_that_come_and_go_leave_one_gpu() -> None:
    found = child("session.pool_lost_gpus.failures_that_come_and_go_leave_one_gpu")
    assert found["types"] == ["None", "ProviderFailureError"]
    assert found["sizes"] == [1, 2]


def test_when_none_is_left_everybody_is_told_the_causes() -> None:
    found = child("session.pool_lost_gpus.when_none_is_left_everybody_is_told_the_causes")
    assert set(found["running"]) == {"ProviderFailureError"}
    for told in (*found["waiting"], *found["blocked"], *found["later"]):
        assert told["type"] in ("ExecutionError", "ProviderFailureError"), told  # some waiting ones were begun
    assert {each["type"] for each in found["later"]} == {"ExecutionError"}
    assert found["later"][0]["others"] == ["ProviderFailureError"] * 2
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in found["later"][0]["text"]
    assert "CUDA_ERROR_UNKNOWN" in found["later"][0]["text"]
    assert found["sizes"] == [0, 0, 2]
    assert found["left"] == []


def test_a_sticky_error_ends_the_pool_as_it_ends_the_process() -> None:
    found = child("session.pool_lost_gpus.a_sticky_error_ends_the_pool_as_it_ends_the_process")
    assert found["raised"]["type"] == "PoisonedContextError"
    assert found["later"]["type"] == "PoisonedContextError"
    assert found["later"]["details"]["cuda_code"] == 700
    assert "restart this process" in found["later"]["text"]
    assert found["sizes"] == [0, 3]
    assert found["session"]["type"] == "PoisonedContextError"
    assert found["left"] == []


WORDS_OF_A_LOSS = """
import os
import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as native
import ortgpu
from ortgpu.diagnosis.probe.probing import RELU

class Failing:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def run(self, *_): raise native.Fail("CUDA failure 999: unknown error")

found = []
with ortgpu.GPUSessionPool(RELU, pinned_memory_limit=0) as pool:
    (session,) = pool.sessions
    del vars(session)["_gpu_runner"]
    session._sess = Failing(session._sess)
    for code in ("0", "999"):
        os.environ["STUB_CUDA_STICKY"] = code
        try:
            pool.run(None, {"x": np.ones(4, np.float32)})
        except ortgpu.GPUError as error:
            found.append([type(error).__name__, len(pool)])
report(found)
"""


def test_words_alone_do_not_take_a_gpu_out_that_the_driver_says_is_well(lab: Lab, provider_library: str) -> None:
    found = lab.machine_that_places(provider_library).run(WORDS_OF_A_LOSS).ok().json
    assert found == [["ProviderFailureError", 1], ["ProviderFailureError", 0]]
