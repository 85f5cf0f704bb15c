"""Several ranks, each on a GPU of its own, under the real launchers: preflights through NCCL, and sessions by rank.

Needs two GPUs, a launcher (torch, or Open MPI's orterun), and nccl4py with NCCL's library. The same faults as in
tests/distributed/test_preflight.py, where NCCL is a stub: what is shown here is that NCCL can be stopped in the middle.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Problem, launchers
from tests.lab.launchers import AS_ROOT, MARK, RANK_PROGRAM, RankOutcome, outcomes_of, processes_with, starts_of
from tests.support.children import Child, child_environment, run_child
from tests.support.this_machine import GPUs

from .libraries import with_little_shared_memory

pytestmark = pytest.mark.ortgpu(count=2)

TIMEOUT = 30.0  # seconds of a preflight: the first operation of NCCL alone has taken five
CALLS = [
    ["all_reduce", "float32", 1 << 20, 1],
    ["all_gather", "bfloat16", 1023, 1],
    ["reduce_scatter", "float16", 65_537, 1],
]
COMMUNICATOR = "setting up the communicator"
FIRST = "all_reduce of 1048576 float32"
LAUNCHERS = pytest.mark.parametrize("launcher", ["torchrun", "openmpi"])


class Ranks:
    """Ranks that a launcher started: what each returned or raised, and what is left of them."""

    def __init__(self, child: Child, outcomes: Mapping[int, RankOutcome], left: tuple[str, ...]) -> None:
        self.child = child
        self.outcomes = outcomes
        self.left = left

    def returned(self, rank: int) -> Any:
        outcome = self._outcome(rank)
        assert outcome.error is None, outcome.error.text
        return outcome.returned

    def error(self, rank: int) -> Problem:
        outcome = self._outcome(rank)
        assert outcome.error is not None, f"rank {rank} returned {outcome.returned}"
        return outcome.error

    def _outcome(self, rank: int) -> RankOutcome:
        assert rank in self.outcomes, self.child.output
        return self.outcomes[rank]

    def assert_all_raise(
        self, there: Iterable[int], error_type: str, *, named: list[int], phase: str | None = None
    ) -> None:
        """The ranks that are still there all raise the same before their deadline, and nothing is left."""
        assert set(self.outcomes) == set(there), self.child.output
        for rank, outcome in self.outcomes.items():
            error = self.error(rank)
            assert error.type == error_type, error.text
            assert list(error.details["ranks"]) == named, error.text
            assert phase is None or error.details["phase"] == phase, error.text
            assert outcome.seconds < TIMEOUT + 2, "after its deadline"
        assert self.left == ()


Start = Callable[..., Ranks]


@pytest.fixture
def start(gpus: GPUs, tmp_path: Path) -> Start:
    """Run an action of rank_program.py in ranks, two unless told otherwise."""

    def run(
        launcher: str,
        action: str,
        arguments: Mapping[str, Any],
        env: Mapping[str, str | None] | None = None,
        count: int = 2,
        before: Sequence[str] = (),
    ) -> Ranks:
        if len(gpus.visible) < count:
            pytest.skip(f"needs {count} GPUs, and CUDA shows {len(gpus.visible)}")
        launchers.need(launcher)
        mark = f"{launcher}-{time.monotonic_ns()}"
        folder = tmp_path / mark / "ranks"
        folder.mkdir(parents=True)
        task = json.dumps({"action": action, "arguments": dict(arguments)}, default=str)
        [(command, _)] = starts_of(launcher, count, [sys.executable, str(RANK_PROGRAM), task])
        # NVLink SHARP, which two GPUs do not need, and whose multicast memory a virtual machine may not have
        variables = {**AS_ROOT, "NCCL_NVLS_ENABLE": "0", MARK: mark, "RANK_REPORTS": str(folder), **(env or {})}
        child = run_child([*before, *command], env=child_environment(variables), deadline=TIMEOUT + 60)
        reports = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json"))
        return Ranks(child, outcomes_of(reports), processes_with(mark))

    return run


@pytest.fixture
def preflight(start: Start) -> Start:
    if importlib.util.find_spec("nccl") is None:
        pytest.skip("needs nccl4py: pip install 'ortgpu[distributed]', or its wheel on PYTHONPATH")

    def run(
        launcher: str,
        env: Mapping[str, str | None] | None = None,
        count: int = 2,
        before: Sequence[str] = (),
        **arguments: Any,
    ) -> Ranks:
        given = {"timeout": TIMEOUT, "calls": {"all": CALLS}, **arguments}
        return start(launcher, "preflight", given, env, count, before)

    return run


@LAUNCHERS
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_work_together(preflight: Start, gpus: GPUs, count: int, launcher: str) -> None:
    ranks = preflight(launcher, count=count)
    for number in range(count):
        report = ranks.returned(number)
        assert [facts["uuid"] for facts in report["ranks"]] == [gpu.uuid for gpu in gpus.visible[:count]]
        assert all(facts["nccl"] and facts["driver"] and facts["gpu"] for facts in report["ranks"])
        assert [[*result["call"].values(), 1] for result in report["collectives"]] == CALLS
        assert all(result["bus_bandwidth"] > 0 for result in report["collectives"])
        assert not report["cuda_used_here"]
    assert ranks.left == ()


@LAUNCHERS
def test_the_command(preflight: Start, tmp_path: Path, launcher: str) -> None:
    """Every operation, type and size that it runs by itself."""
    launchers.need(launcher)
    [(command, _)] = starts_of(launcher, 2, [sys.executable, "-m", "ortgpu", "preflight", "--json"])
    child = run_child(command, env=child_environment({**AS_ROOT, "NCCL_NVLS_ENABLE": "0"}), deadline=120).ok()
    document = json.loads(child.stdout)
    assert document["ok"]
    assert len(document["ranks"]) == 2
    assert len(document["collectives"]) >= 9


def test_twice_in_one_job(preflight: Start) -> None:
    assert preflight("torchrun", repeats=2).returned(1)["rank"]["rank"] == 1


@pytest.mark.parametrize(
    ("kind", "error_type", "phase"),
    [
        ("absent", "RendezvousError", "rendezvous"),
        ("asleep_in_driver", "RendezvousError", "waiting for the facts of the others"),
        ("never_joins", "CollectiveTimeoutError", COMMUNICATOR),
        ("asleep", "CollectiveTimeoutError", COMMUNICATOR),
        ("killed", "CollectiveTimeoutError", COMMUNICATOR),
        ("idle", "CollectiveTimeoutError", FIRST),
        ("asleep_in_operation", "CollectiveTimeoutError", FIRST),
        ("killed_in_operation", "CollectiveTimeoutError", FIRST),
        ("asleep_with_results", "CollectiveTimeoutError", "waiting for the other ranks"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
@LAUNCHERS
def test_a_rank_that_fails_the_others(
    preflight: Start, launcher: str, count: int, kind: str, error_type: str, phase: str
) -> None:
    ranks = preflight(launcher, count=count, misbehaving={"1": kind})
    there = set(range(count)) - ({1} if kind == "absent" else set())
    ranks.assert_all_raise(there, error_type, named=[1], phase=phase)


@pytest.mark.parametrize("count", [2, 4])
@LAUNCHERS
def test_a_rank_dies_itself(preflight: Start, launcher: str, count: int) -> None:
    """The launcher may end the others before they can say so: what has to hold is that nothing is left."""
    assert preflight(launcher, count=count, misbehaving={"1": "parent_killed"}).left == ()


@pytest.mark.parametrize("kind", ["idle", "never_joins", "killed", "killed_in_operation"])
def test_no_shared_memory_is_left(preflight: Start, kind: str) -> None:
    """NCCL's files, of communicators that were aborted and of processes that were killed."""
    before = set(Path("/dev/shm").glob("nccl-*"))
    preflight("torchrun", misbehaving={"1": kind})
    assert set(Path("/dev/shm").glob("nccl-*")) == before


