"""Preflights of several ranks, started by real launchers: what passes, and every way in which ranks fail each other.

The child of each rank runs as it would on GPUs, with the real nccl4py; the driver, the CUDA runtime and NCCL below it
are the lab's. What only GPUs can show is in tests/gpu/test_distributed.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ortgpu.distributed import Collective, Rank, preflight
from ortgpu.distributed.meeting import parse_address, ports_of, resolve
from ortgpu.distributed.preflighting import MOST_CALLS
from ortgpu.errors import RendezvousError
from tests.lab import Machine, Stubs, launchers
from tests.lab.fixtures import Lab, with_gpus
from tests.lab.launchers import Job, launch, launch_command
from tests.lab.models import Models
from tests.lab.wheels import Wheels

CALLS = [["all_reduce", "float32", 1000, 1], ["all_gather", "float16", 10, 1], ["reduce_scatter", "bfloat16", 10, 1]]
TIMEOUT = 6.0  # seconds: what a rank that hangs costs a test
ARRIVAL = 4.0  # seconds of a preflight in which not all come: half of them are waited for


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory, stubs: Stubs, models: Models, wheels: Wheels
) -> Iterator[Machine]:
    """With three GPUs and NCCL; made once, for the tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("preflight")
    yield Lab(folder, stubs, models, wheels).machine_with_nccl()
    shutil.rmtree(folder, ignore_errors=True)


def run(
    machine: Machine,
    launcher: str = "environment",
    ranks: int = 2,
    *,
    env: Mapping[str, str | None] | None = None,
    **arguments: Any,
) -> Job:
    if launcher != "environment":
        launchers.need(launcher)
    arguments.setdefault("calls", {"all": CALLS})
    return launch(machine, launcher, ranks, "preflight", {"timeout": 20.0, **arguments}, env=env)


def assert_all_raise(job: Job, ranks: int, error_type: str, *, named: list[int], phase: str | None = None) -> None:
    """Every rank that is still there raises the same, which names ranks and phase; and nothing is left."""
    assert job.left == ()
    assert job.ranks, job.result.output
    for number in job.ranks:
        error = job.error(number)
        assert error.type == error_type, error.text
        if "ranks" in error.details:
            assert list(error.details["ranks"]) == named, error.text
        assert phase is None or error.details["phase"] == phase, error.text
        assert error.fixes


# What passes


