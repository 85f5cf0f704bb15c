"""Preflights of several ranks, started by real launchers: what passes, and what the command says of it.

The child of each rank runs as it would on GPUs, with the real nccl4py; the driver, the CUDA runtime and NCCL below it
are the lab's. What only GPUs can show is in tests/gpu/test_distributed.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import uuid
from pathlib import Path

import pytest

from ortgpu.distributed.meeting import SECRET, SECRET_FILE, ports_of
from ortgpu.distributed.preflighting import MOST_CALLS
from tests.lab import Machine, launchers
from tests.lab.fixtures import Lab, with_gpus
from tests.lab.launchers import launch_command
from tests.support.preflight_runs import ARRIVAL, CALLS, assert_all_raise, run


@pytest.fixture(scope="module")
def machine(module_lab: Lab) -> Machine:
    """With three GPUs and NCCL."""
    return module_lab.machine_with_nccl()


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
    assert_all_raise(job, range(2), "CollectiveMismatchError", named=[1], phase="exchange")
    assert f"call {MOST_CALLS} on rank 1: all_reduce of 1 int32" in job.error(0).evidence


def test_one_rank_says_what_it_does_not_cover(machine: Machine) -> None:
    result = with_gpus(machine, 1).run(argv=["-m", "ortgpu", "preflight", "--timeout", "50"])
    result.ok()
    assert "OK: 1 rank can work together" in result.stdout
    assert "note: one rank: each operation ran, and nothing passed between GPUs" in result.stdout
    assert "reduce_scatter" in result.stdout


def test_all_the_time_in_the_world(machine: Machine) -> None:
    assert run(machine, timeout=1e30).returned(1)["rank"]["world_size"] == 2


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


def test_ranks_with_one_secret(machine: Machine, tmp_path: Path) -> None:
    """One has it from a file, as a cluster hands out secrets, and the other from a variable."""
    (tmp_path / "secret").write_text("of this job\n", encoding="utf-8")
    secrets = {"0": {SECRET_FILE: str(tmp_path / "secret")}, "1": {SECRET: "of this job"}}
    job = run(machine, variables=secrets, address=f"127.0.0.1:{free_port()}")
    assert job.returned(1)["rank"]["world_size"] == 2


@pytest.mark.parametrize("secrets", [{"0": {SECRET: "x"}}, {"0": {SECRET: "x"}, "1": {SECRET: "y"}}], ids=["0", "both"])
def test_ranks_without_the_same_secret(machine: Machine, secrets: dict[str, dict[str, str]]) -> None:
    """Whoever knows the port alone is not let in."""
    job = run(machine, timeout=ARRIVAL, variables=secrets, address=f"127.0.0.1:{free_port()}")
    assert [job.error(number).type for number in range(2)] == ["RendezvousError"] * 2
    for number in range(2):
        assert "it belongs to another job, or has another secret: rank 1 on" in job.error(number).text
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
    assert_all_raise(job, {1}, "RendezvousError", named=[0], phase="rendezvous")
    assert any(fact.startswith("what listens there does not answer as rank 0 does: ") for fact in job.error(1).evidence)


def test_port_is_taken(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = run(machine, timeout=ARRIVAL, address=address)
    assert_all_raise(job, range(2), "RendezvousError", named=[0], phase="rendezvous")
    assert any(address in fact.replace(", port ", ":") for fact in job.error(0).evidence)
    assert any("Address already in use" in fact for fact in job.error(0).evidence)


def greet(server: socket.socket) -> None:
    with contextlib.ExitStack() as connected, contextlib.suppress(OSError):
        while True:
            connected.enter_context(server.accept()[0]).sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