def test_other_calls_than_the_other(preflight: Start) -> None:
    ranks = preflight("torchrun", calls={"0": CALLS, "1": CALLS[::-1]})
    assert {ranks.error(number).type for number in range(2)} == {"CollectiveMismatchError"}


def test_nccl_says_why(preflight: Start) -> None:
    """A real error of NCCL, with what it printed."""
    ranks = preflight("torchrun", {"NCCL_SOCKET_IFNAME": "nope"})
    for number in range(2):
        error = ranks.error(number)
        assert error.type == "NCCLError"
        assert error.details["status"] == 5
        assert any("NCCL WARN" in fact for fact in error.evidence), error.text


# Without the ways between the GPUs of a host for which NCCL 2.28 needs no /dev/shm
SHARED_MEMORY = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}


def test_too_little_shared_memory(preflight: Start) -> None:
    """The "unhandled system error" of a container."""
    ranks = preflight("torchrun", SHARED_MEMORY, before=with_little_shared_memory(child_environment({})))
    for number in range(2):
        error = ranks.error(number)
        assert error.type == "NCCLError", error.text
        assert error.details["status"] == 2, error.text  # ncclSystemError
        assert any("/dev/shm" in fact for fact in error.evidence), error.text
        assert "--shm-size" in error.fixes[0]
    assert ranks.left == ()


def test_enough_shared_memory(preflight: Start) -> None:
    """That it was the memory which was wanting, and that more of it mends that."""
    ranks = preflight("torchrun", SHARED_MEMORY)
    assert [len(ranks.returned(number)["collectives"]) for number in range(2)] == [len(CALLS)] * 2


