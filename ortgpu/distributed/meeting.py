"""The place where the ranks of a preflight meet: the address of rank 0, and how the others learn of it.

On one host rank 0 takes any free port and writes it, with a random key, to a file that only this user can read. Between
hosts the caller gives the address. Or the launcher names rank 0's host, and the port follows from the job's identity,
because the one in MASTER_PORT is torchrun's own. There the key follows from the port or the identity. It tells jobs
apart and keeps nobody out, unless all ranks were given a secret.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..environment.child import parse_answer, run_python
from ..environment.ranks import (
    FOLDER_NEEDED,
    Rank,
    identity_between_hosts,
    identity_of,
    is_told_apart_by_starter,
    runtime_folder,
    short_name,
)
from ..errors import RendezvousError, manual

_PORTS = range(21_000, 29_000)  # below 29500, torchrun's default, and below Linux's ephemeral ports
_TRIED = 8  # ports of a job; rank 0 takes the first that is free
_LOOPBACK = "127.0.0.1"
SECRET = "ORTGPU_PREFLIGHT_SECRET"  # noqa: S105 - the name of a variable
SECRET_FILE = "ORTGPU_PREFLIGHT_SECRET_FILE"  # noqa: S105 - as above
_NAME_THE_JOB = (
    "set MASTER_ADDR and MASTER_PORT, the same on every rank: without them only ranks that one process started find "
    "each other"
)
_RESOLVE = """
import json, socket
try:
    print(json.dumps([entry[4][0] for entry in socket.getaddrinfo(sys.argv[1], None, type=socket.SOCK_STREAM)]))
except (OSError, UnicodeError) as error:
    sys.exit(f"no host has such a name: {error}" if isinstance(error, UnicodeError) else str(error))
"""


@dataclass(frozen=True, slots=True)
class Address:
    """An address to connect to, with the key that both sides must know."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def meeting_of(rank: Rank, address: str | None) -> Meeting:
    """Return the meeting of this job's ranks. Raises ValueError for an ``address`` that is not HOST:PORT."""
    if address is not None:
        host, port = parse_address(address)
        # The key leaves the host out, since each rank may have another name for it.
        return _Named(host, [port], _key(rank, str(port)), is_local=rank.share_one_host and is_loopback(host))
    if rank.share_one_host and (rank.launcher is not None or rank.world_size == 1):
        own = identity_of(rank) if rank.launcher is not None else f"process {os.getpid()}"
        try:
            ways = (_NAME_THE_JOB,) if is_told_apart_by_starter(rank) else ()
            return _Published(runtime_folder() / f"meeting-{short_name(f'{own} {_loopback()}')}", ways)
        except OSError as error:
            raise RendezvousError(
                "there is no folder by which the ranks of this host can find each other",
                evidence=[str(error)],
                fixes=[
                    FOLDER_NEEDED,
                    manual("or give them an address: ortgpu preflight --address 127.0.0.1:PORT"),
                ],
                ranks=(rank.rank,),
                phase="rendezvous",
            ) from error
    identity = identity_between_hosts(rank)
    if rank.master_address is None or identity is None:
        host = socket.gethostname() if rank.rank == 0 else "HOST"
        raise RendezvousError(
            f"nothing says where the {rank.world_size} ranks can meet",
            evidence=[f"launcher: {rank.launcher or 'none'}", f"ranks on this host: {rank.local_world_size}"],
            fixes=[
                manual(
                    "name a host name of rank 0's machine and a free port of it, the same on every rank: "
                    f"ortgpu preflight --address {host}:PORT, or preflight(address=...)"
                ),
                *([manual("or set MASTER_ADDR and MASTER_PORT")] if rank.launcher == "environment" else []),
            ],
            ranks=(rank.rank,),
            phase="rendezvous",
        )
    return _Named(rank.master_address, ports_of(identity), _key(rank, identity))


