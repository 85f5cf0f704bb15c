"""Preflights of ranks on several hosts, started by real launchers: what passes, and how networks fail them.

The hosts are namespaces of this machine (tests/lab/hosts.py), with a network between them; driver, CUDA and NCCL are
the lab's. NCCL's own traffic is none of it: the stub passes what ranks hand in through a file that all hosts see.
"""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lab import GPU, NVML, Cuda, Machine, Stubs, launchers
from tests.lab.fixtures import Lab
from tests.lab.hosts import Network, network_in
from tests.lab.launchers import Job, launch_commands, rank_program, starts_between_hosts
from tests.lab.models import Models
from tests.lab.slurm import slurm_on
from tests.lab.wheels import Wheels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ADDRESS = "node1:23456"
CALLS = {"all": [["all_reduce", "float32", 1000, 1]]}
TIMEOUT = 8.0  # seconds of a preflight that fails: half of them for the ranks to arrive


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory, stubs: Stubs, models: Models, wheels: Wheels
) -> Iterator[Machine]:
    """The software of all hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    yield Lab(folder, stubs, models, wheels).machine_with_nccl().but(cuda=Cuda(), nvml=NVML())
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """node1 and node2."""
    with network_in(tmp_path / "network") as network:
        for name in ("node1", "node2"):
            network.add(name)
        yield network


def gpus(host: int) -> dict[str, str]:
    devices = tuple(GPU(uuid=f"GPU-0000000{host}-0000-0000-0000-{number:012}") for number in range(2))
    return {**Cuda(devices=devices).variables(), **NVML(gpus=devices).variables()}


def run(
    machine: Machine,
    network: Network,
    launcher: str = "environment",
    *,
    each: int = 1,
    by_host: Mapping[str, Mapping[str, str]] | None = None,
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Job:
    """A preflight with ``each`` so many ranks on every host, which has two GPUs. ``by_host``: variables, where nothing
    launches."""
    if launcher in launchers.LAUNCHERS:
        launchers.need(launcher)
    variables = {str(rank): gpus(rank // each) for rank in range(each * len(network.hosts))}
    arguments = {"calls": CALLS, "variables": variables, "timeout": 20.0, **arguments}
    command = [str(machine.overlay.python), *rank_program("preflight", arguments)]
    starts = starts_between_hosts(launcher, network, each, command, by_host)
    return launch_commands(machine, starts, env=env)


def assert_all_raise(job: Job, expected: Mapping[int, tuple[str, list[int]]]) -> None:
    """By rank, which error and which ranks it names; all of them in time, with what to do, and nothing left."""
    assert set(job.ranks) == set(expected), job.result.output
    assert job.left == ()
    for number, (error_type, named) in expected.items():
        error = job.error(number)
        assert (error.type, list(error.details["ranks"])) == (error_type, named), error.text
        assert error.details["phase"]
        assert error.fixes
        assert job.ranks[number].seconds < TIMEOUT + 1


# What passes


@pytest.mark.parametrize("launcher", [*launchers.LAUNCHERS, "environment"])
def test_ranks_of_two_hosts(machine: Machine, network: Network, launcher: str) -> None:
    """mpirun says nothing of where rank 0 is; with the others it is not asked of the user."""
    named_by_launcher = launcher in ("torchrun", "environment")
    assert_passed(run(machine, network, launcher, each=2, address=None if named_by_launcher else ADDRESS))


def test_srun_on_two_hosts(machine: Machine, network: Network, tmp_path: Path) -> None:
    with slurm_on(network, tmp_path) as variables:
        assert_passed(run(machine, network, "srun", each=2, env=variables))
        job = run(machine, network, "srun", env=variables, timeout=TIMEOUT, misbehaving={"1": "absent"})
        assert_all_raise(job, {0: ("RendezvousError", [1])})


def assert_passed(job: Job) -> None:
    reports = [job.returned(number) for number in range(4)]
    assert job.left == ()
    assert [facts["host"] for facts in reports[0]["ranks"]] == ["node1", "node1", "node2", "node2"]
    assert len({facts["uuid"] for facts in reports[0]["ranks"]}) == 4
    assert [report["rank"]["local_rank"] for report in reports] == [0, 1, 0, 1]
    assert reports[3]["notes"] == [], "the network between the hosts was used"


def debian(network: Network) -> None:
    """Its installer makes a host's own name 127.0.1.1 to itself."""
    for number, host in enumerate(network.hosts):
        others = {one.name: [one.address] for one in network.hosts if one is not host}
        network.tell_names(host, {host.name: ["127.0.1.1"], **others})
        assert number or "127.0.1.1" in host.run("getent hosts node1")


def ipv6_only(network: Network) -> None:
    for host in network.hosts:
        network.tell_names(host, {"node1": ["fd77::1"]})
        host.run(f"ip addr del {host.address}/24 dev eth0")


