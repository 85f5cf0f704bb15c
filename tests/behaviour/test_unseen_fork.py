"""A server that forks without telling Python, as uWSGI does: nothing of ours runs in the child until it is used."""

from __future__ import annotations

from tests.support.cpu_session import fresh_child as child


def test_a_run_of_the_parents_session_says_so() -> None:
    found = child("behaviour.unseen_fork.a_run_of_the_parents_session_says_so")
    parent, (first, other, on_cpu, alive) = found
    assert first["type"] == "ForkedSessionError"
    assert f"CUDA was initialised in process {parent}" in first["text"]
    assert "--lazy-apps" in first["text"]
    assert other == "ForkedSessionError"
    assert on_cpu == [0, 0, 0, 0]
    assert alive == [False, False, True]


def test_in_the_process_that_made_it_a_failure_is_what_it_is() -> None:
    found = child("behaviour.unseen_fork.in_the_process_that_made_it_a_failure_is_what_it_is")
    assert found["type"] != "ForkedSessionError"
    assert "fork" not in found["text"]
