"""Interrupts: what a handler of a signal raises, at any moment, leaves no lock held and no thread waiting for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.support.cpu_session import PRELUDE, WATCHED, child
from tests.support.interrupt_fuzz import PROGRAM
from tests.support.pool_child import child as pool_child

pytestmark = pytest.mark.lab

MANY, SOME = 10_000, 200
DEADLINE = 7200  # seconds, of many


def check(found: dict[str, Any], count: int) -> None:
    assert found["raised"] >= count
    assert len(found["steps"]) == 11
    assert found["locks"] >= 8
    assert found["held"] == 0
    assert found["odd"] == []
    assert set(found["left"]) == {0}
    assert found["turns"] in (None, 2)
    # One that waits for the lock of a future, which an interrupt of Future.result left held: submit says so.
    assert set(found["alive"]) <= {"ortgpu-future"}
    assert found["sessions"] == 0


def on_the_stub_machine(lab: Lab, provider_library: str, count: int) -> dict[str, Any]:
    machine = lab.machine_that_places(provider_library)
    program = PRELUDE.partition("from tests.support")[0] + WATCHED.format(60) + PROGRAM
    found: dict[str, Any] = machine.run(program, argv=[str(count), "1"], timeout=DEADLINE).ok().json
    return found


def test_some_interrupts() -> None:
    check(child(PROGRAM, str(SOME), "1", deadline=100), SOME)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE)
def test_many_interrupts() -> None:
    check(child(PROGRAM, str(MANY), "2", deadline=DEADLINE), MANY)


def test_some_interrupts_of_sessions_on_a_gpu_that_computes_nothing(lab: Lab, provider_library: str) -> None:
    check(on_the_stub_machine(lab, provider_library, SOME), SOME)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE)
def test_many_interrupts_of_sessions_on_a_gpu_that_computes_nothing(lab: Lab, provider_library: str) -> None:
    check(on_the_stub_machine(lab, provider_library, MANY), MANY)


def test_a_future_whose_lock_an_interrupt_left_held_stops_nobody_else() -> None:
    """``Future.result`` enters its lock in Python. Taken and not given back is what such an interrupt leaves."""
    found = pool_child("""
        made = open_pool(1)
        gate = Gate()
        Watched(made.sessions[0], gate)
        held = [made.submit(None, feed(n)) for n in range(5)]  # the last two wait when they are lost
        gate.wait_for(3)
        for future in held:
            future._condition.acquire()
        gate.opened.set()
        elsewhere = []
        def others():
            elsewhere.append(value_of(made.run(None, feed(7))))
            elsewhere.extend(value_of(each) for each in made.map([feed(n) for n in range(10)]))
            elsewhere.append(value_of(made.submit(None, feed(8)).result()))
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(30)
        report("others", elsewhere)
        report("again", [value_of(future.result(30)) for future in held])
        made.close()
        report("left", pool_threads())
    """)
    assert found["others"] == [7, *range(10), 8]
    assert found["again"] == [0, 1, 2, 3, 4]  # the thread that holds it may ask again
    assert found["left"] == []


def test_a_lock_is_free_in_a_forked_child_whoever_held_it() -> None:
    found = child("""
        from ortgpu.process.background import fork_safe_lock
        lock, taken, over = fork_safe_lock(), threading.Event(), threading.Event()
        def hold():
            with lock:
                taken.set()
                over.wait(30)
        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(30)
        if not (pid := os.fork()):
            with lock, lock:
                os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        over.set()
        thread.join()
        report([status, type(lock).__module__])
    """)
    assert found == [7, "_thread"]


def test_a_forked_child_computes_what_a_thread_of_its_parent_was_computing() -> None:
    found = child("""
        from ortgpu.process.background import cached_property
        class Answers:
            def __init__(self, wait):
                self._wait = wait
            @cached_property
            def answer(self):
                self._wait()
                return 42
        computing, over = threading.Event(), threading.Event()
        def wait():
            computing.set()
            over.wait(30)
        slow = Answers(wait)
        thread = threading.Thread(target=lambda: slow.answer)
        thread.start()
        computing.wait(30)
        if not (pid := os.fork()):
            signal.alarm(20)
            os._exit(Answers(lambda: None).answer)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        over.set()
        thread.join()
        report([status, slow.answer])
    """)
    assert found == [42, 42]