def an_address_that_swallows_packets(network: Network) -> None:
    """As that of a bridge for containers, which every host has for itself. 10.77.0.3 is nearer to 10.77.0.2 than
    10.77.0.1 is, so a resolver names it first: RFC 6724, rule 9."""
    host = network.hosts[1]
    host.run("ip neigh add 10.77.0.3 lladdr 02:00:00:00:00:03 dev eth0")
    network.tell_names(host, {"node1": ["10.77.0.3", "10.77.0.1"]})
    assert host.run("getent ahosts node1").startswith("10.77.0.3")


def one_name(network: Network) -> None:
    for host in network.hosts:
        host.run("hostname localhost")


def ipv6_off(network: Network) -> None:
    for host in network.hosts:
        host.run("mount -o remount,rw /proc/sys 2>/dev/null || :; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")


def ipv6_by_itself(network: Network) -> None:
    """A listener for IPv6 takes no IPv4, unless it says so."""
    network.hosts[0].run("echo 1 > /proc/sys/net/ipv6/bindv6only")


@pytest.mark.parametrize(
    "odd", [debian, ipv6_off, ipv6_by_itself, ipv6_only, an_address_that_swallows_packets, one_name]
)
def test_odd_and_sound(machine: Machine, network: Network, odd: Callable[[Network], None]) -> None:
    odd(network)
    job = run(machine, network, address=ADDRESS)
    for number in range(2):
        assert job.returned(number)["notes"] == []


def test_rank_0_calls_itself_localhost(machine: Machine, network: Network) -> None:
    """As the first pod of a job in Kubernetes does."""
    job = run(machine, network, by_host={"node1": {"MASTER_ADDR": "localhost"}})
    assert len(job.returned(1)["ranks"]) == 2


