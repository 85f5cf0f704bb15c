"""What a preflight refuses before there is a second rank: addresses, times, calls, and nowhere to meet."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from ortgpu.distributed import Collective, Rank, preflight
from ortgpu.distributed.meeting import parse_address, ports_of, resolve
from ortgpu.distributed.preflighting import MOST_CALLS
from ortgpu.errors import RendezvousError, UnsupportedPlatformError
from tests.lab import Stubs, launchers


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
