"""Which sessions refuse after an event that takes the GPU from them, and with which error."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ortgpu.errors import (
    ExecutionError,
    ForkedSessionError,
    GPUError,
    PoisonedContextError,
    ProviderFailureError,
)
from ortgpu.provider import lifetime
from ortgpu.provider.devices import CPU, Device

STICKY = PoisonedContextError("a CUDA error ended this process's use of the GPU", cuda_code=700)


class Session:
    """What the table of living sessions needs of a session."""

    def __init__(self, ordinal: int | None = 0) -> None:
        self.device = CPU if ordinal is None else Device("cuda", ordinal, f"GPU-{ordinal}", None, None, None, None)
        self._sess: Any = object()
        self._gpu_context: Any = None
        self.reopened = 0

    def _gpu_reopen(self) -> None:
        self.reopened += 1


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int | None]]:
    """The numbers of this process's contexts by GPU. The table of sessions is empty, and no GPU is lost."""
    numbers: dict[int, int | None] = {0: 11, 1: 22}
    monkeypatch.setattr(lifetime, "context_id", numbers.get)
    monkeypatch.setattr(lifetime, "initialised_in", os.getpid)
    monkeypatch.setattr(lifetime, "_poison", None)
    monkeypatch.setattr(lifetime, "_forked_from", None)
    before = dict(lifetime.table)
    lifetime.table.clear()
    yield numbers
    lifetime.table.clear()
    lifetime.table.update(before)


def watched(ordinal: int | None = 0, kind: Any = "GPUSession") -> Any:
    session: Any = Session(ordinal)
    lifetime.watch(session, kind)
    return session


def error_of(use: Callable[[], object]) -> type[BaseException] | None:
    try:
        use()
    except Exception as error:  # noqa: BLE001 - its class is the answer
        return type(error)
    return None


def state(session: Any) -> type[BaseException] | None:
    return error_of(lambda: lifetime.refuse_if_unusable(session))


def test_after_a_sticky_error_each_session_on_a_gpu_refuses_and_no_other_opens() -> None:
    here, elsewhere, on_cpu, unguarded = watched(0), watched(1), watched(None), watched(0, "unguarded")
    assert error_of(lifetime.refuse_if_lost) is None
    assert lifetime.noted(STICKY) is STICKY
    assert [state(session) for session in (here, elsewhere)] == [PoisonedContextError] * 2
    assert [type(session._sess) for session in (on_cpu, unguarded)] == [object] * 2
    assert error_of(lifetime.refuse_if_lost) is PoisonedContextError
    assert error_of(lambda: here._sess.run) is PoisonedContextError


@pytest.mark.parametrize("error", [ProviderFailureError("it failed", library="CUDA", status="x"), GPUError("other")])
def test_another_error_ends_nothing(error: GPUError) -> None:
    session = watched()
    assert lifetime.noted(error) is error
    assert state(session) is None
    assert error_of(lifetime.refuse_if_lost) is None


def test_each_use_raises_an_error_of_its_own() -> None:
    """A shared one would collect the frames, and so the arrays, of all callers."""
    session = watched()
    lifetime.refuse(session, STICKY)
    raised = []
    for use in (lambda: session._sess.run, lambda: session._sess[0], lambda: len(session._sess)):
        with pytest.raises(PoisonedContextError) as caught:
            use()
        raised.append(caught.value)
    assert len({*map(id, raised), id(STICKY)}) == 4


@pytest.mark.parametrize(
    ("number", "lost"), [(11, False), (12, True), (0, True), (None, False)], ids=["same", "other", "none", "unknown"]
)
def test_a_reset_is_seen_by_the_number_of_the_context(
    number: int | None, lost: bool, contexts: dict[int, int | None]
) -> None:
    here, beside, elsewhere = watched(0), watched(0), watched(1)
    contexts[0] = number
    assert [lifetime.has_lost_context(session) for session in (here, elsewhere)] == [lost, False]
    expected = ProviderFailureError if lost else None
    assert [state(session) for session in (here, elsewhere)] == [expected, None]
    assert (lifetime.error_of(beside) is not None) is lost, "the others on this GPU refuse, too"


