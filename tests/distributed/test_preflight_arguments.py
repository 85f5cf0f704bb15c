"""What a preflight refuses before there is a second rank: addresses, times, calls, and nowhere to meet."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from ortgpu.distributed import Collective, Rank, preflight
from ortgpu.distributed.meeting import SECRET, SECRET_FILE, _Published, parse_address, ports_of, resolve
from ortgpu.distributed.preflighting import MOST_CALLS
from ortgpu.errors import DistributedError, GPUError, RendezvousError, UnsupportedPlatformError
from tests.lab import Stubs, launchers
from tests.support.children import python_arguments, run_python


@pytest.mark.parametrize("address", ["node1", "node1:", ":80", "node1:0", "node1:65536", "::1:80", "node1:http"])
def test_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        preflight(address=address)


@pytest.mark.lab
def test_a_resolver_that_never_answers(stubs: Stubs) -> None:
    """A name server that is not there keeps a process in getaddrinfo for longer than most deadlines."""
    code = "#include <unistd.h>\nint getaddrinfo(void) { for (;;) pause(); }"
    mark = uuid.uuid4().hex
    hanging = {"LD_PRELOAD": str(stubs.compile("hanging_resolver.so", code)), launchers.MARK: mark}
    done = run_python("distributed.preflight_arguments.a_resolver_that_never_answers", env={**os.environ, **hanging})
    assert done.stdout == "(0,) the resolver gave no answer in time: node1:23456\n", done
    assert launchers.processes_with(mark) == ()


@pytest.mark.lab
@pytest.mark.parametrize("said", ["flood", "unproved", "early", "letters", "rude", "garbage", "number"])
def test_somebody_else_is_there_in_the_place_of_rank_0(said: str) -> None:
    """It neither keeps a rank from its deadline nor ends it with an error of its own making."""
    server = subprocess.Popen(
        [sys.executable, *python_arguments("distributed.rank_0.false_rank_0"), said], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        started = time.monotonic()
        with pytest.raises(RendezvousError) as caught:
            preflight(4, rank=Rank(1, 2, 1, 2), address=address)
        assert time.monotonic() - started < 5
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    assert all(map(str.isprintable, caught.value.evidence)), caught.value.evidence
    if said in ("garbage", "number"):
        assert caught.value.summary == "rank 0 received messages that no rank of a preflight sends"
    else:
        assert caught.value.summary == "rank 0 was not at the rendezvous in time"
        assert any("does not answer as rank 0 does" in fact for fact in caught.value.evidence), caught.value


def preflight_with(rank_0: str, rank: Rank, timeout: float) -> GPUError:
    """The error of a preflight whose rank 0 is this program."""
    server = subprocess.Popen(
        [sys.executable, *python_arguments(f"distributed.rank_0.{rank_0}")], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        with pytest.raises(GPUError) as caught:
            preflight(timeout, rank=rank, address=address)
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    return caught.value


@pytest.mark.lab
def test_a_rank_0_that_is_slow_is_told_the_time_that_is_left() -> None:
    """Else it would decide when the rank has given it up, and be blamed."""
    error = preflight_with("slow", Rank(1, 2, 1, 2), 4)
    left = next(fact for fact in error.evidence if " seconds are left: " in fact)
    assert float(left.partition(" ")[0]) < 4 - 1


@pytest.mark.lab
def test_a_verdict_that_comes_with_the_admission() -> None:
    """The last rank of a job in which another has failed: it is let in and told at once, perhaps in one packet."""
    error = preflight_with("deciding_at_once", Rank(1, 3, 1, 3), 10)
    assert isinstance(error, RendezvousError)
    assert (error.summary, error.ranks) == ("of another rank", (2,))


@pytest.mark.lab
def test_a_verdict_that_comes_after_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank reads the facts when the others have gone for what is in them: it raises the same as they."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = preflight_with("deciding_after_the_facts", Rank(1, 2, 1, 2), 40)
    assert "of another rank" not in error.summary
    assert error.evidence[0].startswith("on ranks 0, 1")


@pytest.mark.parametrize(("variable", "value"), [(SECRET, " \n"), (SECRET_FILE, "/nowhere"), (SECRET_FILE, "")])
def test_a_secret_that_is_none(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a command that failed leaves it: the ranks do not meet without one."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(RendezvousError, match=f"^{variable} gives no secret") as caught:
        preflight(4, rank=Rank(1, 2, 1, 2), address="127.0.0.1:23456")
    assert caught.value.fixes


def test_a_disk_without_room(tmp_path: Path) -> None:
    """Rank 0 cannot write where it listens. It says so, and no part of the file is left."""
    done = run_python(
        "distributed.preflight_arguments.a_disk_without_room", env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    )
    assert done.stdout == "rank 0 cannot listen for the other ranks\n", done
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_rank_that_cannot_start_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that embeds Python: what it says is what can be done."""
    monkeypatch.setattr("ortgpu.environment.child.this_interpreter", lambda: "")
    with pytest.raises(DistributedError, match="the child process of rank 0 cannot be started") as caught:
        preflight(4)
    assert any("sys.executable is empty" in fact for fact in caught.value.evidence)
    assert "ortgpu preflight" in caught.value.fixes[0]
    assert (caught.value.ranks, caught.value.phase) == ((0,), "start")


def test_a_daemon_without_standard_streams(tmp_path: Path) -> None:
    """What it opens first has their numbers, the connection to the child among them."""
    run_python(
        "distributed.preflight_arguments.a_daemon_without_standard_streams",
        str(tmp_path / "found"),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    said = (tmp_path / "found").read_text(encoding="utf-8")
    assert "the preflight's child" not in said
    assert "More: ortgpu explain" in said


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


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_system_without_nccl(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(UnsupportedPlatformError, match="NCCL exists for Linux only") as caught:
        preflight()
    assert caught.value.system == system
    assert caught.value.fixes[0].needs == "host"


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


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_only_this_user_can_read_the_key_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the key takes part in the job."""
    before = os.umask(0)
    try:
        published = _Published(tmp_path / "meeting", ())
        listener, key = published.listen()
    finally:
        os.umask(before)
    listener.close()
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
    assert [(each.host, each.key) for each in published.addresses()] == [("127.0.0.1", key)]
    other = _Published(tmp_path / "meeting", ())
    other.close()
    assert published.addresses(), "it is not the file of a rank that only reads it"
    published.close()
    assert list(tmp_path.iterdir()) == []
