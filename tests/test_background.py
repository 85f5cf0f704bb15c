"""A lock that threads share, or one has alone; what tasks do is tested with what starts them."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

from ortgpu.background import SharedLock
from tests.cpu_session import child

SECONDS = 30  # after which a thread that waits has been forgotten


def test_threads_share_it() -> None:
    lock, together = SharedLock(), threading.Barrier(3)

    def share() -> None:
        with lock:
            together.wait(SECONDS)

    with ThreadPoolExecutor(3) as executor:
        for future in [executor.submit(share) for _ in range(3)]:
            future.result()


def test_alone_waits_for_the_others_and_they_for_it() -> None:
    lock, order = SharedLock(), []
    shared, let_go, is_alone, go_on = (threading.Event() for _ in range(4))

    def share() -> None:
        with lock:
            shared.set()
            let_go.wait(SECONDS)
            order.append("shared")

    def be_alone() -> None:
        shared.wait(SECONDS)
        let_go.set()
        with lock.alone():
            order.append("alone")
            is_alone.set()
            go_on.wait(SECONDS)
            with lock:  # a collected object gives back what it had
                order.append("alone still")

    def share_later() -> None:
        is_alone.wait(SECONDS)
        go_on.set()
        with lock:
            order.append("shared later")

    with ThreadPoolExecutor(3) as executor:
        for future in [executor.submit(each) for each in (share, be_alone, share_later)]:
            future.result(SECONDS)
    assert order == ["shared", "alone", "alone still", "shared later"]


def test_only_one_is_alone() -> None:
    lock, inside, most = SharedLock(), 0, 0

    def work(number: int) -> None:
        nonlocal inside, most
        for step in range(200):
            if (number + step) % 3:
                with lock:
                    assert inside == 0
            else:
                with lock.alone():
                    inside += 1
                    most = max(most, inside)
                    inside -= 1

    with ThreadPoolExecutor(4) as executor:
        for future in [executor.submit(work, number) for number in range(4)]:
            future.result(SECONDS)
    assert most == 1


def test_a_collected_object_may_take_it_wherever_the_thread_is() -> None:
    lock, taken = SharedLock(), 0

    class Given:
        pass

    def give_back() -> None:
        nonlocal taken
        with lock:
            taken += 1

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for step in range(300):
            cycle = Given()
            cycle.itself = cycle  # type: ignore[attr-defined]  # for the collector, not the count of references
            weakref.finalize(cycle, give_back)
            del cycle
            with lock.alone() if step % 2 else lock:
                pass
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert taken == 300
    with lock.alone():  # nobody holds it
        pass


def test_a_forked_child_finds_it_free() -> None:
    found = child("""
        from ortgpu.background import SharedLock
        lock, held, let_go = SharedLock(), threading.Event(), threading.Event()
        def hold():
            with lock.alone():
                held.set()
                let_go.wait(30)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            with lock, lock:
                pass
            with lock.alone():
                pass
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        let_go.set()
        thread.join(30)
        report(status)
    """)
    assert found == 0