def test_an_id_of_a_process_that_has_ended(preflight: Start) -> None:
    """NCCL says so of its own when it does not try again."""
    ranks = preflight("torchrun", {"NCCL_SOCKET_RETRY_CNT": "0"}, misbehaving={"0": "stale_id"})
    for number in range(2):
        error = ranks.error(number)
        assert error.type == "NCCLError"
        assert error.details["status"] == 6  # ncclRemoteError
        assert any("Connection refused" in fact for fact in error.evidence), error.text
    assert ranks.left == ()


def test_an_id_of_a_process_that_has_ended_while_nccl_tries_again(preflight: Start) -> None:
    ranks = preflight("torchrun", misbehaving={"0": "stale_id"})
    ranks.assert_all_raise(range(2), "CollectiveTimeoutError", named=[0, 1], phase=COMMUNICATOR)


def test_one_gpu_for_two_ranks(preflight: Start) -> None:
    ranks = preflight("torchrun", {"CUDA_VISIBLE_DEVICES": "0"})
    ranks.assert_all_raise(range(2), "RankDeviceError", named=[0, 1], phase="exchange")


# Sessions by rank


@LAUNCHERS
@pytest.mark.parametrize("count", [2, 4, 8])
def test_each_session_is_on_a_gpu_of_its_own(start: Start, conv: Path, gpus: GPUs, count: int, launcher: str) -> None:
    ranks = start(launcher, "place_session", {**placement(conv), "ranks": count}, count=count)
    for number in range(count):
        seen = ranks.returned(number)
        uuid = gpus.visible[number].uuid
        assert seen["uuid"] == uuid
        assert seen["contexts"] == [uuid], "it made a context on another GPU as well"
        assert set(seen["filled"]) >= {gpu.uuid for gpu in gpus.visible[:count]}, (
            "by NVML; only if nothing else uses them"
        )
        if any(seen["processes"].values()):  # in most containers NVML shows no processes, or other numbers
            others = [pids for other, pids in seen["processes"].items() if other != uuid]
            assert not any(seen["pid"] in pids for pids in others)


@LAUNCHERS
def test_gpus_that_the_launcher_hands_out(start: Start, conv: Path, gpus: GPUs, launcher: str) -> None:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs 2 GPUs, and CUDA shows {len(gpus.visible)}")
    first, second = (gpu.uuid for gpu in gpus.visible[:2])
    own = {"0": {"CUDA_VISIBLE_DEVICES": second}, "1": {"CUDA_VISIBLE_DEVICES": first}}
    ranks = start(launcher, "place_session", {**placement(conv), "variables": own})
    assert [ranks.returned(number)["uuid"] for number in range(2)] == [second, first]


@LAUNCHERS
def test_two_sessions_on_one_gpu_are_refused(start: Start, conv: Path, launcher: str) -> None:
    ranks = start(launcher, "place_session", placement(conv), {"CUDA_VISIBLE_DEVICES": "0"})
    errors = [outcome.error for outcome in ranks.outcomes.values() if outcome.error is not None]
    assert errors, ranks.child.output
    for error in errors:
        assert error.type == "RankDeviceError"
        assert list(error.details["ranks"]) == [0, 1]


@LAUNCHERS
def test_a_rank_that_runs_out_of_memory_says_which_it_is(start: Start, mlp: Path, launcher: str) -> None:
    ranks = start(launcher, "run_out_of_memory", {"model": str(mlp), "limit": 64 << 20})
    for number in range(2):
        error = ranks.error(number)
        assert error.type == "GPUOutOfMemoryError", error.text
        assert f"on rank {number} of 2" in error.evidence


def placement(model: Path) -> dict[str, Any]:
    return {"model": str(model), "ranks": 2}


@LAUNCHERS
def test_ranks_meet_in_a_folder(start: Start, tmp_path: Path, launcher: str) -> None:
    """What the doctor's ``--shared-folder`` asks. On one host, so that what one folder shows is that they meet."""
    ranks = start(launcher, "meet", {"folder": str(tmp_path), "timeout": 20.0})
    assert [ranks.returned(number)["missing"] for number in range(2)] == [[], []]


def test_operators_for_several_gpus_are_refused(start: Start, tmp_path: Path) -> None:
    """Where there are several, too: no published package has them."""
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y"))
    node = helper.make_node("AllReduce", ["x"], ["y"], domain="com.microsoft")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = tmp_path / "all_reduce.onnx"
    graph = helper.make_graph([node], "graph", [x], [y])
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), model)
    ranks = start("torchrun", "open_session", {"model": model})
    assert [ranks.error(number).type for number in range(2)] == ["CollectiveOpsUnavailableError"] * 2
