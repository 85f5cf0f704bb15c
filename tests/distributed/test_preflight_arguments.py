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
from ortgpu.distributed.meeting import SECRET, SECRET_FILE, parse_address, ports_of, resolve
from ortgpu.distributed.preflighting import MOST_CALLS
from ortgpu.errors import DistributedError, GPUError, RendezvousError, UnsupportedPlatformError
from tests.lab import Stubs, launchers
from tests.support.children import run_python


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
    program = (
        "import ortgpu\n"
        "from ortgpu.distributed import Rank, preflight\n"
        "try:\n"
        "    preflight(4, rank=Rank(1, 2, 0, 1), address='node1:23456')\n"
        "except ortgpu.RendezvousError as error:\n"
        "    print(error.ranks, error.evidence[-1])\n"
    )
    done = run_python(program, env={**os.environ, **hanging})
    assert done.stdout == "(0,) the resolver gave no answer in time: node1:23456\n", done
    assert launchers.processes_with(mark) == ()


_FALSE_RANK_0 = """
import socket, sys
from ortgpu.distributed.wire import encode, error_to_message, proof
from ortgpu.errors import GPUError

verdict = error_to_message(GPUError("of a stranger"))
said = {
    "flood": b"\\0\\0\\0\\2{}" * 10_000,
    "unproved": encode({"challenge": "x"}) + encode({"verdict": verdict}),
    "early": encode({"verdict": verdict}),
    "letters": encode({"challenge": "x"}) + encode({"in": True, "proof": "\\ud800"}),
    "rude": encode({"challenge": "x"}) + encode({"refused": "does not answer as rank 0 does\\x1b[2J"}),
    "garbage": encode({"challenge": "x"}),
    "number": encode({"challenge": "x"}),
}[sys.argv[1]]
welcome = 10**999 if sys.argv[1] == "number" else "soon"
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connected, _ = listener.accept()
    try:
        if sys.argv[1] in ("garbage", "number"):  # of one who knows the key, which follows from the port
            connected.sendall(said)
            from ortgpu.environment.ranks import short_name
            from ortgpu.distributed.wire import FROM_A_RANK, Decoder

            (hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
            own = proof(short_name(str(listener.getsockname()[1])), "rank 0", hello["challenge"])
            connected.sendall(encode({"in": True, "proof": own}) + encode({"welcome": welcome}))
            connected.recv(1 << 16)
        else:
            while True:
                connected.sendall(said)
                if sys.argv[1] != "flood":
                    connected.recv(1)
    except OSError:
        pass
"""


@pytest.mark.lab
@pytest.mark.parametrize("said", ["flood", "unproved", "early", "letters", "rude", "garbage", "number"])
def test_somebody_else_is_there_in_the_place_of_rank_0(said: str) -> None:
    """It neither keeps a rank from its deadline nor ends it with an error of its own making."""
    server = subprocess.Popen([sys.executable, "-c", _FALSE_RANK_0, said], stdout=subprocess.PIPE)
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


_ADMITTING = """
import socket
from ortgpu.distributed.wire import FROM_A_RANK, Decoder, encode, error_to_message, proof
from ortgpu.environment.ranks import short_name
from ortgpu.errors import RendezvousError

listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
print(port, flush=True)
connected, _ = listener.accept()
connected.sendall(encode({"challenge": "x"}))
(hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
said = {"in": True, "proof": proof(short_name(str(port)), "rank 0", hello["challenge"])}
verdict = encode({"verdict": error_to_message(RendezvousError("of another rank", ranks=(2,)))})
"""
_DECIDING_AT_ONCE = """
connected.sendall(encode(said) + encode({"welcome": 9.0}) + verdict)
while connected.recv(1 << 16):
    pass
"""
_DECIDING_AFTER_THE_FACTS = """
connected.sendall(encode(said) + encode({"welcome": 30.0}))
decoder, heard = Decoder(FROM_A_RANK), []
while not (heard := [message for message in heard if "post" in message]):
    heard = decoder.feed(connected.recv(1 << 16))
(own,) = (message["value"] for message in heard)
others = {**own, "facts": {**own["facts"], "rank": 0}}
connected.sendall(encode({"all": [others, own]}) + verdict)
while connected.recv(1 << 16):
    pass
"""


def preflight_with(rank_0: str, rank: Rank, timeout: float) -> GPUError:
    """The error of a preflight whose rank 0 is this program."""
    server = subprocess.Popen([sys.executable, "-c", rank_0], stdout=subprocess.PIPE)
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


_SLOW = """
import socket, sys, time
from ortgpu.distributed.wire import FROM_A_RANK, Decoder, encode

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connected, _ = listener.accept()
time.sleep(1)
connected.sendall(encode({"challenge": "x"}))
(hello,) = Decoder(FROM_A_RANK).feed(connected.recv(1 << 16))
connected.sendall(encode({"refused": f"{max(hello['seconds'])} seconds are left"}))
"""


@pytest.mark.lab
def test_a_rank_0_that_is_slow_is_told_the_time_that_is_left() -> None:
    """Else it would decide when the rank has given it up, and be blamed."""
    error = preflight_with(_SLOW, Rank(1, 2, 1, 2), 4)
    left = next(fact for fact in error.evidence if " seconds are left: " in fact)
    assert float(left.partition(" ")[0]) < 4 - 1


@pytest.mark.lab
def test_a_verdict_that_comes_with_the_admission() -> None:
    """The last rank of a job in which another has failed: it is let in and told at once, perhaps in one packet."""
    error = preflight_with(_ADMITTING + _DECIDING_AT_ONCE, Rank(1, 3, 1, 3), 10)
    assert isinstance(error, RendezvousError)
    assert (error.summary, error.ranks) == ("of another rank", (2,))


@pytest.mark.lab
def test_a_verdict_that_comes_after_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank reads the facts when the others have gone for what is in them: it raises the same as they."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    error = preflight_with(_ADMITTING + _DECIDING_AFTER_THE_FACTS, Rank(1, 2, 1, 2), 40)
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
    program = (
        "import resource, ortgpu\n"
        "from ortgpu.distributed import Rank, preflight\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))\n"
        "try:\n"
        "    preflight(4, rank=Rank(0, 2, 0, 2, 'openmpi'))\n"
        "except ortgpu.RendezvousError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "    print(error.summary)\n"
    )
    done = run_python(program, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
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
    program = (
        "import os, sys\n"
        "found = os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 50)\n"
        "os.closerange(0, 50)\n"
        "from ortgpu.distributed import preflight\n"
        "try:\n"
        "    preflight(20)\n"
        "except Exception as error:\n"
        "    os.write(found, str(error).encode())\n"
    )
    run_python(program, str(tmp_path / "found"), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
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
