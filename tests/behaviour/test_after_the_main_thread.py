"""Programs that go on in other threads when their main thread has ended, as a server that is started in one does."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.cpu_session import child
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab

# What the thread reports is the last thing that is printed.
AFTER = """
def after_the_main_thread(function):
    def work():
        threading.main_thread().join()
        report(outcome(function))
    threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("opened", ["", "list(session.map(feeds(3)))"])
def test_a_map(opened: str) -> None:
    found = child(f"""
        {AFTER.replace(chr(10), chr(10) + " " * 8)}
        session = GPUSession(NEG)
        {opened}
        after_the_main_thread(lambda: [[int(result[0][0]) for result in session.map(feeds(20))], threads()])
    """)
    assert found == {"returned": [[-n for n in range(20)], []]}


def test_a_map_that_is_under_way() -> None:
    found = child(f"""
        {AFTER.replace(chr(10), chr(10) + " " * 8)}
        results = GPUSession(NEG).map(feeds(20))
        next(results)
        after_the_main_thread(lambda: [int(result[0][0]) for result in results])
    """)
    assert found == {"returned": [-n for n in range(1, 20)]}


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="this Python starts no threads then (CPython pull request 117029)"
)
def test_a_pool() -> None:
    found = child(f"""
        {AFTER.replace(chr(10), chr(10) + " " * 8)}
        def use():
            with ortgpu.GPUSessionPool(NEG) as pool:
                return [int(result[0][0]) for result in pool.map(feeds(20))]
        after_the_main_thread(lambda: [use(), threads()])
    """)
    assert found == {"returned": [[-n for n in range(20)], []]}


def test_a_run_that_is_staged(staged_child: Any) -> None:
    found = staged_child(
        AFTER
        + """
session = staged(NEG)
after_the_main_thread(lambda: [session.run(None, big(3))[0][[0, -1]].tolist(), ran])
"""
    )
    assert found == {"returned": [[-3, -3], [True]]}


def test_a_graph(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        AFTER
        + """
session = capturing(NEG)
after_the_main_thread(lambda: [int(session.run(None, feeds(n + 1)[n])[0][0]) for n in range(3)])
""",
    )
    assert found == {"returned": [0, -1, -2]}


def test_the_end_of_the_program_waits_for_what_is_computed() -> None:
    found = child("""
        from ortgpu.process.threads import Executor, Outcome
        done, begun = [], threading.Event()
        def work():
            begun.set()
            threading.Event().wait(0.2)
            done.append(1)
            report(done)
        executor = Executor(1, "ortgpu-test")
        for _ in range(3): executor.submit(Outcome(), work)
        begun.wait()
    """)
    assert found == [1, 1, 1]


def test_a_map_where_the_system_gives_no_thread() -> None:
    found = child("""
        def refuse(*_, **__):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        session = GPUSession(NEG)
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                setattr(threading, name, refuse)
        results = session.map([*feeds(3), {"wrong": 1}])
        report([[int(next(results)[0][0]) for _ in range(3)], outcome(lambda: next(results))["type"], threads()])
    """)
    assert found == [[0, -1, -2], "ValueError", []]
