"""Programs that go on in other threads when their main thread has ended, as a server that is started in one does."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.lab.stubs import Stubs
from tests.support.cpu_session import fresh_child as child
from tests.support.graph_sessions import with_graphs

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("opened", ["", "list(session.map(feeds(3)))"])
def test_a_map(opened: str) -> None:
    found = child(
        f"""
        session = GPUSession(NEG)
        {opened}
        after_the_main_thread(lambda: [[int(result[0][0]) for result in session.map(feeds(20))], threads()])
    """,
        behind="behaviour.after_the_main_thread",
    )
    assert found == {"returned": [[-n for n in range(20)], []]}


def test_a_map_that_is_under_way() -> None:
    found = child(
        """
        results = GPUSession(NEG).map(feeds(20))
        next(results)
        after_the_main_thread(lambda: [int(result[0][0]) for result in results])
    """,
        behind="behaviour.after_the_main_thread",
    )
    assert found == {"returned": [-n for n in range(1, 20)]}


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3), reason="this Python starts no threads then (CPython pull request 117029)"
)
def test_a_pool() -> None:
    found = child(
        """
        def use():
            with ortgpu.GPUSessionPool(NEG) as pool:
                return [int(result[0][0]) for result in pool.map(feeds(20))]
        after_the_main_thread(lambda: [use(), threads()])
    """,
        behind="behaviour.after_the_main_thread",
    )
    assert found == {"returned": [[-n for n in range(20)], []]}


def test_a_run_that_is_staged(staged_child: Any) -> None:
    found = staged_child(
        """
session = staged(NEG)
after_the_main_thread(lambda: [session.run(None, big(3))[0][[0, -1]].tolist(), ran])
""",
        behind="behaviour.after_the_main_thread",
    )
    assert found == {"returned": [[-3, -3], [True]]}


def test_a_graph(stubs: Stubs) -> None:
    found = with_graphs(
        stubs,
        """
session = capturing(NEG)
after_the_main_thread(lambda: [int(session.run(None, feeds(n + 1)[n])[0][0]) for n in range(3)])
""",
        behind="behaviour.after_the_main_thread",
    )
    assert found == {"returned": [0, -1, -2]}


def test_the_end_of_the_program_waits_for_what_is_computed() -> None:
    found = child("behaviour.threads_at_the_end.the_end_of_the_program_waits_for_what_is_computed")
    assert found == [1, 1, 1]


def test_a_map_where_the_system_gives_no_thread() -> None:
    found = child("behaviour.threads_at_the_end.a_map_where_the_system_gives_no_thread")
    assert found == [[0, -1, -2], "ValueError", []]