def _key(rank: Rank, identity: str) -> str:
    """Return the key of a job. With a secret, nobody else can know it."""
    variable = next((name for name in (SECRET, SECRET_FILE) if name in os.environ), None)
    if variable is None:
        return short_name(identity)
    try:
        value = os.environ[variable]
        secret = (os.fsencode(value) if variable == SECRET else Path(value).read_bytes()).strip()
        if not secret:  # a command that failed leaves it empty, and the ranks would meet without a secret
            raise OSError("it is empty")
    except (OSError, ValueError) as error:
        raise RendezvousError(
            f"{variable} gives no secret",
            evidence=[str(error)],
            fixes=[manual(f"set {variable} on every rank to the same secret, or unset it on all of them")],
            ranks=(rank.rank,),
            phase="rendezvous",
        ) from None
    return hmac.new(secret, short_name(identity).encode(), hashlib.sha256).hexdigest()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[::1]:port". Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536 and (":" not in host or "[" in text)):
        raise ValueError(f"address={text!r} is not HOST:PORT, as in node1:23456 or [::1]:23456")
    return host, int(port)


def resolve(host: str, timeout: float) -> list[str]:
    """Return the numeric addresses of a host, the best first.

    A child process asks: without an answer, a resolver blocks its caller for half a minute (resolv.conf(5)).
    """
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    ended = run_python(_RESOLVE, host, timeout=timeout)
    addresses = parse_answer(ended.output)
    if not addresses:
        raise OSError("the resolver gave no answer in time" if ended.timed_out else ended.errors.strip())
    return list(map(str, addresses))


def is_loopback(host: str) -> bool:
    """Return True if this name or numeric address means the host itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ports_of(identity: str) -> list[int]:
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).digest()
    parts = [digest[2 * part : 2 * part + 2] for part in range(_TRIED)]
    return [_PORTS[int.from_bytes(part, "big") % len(_PORTS)] for part in parts]


class _Named:
    """A host and ports that all ranks know. Unless ``is_local``, rank 0 listens on all interfaces."""

    ways = ()  # fixes for a rank that does not find rank 0

    def __init__(self, host: str, ports: Sequence[int], key: str, *, is_local: bool = False) -> None:
        self._host, self._ports, self._key, self._is_local = host, ports, key, is_local

    def listen(self) -> tuple[socket.socket, str]:
        refusal: OSError | None = None
        for port in self._ports:
            try:
                return self._listen(port), self._key
            except OSError as error:
                refusal = error
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    break
        raise refusal or OSError("no port to listen at")

    def _listen(self, port: int) -> socket.socket:
        if self._is_local:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            return socket.create_server((self._host, port), family=family)
        # Not at the host's address, because its own name may be 127.0.1.1 to itself
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))

    def addresses(self) -> Sequence[Address]:
        return [Address(self._host, port, self._key) for port in self._ports]

    def __str__(self) -> str:
        return f"at {self._host}, port {', '.join(map(str, self._ports))}"

    def close(self) -> None:
        pass


def _loopback() -> str:
    """Name the network that 127.0.0.1 is in: hosts that share the folder have one each, and so have containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot.strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


class _Published:
    """A file of this user that has rank 0's port and key. It has the methods of :class:`_Named`."""

    def __init__(self, path: Path, ways: Sequence[str]) -> None:
        self._path = path
        self.ways = ways
        self._is_ours = False

    def listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server((_LOOPBACK, 0))
        key = secrets.token_hex(16)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"port": listener.getsockname()[1], "key": key}, file)
            partial.replace(self._path)  # It replaces the file of a killed process.
        except BaseException:
            listener.close()
            partial.unlink(missing_ok=True)
            raise
        self._is_ours = True
        return listener, key

    def addresses(self) -> Sequence[Address]:
        with suppress(OSError, ValueError, KeyError, TypeError):  # The file is not there yet.
            entry = json.loads(self._path.read_text(encoding="utf-8"))
            return [Address(_LOOPBACK, int(entry["port"]), str(entry["key"]))]
        return []

    def __str__(self) -> str:
        return f"at the address in {self._path}"

    def close(self) -> None:
        if self._is_ours:
            self._path.unlink(missing_ok=True)
            self._is_ours = False


Meeting = _Named | _Published