def test_what_a_lost_context_had_is_neither_freed_nor_used(contexts: dict[int, int | None]) -> None:
    session, abandoned = watched(0), []

    class Pinned:
        def abandon(self) -> None:
            abandoned.append(self)

    session._pinned, session._gpu_runner, session._stream = Pinned(), object(), object()
    assert not lifetime.abandon_if_context_is_gone(session)
    assert abandoned == []
    parts = [session._gpu_runner, session._pinned, session._stream]
    contexts[0] = 12
    assert lifetime.abandon_if_context_is_gone(session)
    assert abandoned == [session._pinned]
    assert lifetime._abandoned[-1] == parts
    assert "_gpu_runner" not in vars(session)


def check(answer: int, number: int) -> lifetime.ContextCheck:
    return lifetime.ContextCheck(lambda: answer, ctypes.c_ulonglong(number), 11)


@pytest.mark.parametrize(("answer", "number", "asks"), [(0, 11, False), (0, 12, True), (201, 11, True), (201, 0, True)])
def test_a_run_looks_closer_unless_its_thread_has_the_context_of_the_session(
    answer: int, number: int, asks: bool
) -> None:
    session = watched()
    lifetime.refuse(session, STICKY)
    expected = PoisonedContextError if asks else None
    assert error_of(lambda: lifetime.refuse_after_reset(session, check(answer, number))) is expected
    assert error_of(lambda: lifetime.refuse_after_reset(session, None)) is None


def test_an_outdated_session_opens_again_at_its_next_use_and_a_closed_one_does_not() -> None:
    session = watched()
    session._gpu_context = lifetime.OUTDATED
    lifetime.refuse_after_reset(session, session._gpu_context)
    assert session.reopened == 1
    session._sess = lifetime.UnusableSession(ExecutionError("closed"))
    assert state(session) is ExecutionError
    assert session.reopened == 1


def test_a_closed_session_refuses_without_a_question_to_the_driver(contexts: dict[int, int | None]) -> None:
    session = watched()
    assert error_of(lambda: lifetime.refuse_if_closed(session)) is None
    session._sess = lifetime.UnusableSession(ExecutionError("closed"))
    contexts.clear()
    assert error_of(lambda: lifetime.refuse_if_closed(session)) is ExecutionError


@pytest.mark.parametrize(("code", "works"), [(0, True), (2, True), (700, False), (999, False), (None, False)])
def test_a_gpu_works_if_its_context_does(code: int | None, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for a stream it works as well."""
    asked: list[int] = []

    def context_error(ordinal: int) -> int | None:
        asked.append(ordinal)
        return code

    monkeypatch.setattr(lifetime, "context_error", context_error)
    assert lifetime.gpu_works(1) is works
    assert lifetime.gpu_works(None) is works
    assert asked == [1, 0]


def test_after_a_fork_sessions_on_a_gpu_refuse_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_LIBC", None)  # Its functions are for the end of a child.
    on_gpu, on_cpu = watched(1), watched(None)
    lifetime._after_fork_in_child()
    assert [state(session) for session in (on_gpu, on_cpu)] == [ForkedSessionError, None]
    assert type(lifetime.forked_error(3)) is ForkedSessionError
    assert lifetime.forked_error(100) is None


def test_a_process_forked_from_one_with_cuda_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "initialised_in", lambda: os.getpid() + 1)
    assert error_of(lifetime.refuse_if_lost) is ForkedSessionError
    monkeypatch.setattr(lifetime, "initialised_in", lambda: None)
    assert error_of(lifetime.refuse_if_lost) is None


def test_a_session_leaves_the_table_with_its_end() -> None:
    session = watched()
    assert id(session) in lifetime.table
    key = id(session)
    del session
    assert key not in lifetime.table
