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
    found = child("""
        def refilled():
            array = np.empty(4, np.float32)
            for number in range(20):
                array[:] = number
                yield {"x": array}
        for way in ("map", "submit"):
            made = open_pool(2)
            Watched(made.sessions[0], lambda: (time.sleep(0.02), raising(*ECC)()))
            if way == "map":
                report(way, [value_of(outputs) for outputs in made.map(refilled())])
            else:
                requests = [made.submit(None, feed) for feed in refilled()]
                report(way, [value_of(request.result()) for request in requests])
            report(way + ", lost", len(made.lost))
            made.close()
    """)
    assert found["map"] == found["submit"] == list(range(20))
    assert found["map, lost"] == found["submit, lost"] == 1


def test_a_request_that_fails_on_two_gpus_takes_out_neither() -> None:
    found = child("""
        with open_pool(3) as made:
            watched = [Watched(session, raising(*CUDNN)) for session in made.sessions]
            report("raised", outcome(lambda: made.run(None, feed(1))))
            report("calls", sum(each.calls for each in watched))
            report("sizes", [len(made.devices), len(made.lost)])
    """)
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [3, 0]


def test_a_request_is_tried_again_once_only() -> None:
    found = child("""
        with open_pool(3) as made:
            watched = [Watched(session, raising(*ECC)) for session in made.sessions]
            report("raised", outcome(lambda: made.run(None, feed(1))))
            report("calls", sum(each.calls for each in watched))
            report("sizes", [len(made.devices), len(made.lost)])
            for each in watched:
                each.first = lambda: None
            report("after", value_of(made.run(None, feed(5))))
    """)
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [1, 2]
    assert found["after"] == 5


def test_without_another_gpu_the_error_is_raised_and_a_doubtful_one_takes_nothing_out() -> None:
    found = child("""
        with open_pool(1) as made:
            watched = Watched(made.sessions[0], raising(*CUDNN))
            report("doubtful", outcome(lambda: made.run(None, feed(1))))
            watched.first = lambda: None
            report("after", value_of(made.run(None, feed(5))))
    """)
    assert found["doubtful"]["type"] == "ProviderFailureError"
    assert found["after"] == 5


def test_failures_that_come_and_go_leave_one_gpu() -> None:
    found = child("""
        with open_pool(3) as made:
            ran = itertools.count()
            def now_and_then():
                if next(ran) % 3 == 2:
                    raise CUDNN[0](CUDNN[1])
            for session in made.sessions:
                Watched(session, now_and_then)
            ended = [outcome(lambda: value_of(made.run(None, feed(n)))) for n in range(30)]
            report("types", sorted({str(each.get("type")) for each in ended}))
            report("sizes", [len(made.devices), len(made.lost)])
    """)
    assert found["types"] == ["None", "ProviderFailureError"]
    assert found["sizes"] == [1, 2]


def test_when_none_is_left_everybody_is_told_the_causes() -> None:
    found = child("""
        made = open_pool()
        gates = [Gate(), Gate()]
        for session, gate, failure in zip(made.sessions, gates, [ECC, UNKNOWN]):
            def first(gate=gate, failure=failure):
                gate()
                raise failure[0](failure[1])
            Watched(session, first)
        running = [made.submit(None, feed(n)) for n in range(6)]
        for gate in gates:
            gate.wait_for(3)
        waiting = [made.submit(None, feed(n)) for n in range(6)]
        blocked = []
        thread = threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1)))))
        thread.start()
        for gate in gates:
            gate.opened.set()
        thread.join()
        report("running", [outcome(future.result)["type"] for future in running])
        report("waiting", [outcome(future.result) for future in waiting])
        report("blocked", blocked)
        report("later", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: list(made.map([feed(1)])))])
        report("sizes", [len(made), len(made.devices), len(made.lost)])
        made.close()
        report("left", pool_threads())
    """)
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
    found = child("""
        made = open_pool(3)
        watched = [Watched(session) for session in made.sessions]
        for each in watched:  # whichever has a free thread takes the request
            each.first = raising(*STICKY)
        report("raised", outcome(made.submit(None, feed(1)).result))
        report("later", outcome(lambda: made.run(None, feed(1))))
        report("sizes", [len(made), len(made.lost)])
        report("session", outcome(lambda: ortgpu.GPUSession(RELU, allow_cpu=False)))
        made.close()
        report("left", pool_threads())
    """)
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
