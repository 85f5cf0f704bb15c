"""How a GPUSessionPool ends: closed, dropped, interrupted, forked or left open, it leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.support.pool_child import fresh_child as child

pytestmark = pytest.mark.lab


def test_close_waits_for_what_runs_and_refuses_what_waits() -> None:
    found = child("session.pool_end.close_waits_for_what_runs_and_refuses_what_waits")
    assert [each["type"] for each in found["waiting"]] == ["ExecutionError"] * 3
    assert found["running"] == [0, 1, 2]
    assert [each["type"] for each in found["blocked"]] == ["ExecutionError"] * 2
    assert [each["type"] for each in found["later"]] == ["ExecutionError"] * 3
    assert "this GPUSessionPool is closed" in found["later"][0]["text"]
    assert found["left"] == []


def test_a_callback_that_raises_anything_keeps_no_request_from_its_end() -> None:
    found = child("session.pool_end.a_callback_that_raises_anything_keeps_no_request_from_its_end")
    assert [each["type"] for each in found["waiting"]] == ["ExecutionError"] * 3
    assert found["running"] == [0, 1, 2]
    assert found["left"] == []


def test_a_pool_that_is_dropped_is_closed() -> None:
    found = child("session.pool_end.a_pool_that_is_dropped_is_closed")
    assert found["result"] == 2
    assert found["done"] is True


@pytest.mark.parametrize("failure", ["ECC", "CUDNN", "STICKY"])
def test_a_pool_that_lost_a_gpu_and_is_dropped_is_closed(failure: str) -> None:
    found = child(f"""
        made = open_pool()
        Watched(made.sessions[0], raising(*{failure}))
        report("outcome", outcome(lambda: value_of(made.run(None, feed(2)))))
        report("lost", len(made.lost))
        del made
        while pool_threads():
            gc.collect()
    """)
    assert found["lost"] == (2 if failure == "STICKY" else 1)


def test_an_interrupt_at_any_line_leaves_no_thread_and_no_session() -> None:
    found = child("session.pool_end.an_interrupt_at_any_line_leaves_no_thread_and_no_session")
    assert found["interrupts"] > 100
    assert found["left"] == {}


@pytest.mark.parametrize("busy", [False, True])
def test_a_program_ends_without_closing_it(busy: bool) -> None:
    found = child(f"""
        made = open_pool()
        futures = [made.submit(None, feed(n)) for n in range(6 if {busy} else 0)]
        report("came to the end", True)
    """)
    assert found["came to the end"] is True


def test_a_forked_child_is_refused_and_ends() -> None:
    found = child("session.pool_end.a_forked_child_is_refused_and_ends")
    run, map_, close = found["child"]
    assert (run["type"], map_["type"]) == ("ForkedSessionError", "ForkedSessionError")
    assert run["details"]["creator_pid"] == found["parent"][1]
    assert "spawn" in run["text"]
    assert close == {"returned": None}
    assert found["status"] == 0
    assert found["parent"][0] == 1


def test_it_does_not_pickle() -> None:
    found = child("session.pool_end.it_does_not_pickle")
    assert found["pickle"]["type"] == "TypeError"
    assert "send a GPUSession" in found["pickle"]["text"]


def test_what_atexit_calls_after_the_pool_has_closed_itself() -> None:
    """Registered before the pool was opened, it is called after that, and waited for threads that were gone."""
    found = child("session.pool_end.what_atexit_calls_after_the_pool_has_closed_itself")
    for each in (found["waiting"], *found["later"]):
        assert each["type"] == "ExecutionError"
        assert "this GPUSessionPool is closed" in each["text"]
    assert found["left"] == []
