"""What a session holds, what it gives back, and in which order.

The arena is ONNX Runtime's own: on the CPU, and over libraries of CUDA that count memory and compute nothing.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from ortgpu.errors import ExecutionError
from ortgpu.running import memory as module
from ortgpu.running.memory import Holdings, SessionMemory
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.cpu_session import child
from tests.support.made_sessions import H200, L4, made_session

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python

pytestmark = pytest.mark.skipif(older_than(TELLS) is not None, reason=str(older_than(TELLS)))


@pytest.fixture(scope="module")
def counted(module_lab: Lab, provider_library: str) -> Any:
    """What became of the memory of a device that counts it."""
    machine = module_lab.machine_that_places(provider_library)
    return machine.run_program("running.counted_memory.counted").ok().json


@pytest.mark.parametrize("limit", ["unlimited", "limited"])
def test_the_arena_is_measured_to_the_byte(counted: Any, limit: str) -> None:
    assert all(held == arena for held, arena in counted[limit].values()), counted[limit]


@pytest.mark.parametrize("limit", ["unlimited", "limited"])
def test_trimming_leaves_what_there_was_after_the_first_small_run(counted: Any, limit: str) -> None:
    steps = {name: held for name, (held, _) in counted[limit].items()}
    assert steps["big"] > steps["small"] + 64 * MIB
    assert steps["trimmed"] <= 1.1 * steps["small"]
    assert steps["again"] == steps["small"]
    assert steps["trimmed with a value"] >= 64 * MIB, "which the caller keeps"
    assert steps["trimmed without"] <= 1.1 * steps["small"]
    assert steps["closed"] == 0


def test_a_session_on_the_cpu_measures_its_arena_in_host_memory() -> None:
    sizes = child("running.grown_memory.a_session_on_the_cpu_measures_its_arena_in_host_memory")
    (first, grown, trimmed, again), *others = sizes
    assert grown > first + 64 * MIB
    assert trimmed <= first
    assert again == first
    assert others == [0, None, None]


def test_a_run_beside_a_trim_gives_the_right_result() -> None:
    wrong = child("running.grown_memory.a_run_beside_a_trim_gives_the_right_result")
    assert wrong == []


def test_weights_are_those_of_the_file_until_it_changes() -> None:
    found = child("running.memory.weights_are_those_of_the_file_until_it_changes")
    assert found == [4000, 4000, None, 7200, 7200]


def test_a_closed_session_has_no_memory_to_tell_of() -> None:
    found = child("running.memory.a_closed_session_has_no_memory_to_tell_of")
    assert [each["type"] for each in found] == ["ExecutionError", "ExecutionError"]


def test_a_subclass_may_have_a_memory_of_its_own() -> None:
    found = child("running.memory.a_subclass_may_have_a_memory_of_its_own")
    assert found == "of names"


class Kept:
    """A holder that notes when it is asked to give back."""

    def __init__(self, name: str, size: int | None, log: list[str]) -> None:
        self.name, self.size, self.log = name, size, log

    def bytes_held(self) -> int | None:
        return self.size

    def give_back(self) -> None:
        self.log.append(self.name)
        self.size = 0


def test_the_holder_is_counted_by_its_part_and_gives_back() -> None:
    log: list[str] = []
    holdings, plans = Holdings(), Kept("plans", 3, log)
    assert (holdings.bytes_of("plans"), holdings.bytes_of("graphs")) == (0, 0)
    holdings.give_back()
    holdings.add("plans", plans)
    assert (holdings.bytes_of("plans"), holdings.bytes_of("graphs")) == (3, 0)
    plans.size = None
    assert holdings.bytes_of("plans") is None
    holdings.give_back()
    assert log == ["plans"]
    assert holdings.bytes_of("plans") == 0


def test_it_is_printed_as_a_line_for_each_part() -> None:
    lines = str(SessionMemory(None, 3 * MIB, 4 * MIB + MIB // 2, None, 0, 0, 1 << 30, None)).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "weights", "arena, with the weights", "arena, in use", "plans for further shapes", "captured CUDA graphs",
        "pinned host memory", "this process on the GPU",
    ]  # fmt: skip
    assert lines[1].split()[-2:] == ["4.5", "MiB"]
    assert lines[2].split()[-1] == "unknown"
    assert str(SessionMemory(MIB, 0, 0, 0, 0, 0, 0, 0)).startswith("budget")


memory: Any = module


class Closing:
    """A holder of memory that notes when it gives memory back."""

    def __init__(self, log: list[str], name: str, size: int | None) -> None:
        self.log, self.name, self.size = log, name, size

    def bytes_held(self) -> int | None:
        return self.size

    def give_back(self) -> None:
        self.log.append(self.name)


def test_trimming_gives_back_plans_the_arena_and_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    session = made_session()
    session.pinned_empty(4)
    monkeypatch.setattr(memory.arena, "shrink", lambda session: log.append("arena"))
    monkeypatch.setattr(session._pinned, "give_back", lambda: log.append("pinned"))
    memory.holdings_of(session).add("plans", Closing(log, "plans", 3))
    session.trim()
    assert log == ["plans", "arena", "pinned"]
    session.close()
    for use in (session.trim, lambda: session.memory):
        with pytest.raises(ExecutionError, match="closed"):
            use()


@pytest.mark.parametrize(("part", "plans", "graphs"), [("plans", 19, 0), ("graphs", 0, 23)])
def test_each_figure_is_the_sessions_own(
    part: memory.Part, plans: int, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes use the same GPU, further processes use the other GPU, and each part has another size."""
    used = {H200.uuid: {os.getpid(): 11}, L4.uuid: {1: 5, os.getpid(): 7, os.getpid() + 1: 3}}
    monkeypatch.setattr(memory, "processes_on", lambda uuid: used[uuid])
    monkeypatch.setattr(memory.arena, "reserved_bytes", lambda session: 13)
    session = made_session(device=L4, budget=17)
    memory.holdings_of(session).add(part, Closing([], part, plans or graphs))
    assert session.memory == SessionMemory(
        budget=17, weights=0, arena=13, arena_in_use=None, plans=plans, graphs=graphs, pinned=0, process=7
    )


def test_an_arena_shrinks_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To shrink it is a run, which must not share the handles of another one."""
    owners: list[int] = []
    session = made_session(device=L4, budget=4 << 30)
    turns = memory.holdings_of(session).turns
    monkeypatch.setattr(memory.arena, "shrink", lambda session: owners.append(turns.owner))
    session.trim()
    assert owners == [threading.get_ident()]
    assert turns.owner == 0
