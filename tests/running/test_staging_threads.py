"""Runs that are staged: threads, streams, and what fails meanwhile. See staged_sessions.py."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.lab


def test_threads_over_one_session(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.threads_over_one_session")
    assert found == [[], True, True, True, 0, 0, 0, 0]


def test_sessions_share_the_threads_that_copy(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.sessions_share_the_threads_that_copy")
    assert found == [[0, -1, -2, -3, -4], 1, [1, -7], 0, 0, 0]


CALLS = ["cudaGetDevice", "cudaHostAlloc", "cudaPointerGetAttributes", "cudaStreamCreateWithFlags", "cudaMemcpyAsync",
         "cudaStreamSynchronize"]  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
def test_whatever_call_fails_the_run_is_done_and_nothing_is_lost(staged_child: Any, function: str) -> None:
    found = staged_child(f"""
        right, leaks = [], []
        for late in (1, 2, 3, 7, 40):
            session = staged(NEG, piece=50_000)
            for before in range(late % 3):
                session.run(None, big(5))
            stub.stub_fail(0)
            os.environ["STUB_CUDART_FAIL"] = f"{function}=999@{{late}}"
            right += [bool((session.run(None, big(number))[0] == -number).all()) for number in range(4)]
            del os.environ["STUB_CUDART_FAIL"]
            right.append(bool((session.run(None, big(9))[0] == -9).all()) and ran[-1])
            leaks.append(session._pinned.bytes_in_use)
            session.close()
        left = stub.stub_pinned_bytes(), stub.stub_streams() + stub.stub_events()
        report([all(right), leaks, stub.stub_last_error(), *left])
    """)
    assert found == [True, [0] * 5, 0, 0, 0]


@pytest.mark.parametrize("function", ["cudaStreamCreateWithFlags", "cudaGetDevice"])
def test_a_device_that_gives_no_streams_leaves_it_to_run(staged_child: Any, function: str) -> None:
    found = staged_child(f"""
        from ortgpu.running import staging
        session = staged(NEG)
        session._gpu_runner._runs = None
        staging.runtime_of = lambda device: runtime
        os.environ["STUB_CUDART_FAIL"] = "{function}=2"
        failed = session.run(None, big(3))[0][0].item()
        del os.environ["STUB_CUDART_FAIL"]
        report([failed, session.run(None, big(4))[0][0].item(), ran])
        session.close()
    """)
    assert found == [-3, -4, [False, True]]


def test_a_run_under_way_when_the_session_is_closed_ends(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.a_run_under_way_when_the_session_is_closed_ends")
    assert found == [[-3], 0, 0, 0]


def test_a_process_that_lost_the_gpu_refuses(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.a_process_that_lost_the_gpu_refuses")
    assert found == ["PoisonedContextError", -3]


def test_a_sticky_error_of_a_copy_is_told_by_run_itself(staged_child: Any) -> None:
    """A CUDA that is lost fails the copy and then ONNX Runtime, whose words are explained."""
    found = staged_child("running.staging_threads.a_sticky_error_of_a_copy_is_told_by_run_itself")
    assert found == ["PoisonedContextError"] * 2


def test_what_another_session_captures_is_not_spoilt(staged_child: Any) -> None:
    """Memory is taken and given back meanwhile, by ONNX Runtime too. The caller's thread is afterwards as it was."""
    found = staged_child("running.staging_threads.what_another_session_captures_is_not_spoilt")
    assert found == [[0, -1, -2, -3], [True] * 4, True, 0, [2] * 4, 0, 0]


def test_two_runs_compute_at_a_time_while_others_copy(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.two_runs_compute_at_a_time_while_others_copy")
    assert found == [[-n for n in range(12)], [1, 2], True]


def test_a_run_that_fails_gives_up_its_turn(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.a_run_that_fails_gives_up_its_turn")
    assert found == [[{"returned": -3}] * 5, -4, [False] * 5 + [True]]


def test_nobody_waits_for_the_copies_of_another_run(staged_child: Any) -> None:
    """What is under way at the same time is in streams of its own, which the next runs use again."""
    found = staged_child("running.staging_threads.nobody_waits_for_the_copies_of_another_run")
    assert found == [[True] * 5, 4, 4, 4]


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        pytest.param(8_000, [8_000], id="less than a quarter"),
        pytest.param(12_000, [10_000, 2_000], id="a quarter at least"),
        pytest.param(60_000, [15_000] * 4, id="four"),
        pytest.param(180_000, [40_000] * 4 + [20_000], id="more than four"),
    ],
)
def test_the_gpu_copies_a_piece_while_the_next_one_is_made(staged_child: Any, size: int, sizes: list[int]) -> None:
    found = staged_child(f"""
        session, copied = staged(NEG, piece=40_000), []
        plain_copy = runtime.copy_pinned
        def copy(to, source, size, stream):
            copied.append(size)
            plain_copy(to, source, size, stream)
        runtime.copy_pinned = copy
        session.run(None, big(1, {size} // 4))
        report([copied[:len(copied) // 2], copied[len(copied) // 2:]])
    """)
    assert found == [sizes, sizes]


def test_an_array_with_gaps_is_one_piece(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.an_array_with_gaps_is_one_piece")
    assert found == [True, [True]]


def test_where_the_system_gives_no_threads_one_copies(staged_child: Any) -> None:
    """A limit of the user: of threads and processes, which the system does not apply to root. Of memory, it does."""
    found = staged_child("running.staging_threads.where_the_system_gives_no_threads_one_copies")
    assert found == [[[-3, -3], [-4, -4]], [True, True], 0]


def test_no_other_device_gets_a_context(staged_child: Any) -> None:
    """Of threads that have just begun the first device is the current one, whoever they work for."""
    found = staged_child("running.staging_threads.no_other_device_gets_a_context")
    assert found == [[0, -1, -2, -3, -4], [True] * 5, 1 << 1]


def test_sessions_on_several_devices_have_threads_of_their_own(staged_child: Any) -> None:
    found = staged_child("running.staging_threads.sessions_on_several_devices_have_threads_of_their_own")
    assert found == [[], [True] * 6, 2]