def test_temporary_folder_is_shared(machine: Machine, network: Network, tmp_path: Path) -> None:
    """Two jobs, one on each host, that say the same of themselves: by the defaults of DeepSpeed's launcher, say."""
    starts: list[tuple[list[str], dict[str, str]]] = []
    for number, host in enumerate(network.hosts):
        here = {**gpus(number), "TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        python = [str(machine.overlay.python), *rank_program("preflight", {"timeout": TIMEOUT, "calls": CALLS})]
        for command, variables in launchers.starts_of("environment", 2, python):
            folder = tmp_path / f"reports{number}"
            folder.mkdir(exist_ok=True)
            alike = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK_REPORTS": str(folder)}
            assignments = [f"{name}={value}" for name, value in {**here, **variables, **alike}.items()]
            starts.append((host.command(["env", *assignments, *command]), {}))
    launch_commands(machine, starts)
    for number in range(2):
        reports = [json.loads(path.read_text()) for path in (tmp_path / f"reports{number}").glob("*.json")]
        assert [report["error"] for report in reports] == [None, None], reports


def test_a_folder_of_all_hosts_or_of_each(machine: Machine, network: Network, tmp_path: Path) -> None:
    """What `ortgpu doctor --shared-folder` asks."""
    for folder, missing in ((str(tmp_path), [[], []]), (network.hosts[0].variables["TMPDIR"], [[1], [0]])):
        command = [str(machine.overlay.python), *rank_program("meet", {"folder": folder, "timeout": 5.0})]
        job = launch_commands(machine, starts_between_hosts("environment", network, 1, command))
        assert [job.returned(number)["missing"] for number in range(2)] == missing


# Rank 0 is not found


def leads_back(network: Network) -> None:
    network.tell_names(network.hosts[1], {"node1": ["127.0.1.1"]})


def not_known(network: Network) -> None:
    network.tell_names(network.hosts[1], {})


def firewall_without_a_word(network: Network) -> None:
    network.hosts[0].run("ip rule add sport 23456 blackhole; ip -6 rule add sport 23456 blackhole")


def firewall_that_refuses(network: Network) -> None:
    network.hosts[1].run("ip route add prohibit 10.77.0.1")


def unplugged(network: Network) -> None:
    network.unplug(network.hosts[1])


@pytest.mark.parametrize(
    ("fault", "fact", "fix"),
    [
        (leads_back, "on node2, node1 is 127.0.1.1", "its name resolves to it here"),
        (not_known, "name resolution: node1:23456", "its name resolves to it here"),
        (firewall_without_a_word, "timed out: node1:23456", "no firewall is in between"),
        (firewall_that_refuses, "Permission denied: node1:23456", "no firewall is in between"),
        (unplugged, "on node2, node1 is 10.77.0.1", "no firewall is in between"),
    ],
)
def test_rank_0_is_not_found(
    machine: Machine, network: Network, fault: Callable[[Network], None], fact: str, fix: str
) -> None:
    fault(network)
    job = run(machine, network, address=ADDRESS, timeout=TIMEOUT)
    assert_all_raise(job, {0: ("RendezvousError", [1]), 1: ("RendezvousError", [0])})
    assert "rank 0 waited for them on node1, at node1, port 23456" in job.error(0).evidence
    assert any(fact in line for line in job.error(1).evidence), job.error(1).text
    assert any(fix in line for line in job.error(1).fixes), job.error(1).text
    assert "no answer in time" not in job.error(1).text, "what was cut off at the end says nothing"


def test_rank_0_is_not_started(machine: Machine, network: Network) -> None:
    """Nothing is said against its name, least of all on its own host, which that leads to."""
    job = run(machine, network, each=2, timeout=TIMEOUT, misbehaving={"0": "absent"})
    assert_all_raise(job, dict.fromkeys([1, 2, 3], ("RendezvousError", [0])))
    for number in (1, 2, 3):
        assert job.error(number).fixes[0].startswith("look at the output of rank 0")


def test_address_of_another_host(machine: Machine, network: Network) -> None:
    """Each side says where it was, and where it looked."""
    job = run(machine, network, address="node2:23456", timeout=TIMEOUT)
    assert_all_raise(job, {0: ("RendezvousError", [1]), 1: ("RendezvousError", [0])})
    assert "rank 0 waited for them on node1, at node2, port 23456" in job.error(0).evidence
    assert "this is rank 1 of 2, on node2" in job.error(1).evidence
    assert any(line.startswith("on node2, node2 is ") for line in job.error(1).evidence)


# It is found, and that is not enough


def test_another_release_of_ortgpu(machine: Machine, network: Network, tmp_path: Path) -> None:
    own = machine.overlay.site / "ortgpu"
    other = shutil.copytree(own.resolve(), tmp_path / "ortgpu", ignore=shutil.ignore_patterns("__pycache__"))
    text = (other / "__init__.py").read_text(encoding="utf-8")
    (other / "__init__.py").write_text(text.replace("__version__ = ", '__version__ = "99" + '), encoding="utf-8")
    network.hosts[1].run(f"mount --bind {other} {own.resolve()}")
    job = run(machine, network, address=ADDRESS, timeout=TIMEOUT)
    assert_all_raise(job, dict.fromkeys(range(2), ("RendezvousError", [1])))
    for number in range(2):
        assert job.error(number).text.startswith("rank 1 runs ortgpu 99")
        assert job.error(number).fixes[0] == "install the same release of ortgpu on all hosts"


def test_large_packets_are_lost(machine: Machine, network: Network) -> None:
    """The ends of a tunnel know nothing of its MTU: the ranks meet, and what they say at length never arrives."""
    network.drop_larger(network.hosts[1], 600)
    job = run(machine, network, address=ADDRESS, timeout=TIMEOUT)
    assert_all_raise(job, {0: ("CollectiveTimeoutError", [1]), 1: ("RendezvousError", [0])})
    for number in range(2):
        assert any("MTU" in fix for fix in job.error(number).fixes)


def test_the_cable_is_pulled_out_of_a_collective(machine: Machine, network: Network) -> None:
    """Rank 0 waits for rank 1 in an all_reduce; then neither hears of the other again."""
    before = set(communicators(machine))
    with ThreadPoolExecutor() as pool:
        job = pool.submit(run, machine, network, address=ADDRESS, timeout=TIMEOUT, misbehaving={"1": "idle"})
        until = time.monotonic() + 30
        while not any(map(rank_0_waits, set(communicators(machine)) - before)):
            assert time.monotonic() < until, job.result().result.output if job.done() else "nobody joined"
            time.sleep(0.01)
        network.unplug(network.hosts[1])
        done = job.result()
    assert_all_raise(done, {0: ("CollectiveTimeoutError", [1]), 1: ("CollectiveTimeoutError", [0])})
    assert done.error(0).details["phase"] == "all_reduce of 1000 float32"
    assert any("NCCL_SOCKET_IFNAME" in fix for fix in done.error(0).fixes)
    assert done.error(1).text.startswith("rank 0 went silent during: ")


def communicators(machine: Machine) -> list[Path]:
    return list(Path(str(machine.env["STUB_NCCL_FOLDER"])).iterdir())


def rank_0_waits(communicator: Path) -> bool:
    """By the second field of libnccl_stub.c's file: the operations that a rank has handed in."""
    with communicator.open("rb") as file:
        return file.read(16)[8:] == struct.pack("L", 1)


def test_a_rank_of_another_host_dies(machine: Machine, network: Network) -> None:
    job = run(machine, network, address=ADDRESS, timeout=TIMEOUT, misbehaving={"1": "parent_killed"})
    assert_all_raise(job, {0: ("CollectiveTimeoutError", [1])})
    assert "on rank 1, host node2" in job.error(0).evidence