@pytest.mark.parametrize("launcher", [*launchers.LAUNCHERS, "environment"])
def test_ranks_that_work_together(machine: Machine, launcher: str) -> None:
    job = run(machine, launcher)
    reports = [job.returned(number) for number in range(2)]
    assert job.left == ()
    assert [report["rank"]["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["rank"]["launcher"] == launcher
        assert [facts["uuid"][-1] for facts in report["ranks"]] == ["0", "1"]
        assert {facts["nccl"] for facts in report["ranks"]} == {"2.28.9"}
        assert {facts["driver"] for facts in report["ranks"]} == {"580.65.06"}
        assert all(facts["onnxruntime"].startswith("onnxruntime-gpu ") for facts in report["ranks"])
        assert report["differences"] == []
        assert [[*result["call"].values(), 1] for result in report["collectives"]] == CALLS
        assert all(result["seconds"] > 0 and result["bus_bandwidth"] > 0 for result in report["collectives"])
        assert report["notes"] == ["one host: no network between hosts was used"]
    assert reports[0]["collectives"] == reports[1]["collectives"]


def test_three_ranks_every_type_and_size_again_and_again(machine: Machine) -> None:
    """Also one after the other in one job: no rank of the second meets the first."""
    types = [["all_reduce", dtype, 7, 1] for dtype in ("float32", "float16", "bfloat16", "int32")]
    sizes = [[operation, "float32", count, 1] for operation in ("all_gather", "reduce_scatter") for count in (1, 1023)]
    job = run(machine, ranks=3, calls={"all": [*types, *sizes]}, repeats=3)
    for number in range(3):
        assert len(job.returned(number)["collectives"]) == 8
    assert job.left == ()


def test_many_calls(machine: Machine) -> None:
    """A plan that is longer than what the system holds for a connection; all of it is compared."""
    job = run(
        machine,
        calls={
            "0": [["all_reduce", "float32", 1, MOST_CALLS]],
            "1": [["all_reduce", "float32", 1, MOST_CALLS - 1], ["all_reduce", "int32", 1, 1]],
        },
    )
    assert_all_raise(job, 2, "CollectiveMismatchError", named=[1], phase="exchange")
    assert f"call {MOST_CALLS} on rank 1: all_reduce of 1 int32" in job.error(0).evidence


def test_one_rank_says_what_it_does_not_cover(machine: Machine) -> None:
    result = with_gpus(machine, 1).run(argv=["-m", "ortgpu", "preflight", "--timeout", "50"])
    result.ok()
    assert "OK: 1 rank can work together" in result.stdout
    assert "note: one rank: each operation ran, and nothing passed between GPUs" in result.stdout
    assert "reduce_scatter" in result.stdout


def test_differences_are_named(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_NVML_DRIVER": "570.1"}})
    for number in range(2):
        [difference] = job.returned(number)["differences"]
        assert difference == {"fact": "driver", "values": [["580.65.06", [0]], ["570.1", [1]]]}


def test_address_is_given(machine: Machine) -> None:
    address = f"localhost:{free_port()}"
    job = run(machine, address=address)
    assert job.returned(0)["rank"]["world_size"] == 2
    assert job.left == ()


OWN_GPU = {"0": {"CUDA_VISIBLE_DEVICES": "0"}, "1": {"CUDA_VISIBLE_DEVICES": "1"}}


def test_hosts_of_their_own_that_the_launcher_names(machine: Machine) -> None:
    """The port follows from the job; the first one is taken here by somebody else, who says nothing."""
    apart = {"launcher": "torchrun", "master_address": "127.0.0.1"}
    run_id = uuid.uuid4().hex
    job = {"TORCHELASTIC_RUN_ID": run_id, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables = {number: {**own, **job} for number, own in OWN_GPU.items()}
    first, *_ = ports_of(f"torchrun {run_id} 29500")
    with socket.create_server(("127.0.0.1", first)):
        outcome = run(machine, variables=variables, apart=apart)
    assert [facts["uuid"][-1] for facts in outcome.returned(1)["ranks"]] == ["0", "1"]
    assert outcome.left == ()


def test_hosts_of_their_own_and_an_address(machine: Machine) -> None:
    """By the name of this host, on all of its interfaces."""
    address = f"{socket.gethostname()}:{free_port()}"
    apart = {"launcher": None, "master_address": None}
    job = run(machine, variables=OWN_GPU, apart=apart, address=address)
    assert job.returned(0)["rank"]["local_world_size"] == 1


def test_foreign_connections_do_no_harm(machine: Machine) -> None:
    job = run(machine, address=f"127.0.0.1:{free_port()}", disturbed=True)
    assert job.returned(1)["disturbed_by"] == 6
    assert job.left == ()


def test_something_else_listens_there(machine: Machine) -> None:
    """A server that greets whoever comes, as SSH does, while rank 0 is not there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = threading.Thread(target=greet, args=(server,))
        greeting.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = run(machine, timeout=ARRIVAL, address=address, misbehaving={"0": "absent"})
        server.shutdown(socket.SHUT_RDWR)
        greeting.join(10)
    assert set(job.ranks) == {1}
    assert_all_raise(job, 1, "RendezvousError", named=[0], phase="rendezvous")
    assert any(fact.startswith("what listens there does not answer as rank 0 does: ") for fact in job.error(1).evidence)


def test_port_is_taken(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = run(machine, timeout=ARRIVAL, address=address)
    assert_all_raise(job, 2, "RendezvousError", named=[0], phase="rendezvous")
    assert any(address in fact.replace(", port ", ":") for fact in job.error(0).evidence)
    assert any("Address already in use" in fact for fact in job.error(0).evidence)


def greet(server: socket.socket) -> None:
    with contextlib.ExitStack() as connected, contextlib.suppress(OSError):
        while True:
            connected.enter_context(server.accept()[0]).sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# Ranks that fail the others

COMMUNICATOR = "setting up the communicator"
FIRST = "all_reduce of 1000 float32"


@pytest.mark.parametrize(
    ("kind", "error_type", "phase"),
    [
        ("absent", "RendezvousError", "rendezvous"),
        ("killed_in_driver", "RendezvousError", "looking at the GPU"),
        pytest.param(
            "asleep_in_driver", "RendezvousError", "waiting for the facts of the others", marks=pytest.mark.slow
        ),
        pytest.param("never_joins", "CollectiveTimeoutError", COMMUNICATOR, marks=pytest.mark.slow),
        pytest.param("asleep", "CollectiveTimeoutError", COMMUNICATOR, marks=pytest.mark.slow),
        ("deaf", "CollectiveTimeoutError", COMMUNICATOR),
        ("killed", "CollectiveTimeoutError", COMMUNICATOR),
        ("idle", "CollectiveTimeoutError", FIRST),
    ],
)
def test_a_rank_that_fails_the_others(machine: Machine, kind: str, error_type: str, phase: str) -> None:
    launcher = "openmpi" if launchers.why_not_here("openmpi") is None else "environment"
    job = run(machine, launcher, timeout=ARRIVAL if kind == "absent" else TIMEOUT, misbehaving={"1": kind})
    assert set(job.ranks) == ({0} if kind == "absent" else {0, 1}), job.result.output
    assert_all_raise(job, 2, error_type, named=[1], phase=phase)
    assert all(outcome.seconds < TIMEOUT + 1 for outcome in job.ranks.values()), "after its deadline"


def test_rank_0_never_comes(machine: Machine) -> None:
    job = run(machine, ranks=3, timeout=ARRIVAL, misbehaving={"0": "absent"})
    assert set(job.ranks) == {1, 2}
    assert_all_raise(job, 3, "RendezvousError", named=[0], phase="rendezvous")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "torchrun"])
def test_under_the_other_launchers(machine: Machine, launcher: str) -> None:
    job = run(machine, launcher, timeout=TIMEOUT, misbehaving={"1": "asleep"})
    assert_all_raise(job, 2, "CollectiveTimeoutError", named=[1], phase=COMMUNICATOR)


@pytest.mark.parametrize(("dead", "others"), [("1", {0, 2}), ("0", {1, 2})])
def test_a_rank_dies_itself(machine: Machine, dead: str, others: set[int]) -> None:
    """Its child goes with it, although that hangs where nothing but the kernel reaches it."""
    job = run(machine, ranks=3, timeout=TIMEOUT, misbehaving={dead: "parent_killed"})
    assert set(job.ranks) == others
    assert_all_raise(job, 3, "CollectiveTimeoutError", named=[int(dead)])


def test_who_comes_late_learns_of_an_early_failure(machine: Machine) -> None:
    job = run(machine, ranks=3, misbehaving={"1": "killed_in_driver"}, late={"2": 1.5})
    assert set(job.ranks) == {0, 1, 2}
    assert_all_raise(job, 3, "RendezvousError", named=[1], phase="looking at the GPU")


@pytest.mark.slow
def test_rank_0_stands_still(machine: Machine) -> None:
    """Nobody decides for all then: each comes to it by itself."""
    job = run(machine, timeout=TIMEOUT, misbehaving={"0": "parent_stopped"})
    error = job.error(1)
    assert (error.type, error.details["ranks"]) == ("CollectiveTimeoutError", [0]), error.text
    assert "rank 0 went silent" in error.text
    assert job.ranks[1].seconds < TIMEOUT + 1
    assert job.left == ()


def test_a_launcher_ends_the_job_of_a_rank_that_dies(machine: Machine) -> None:
    """mpirun kills the other ranks, in whatever they are: their children have to go as well."""
    launchers.need("openmpi")
    job = run(machine, "openmpi", misbehaving={"1": "parent_killed"})
    assert job.status != 0
    assert job.left == ()


def test_another_order_than_planned(machine: Machine) -> None:
    job = run(machine, misbehaving={"1": "reordered"})
    assert_all_raise(job, 2, "CollectiveMismatchError", named=[0, 1], phase=FIRST)
    assert "rank 1: reduce_scatter of 10 bfloat16" in job.error(0).evidence


# What the ranks' descriptions show before NCCL is touched


def test_other_calls_than_the_others(machine: Machine) -> None:
    used = Path(str(machine.env["STUB_NCCL_FOLDER"]))
    before = set(used.iterdir())
    job = run(machine, ranks=3, calls={"0": CALLS, "1": CALLS, "2": CALLS[:2]})
    assert_all_raise(job, 3, "CollectiveMismatchError", named=[2], phase="exchange")
    assert "call 3 on rank 2: nothing more" in job.error(0).evidence
    assert set(used.iterdir()) == before, "NCCL was used before the plans were compared"


def test_two_ranks_on_one_gpu(machine: Machine) -> None:
    job = run(with_gpus(machine, 1))
    assert_all_raise(job, 2, "RankDeviceError", named=[0, 1], phase="exchange")


def test_more_ranks_than_gpus(machine: Machine) -> None:
    job = run(with_gpus(machine, 2), ranks=3, env={"CUDA_VISIBLE_DEVICES": "1,0"})
    assert_all_raise(job, 3, "RankDeviceError", named=[2], phase="device")
    assert "CUDA_VISIBLE_DEVICES=1,0" in job.error(0).evidence


def test_gpus_that_the_launcher_hands_out(machine: Machine) -> None:
    job = run(machine, variables={"0": {"CUDA_VISIBLE_DEVICES": "1"}, "1": {"CUDA_VISIBLE_DEVICES": "0"}})
    assert [facts["uuid"][-1] for facts in job.returned(0)["ranks"]] == ["1", "0"]


def test_no_driver(machine: Machine) -> None:
    job = launch(machine.but(cuda=None, nvml=None), "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, 2, "DriverNotFoundError", named=[])
    for number in range(2):
        assert any(fact.startswith("on ranks 0, 1, on ") for fact in job.error(number).evidence)


def test_no_gpu_for_one_rank(machine: Machine) -> None:
    job = run(machine, variables={"1": {"CUDA_VISIBLE_DEVICES": ""}})
    assert_all_raise(job, 2, "NoDeviceError", named=[])
    assert any(fact.startswith("on rank 1, host ") for fact in job.error(0).evidence)


def test_another_release_of_nccl(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_NCCL_VERSION": "22703"}})
    assert_all_raise(job, 2, "NCCLError", named=[0, 1], phase="exchange")
    assert job.error(0).details["status"] == 5
    assert job.error(0).evidence == ("NCCL 2.28.9 on rank 0", "NCCL 2.27.3 on rank 1")


def test_no_bindings_and_no_library(lab: Lab) -> None:
    machine = lab.machine_with_nccl(2)
    machine.overlay.remove("nvidia/nccl")
    job = launch(machine, "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, 2, "LibraryNotFoundError", named=[])
    assert job.error(1).details["missing"] == ["libnccl.so.2"]
    assert "install nvidia-nccl-cu13" in job.error(1).fixes[0]
    machine.overlay.remove("nccl")
    job = launch(machine, "environment", 2, "preflight", {"timeout": 20.0})
    assert_all_raise(job, 2, "NCCLError", named=[0, 1])
    assert "install 'nccl4py>=0.6,<0.7'" in job.error(1).fixes[0]


# What NCCL and CUDA say


@pytest.mark.parametrize(
    ("function", "status"), [("ncclGetUniqueId", 5), ("ncclAllReduce", 2), ("ncclCommInitRankConfig", 3)]
)
def test_nccl_fails(machine: Machine, function: str, status: int) -> None:
    job = run(machine, variables={"0": {"STUB_NCCL_FAIL": f"{function}={status}"}})
    assert_all_raise(job, 2, "NCCLError", named=[0])
    for number in range(2):
        assert job.error(number).details["status"] == status
        assert any(f"NCCL WARN {function} was told to fail" in fact for fact in job.error(number).evidence)


def test_remote_errors_are_not_the_cause(machine: Machine) -> None:
    """ncclRemoteError is what the others of a rank that failed are told: that rank's own error is shown."""
    failing = {"0": {"STUB_NCCL_FAIL": "ncclAllReduce=6"}, "1": {"STUB_NCCL_FAIL": "ncclAllReduce=2"}}
    assert_all_raise(run(machine, variables=failing), 2, "NCCLError", named=[1])


def test_wrong_values(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_NCCL_SPOIL": "1"}})
    assert_all_raise(job, 2, "NCCLError", named=[1], phase=FIRST)
    assert "element 0: 100.0 instead of 1.0" in job.error(0).evidence


def test_cuda_fails(machine: Machine) -> None:
    job = run(machine, variables={"1": {"STUB_CUDART_FAIL": "cudaMalloc=2"}})
    assert_all_raise(job, 2, "InsufficientDeviceMemoryError", named=[])
    assert any(fact.startswith("on rank 1, host ") for fact in job.error(0).evidence)


# The command


def test_command_writes_once(machine: Machine) -> None:
    launchers.need("openmpi")
    job = launch_command(machine, "openmpi", 2, ["-m", "ortgpu", "preflight", "--json", "--timeout", "55"])
    assert job.status == 0, job.result.output
    document = json.loads(job.result.stdout)
    assert (document["schema"], document["ok"], document["rank"]["launcher"]) == (1, True, "openmpi")
    assert len(document["ranks"]) == 2
    assert {result["call"]["operation"] for result in document["collectives"]} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    }


def test_command_names_the_problem_once(machine: Machine) -> None:
    launchers.need("openmpi")
    machine = machine.but(cuda=None, nvml=None)
    job = launch_command(machine, "openmpi", 2, ["-m", "ortgpu", "preflight"])
    assert job.status == 1
    assert job.result.stdout.count("DriverNotFoundError: ") == 1
    assert "rank 1: DriverNotFoundError: " in job.result.stderr
    job = launch_command(machine, "openmpi", 2, ["-m", "ortgpu", "preflight", "--json"])
    document = json.loads(job.result.stdout)
    assert (document["ok"], document["error"]["type"]) == (False, "DriverNotFoundError")


# By itself


@pytest.mark.parametrize("address", ["node1", "node1:", ":80", "node1:0", "node1:65536", "::1:80", "node1:http"])
def test_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        preflight(address=address)


def test_a_resolver_that_never_answers(stubs: Stubs) -> None:
    """A name server that is not there keeps a process in getaddrinfo for longer than most deadlines."""
    code = "#include <unistd.h>\nint getaddrinfo(void) { for (;;) pause(); }"
    mark = uuid.uuid4().hex
    hanging = {"LD_PRELOAD": str(stubs.compile("hanging_resolver.so", code)), launchers.MARK: mark}
    program = (
        "import ortgpu\n"
        "from ortgpu.distributed import Rank, preflight\n"
        "try:\n"
        "    preflight(4, rank=Rank(1, 2, 0, 1), address='node1:23456')\n"
        "except ortgpu.RendezvousError as error:\n"
        "    print(error.ranks, error.evidence[-1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **hanging}, capture_output=True, timeout=60, check=False
    )
    assert done.stdout.decode() == "(0,) the resolver gave no answer in time: node1:23456\n", done
    assert launchers.processes_with(mark) == ()


@pytest.mark.parametrize("name", ["a" * 70, "node..1", "a b"])
def test_no_name_of_a_host(name: str) -> None:
    with pytest.raises(OSError, match=r"no host has such a name|not known|name resolution") as caught:
        resolve(name, 30)
    assert "\n" not in str(caught.value)


def test_addresses() -> None:
    assert parse_address("node1:80") == ("node1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)


def test_too_many_calls() -> None:
    with pytest.raises(ValueError, match="too many"):
        preflight(calls=[Collective("all_reduce", "float32", 1)] * (MOST_CALLS + 1))


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_no_timeout(timeout: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        preflight(timeout)


def test_nowhere_to_meet() -> None:
    """mpirun over several hosts names none of them."""
    for number, host in enumerate([socket.gethostname(), "HOST"]):
        with pytest.raises(RendezvousError, match="nothing says where") as caught:
            preflight(rank=Rank(number, 4, number, 2, "openmpi"))
        assert f"ortgpu preflight --address {host}:PORT" in caught.value.fixes[0]
        pickle.loads(pickle.dumps(caught.value))


def test_no_folder_to_meet_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    with pytest.raises(RendezvousError, match="there is no folder"):
        preflight(rank=Rank(0, 2, 0, 2, "openmpi"))


def test_ports_are_a_jobs_own() -> None:
    ports = list(ports_of("torchrun a"))
    assert ports == list(ports_of("torchrun a")) != list(ports_of("torchrun b"))
    assert all(1024 < port < 29_500 for port in ports)


@pytest.mark.parametrize("call", [("reduce", "float32", 1), ("all_reduce", "float8", 1), ("all_reduce", "int32", 0)])
def test_no_such_operation(call: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"not known|not a number"):
        Collective(*call)
