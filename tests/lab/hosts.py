"""Several hosts on one machine: Linux namespaces, each with a network, a name, mounts and shared memory of its own.

A switch joins them, a bridge in a namespace of its own, with a cable to each host. Nothing else is connected to it. All
processes of hosts are in the process namespace of the switch, and end with it. Files are this machine's, but for those
that are mounted over: /etc/hosts, /dev/shm, and the folder for temporary ones.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_TOOLS = ("unshare", "nsenter", "mount", "ip")  # of util-linux and iproute2
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # which is not every user's
_OF_A_HOST = ("--net", "--mount", "--uts", "--ipc")
_DEADLINE = 30.0

_TRY = """
mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; mount --bind /dev/null /etc/hosts; mount -t proc proc /proc
hostname try
ip link add name switch type bridge; ip link add name a type veth peer name b; ip addr add fd77::1/64 dev a
"""


@functools.cache
def why_not_here() -> str | None:
    """Why this machine cannot be several hosts, or None when it can."""
    if sys.platform != "linux":
        return f"hosts are namespaces of Linux, and this is {sys.platform}"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"hosts are made by {', '.join(missing)}, which is not here: apt install util-linux iproute2"
    try:
        _run(["unshare", *_OF_A_HOST, "--pid", "--fork", "sh", "-ec", _TRY])
    except subprocess.CalledProcessError as error:
        return f"hosts cannot be made here: {error.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Host:
    """``variables``: what its processes have in their environment, beside what they are started with."""

    name: str
    address: str
    hosts_file: Path
    port: str  # of the switch
    process: int  # which keeps its namespaces
    process_inside: int  # its number among the processes of all hosts
    variables: Mapping[str, str]

    def command(self, arguments: Sequence[str], *, from_host: bool = False) -> list[str]:
        """What runs ``arguments`` here: outside of the network, or ``from_host`` on any of its hosts."""
        namespaces = ["--target", str(self.process_inside if from_host else self.process), *_OF_A_HOST]
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return ["nsenter", *namespaces, *([] if from_host else ["--pid"]), "--", "env", *variables, *arguments]

    def run(self, script: str) -> str:
        """The output of a shell script here. Raises CalledProcessError where it fails."""
        return _run(self.command(["sh", "-ec", script]))


class Network:
    """Hosts that know each other by name, at 10.77.0.1 and fd77::1, and so on in their order.

    TMPDIR names one path on all of them, and a folder of its own on each.
    """

    def __init__(self, folder: Path) -> None:
        self.hosts: list[Host] = []
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._keepers = contextlib.ExitStack()
        switch = ["unshare", "--net", "--pid", "--fork", "--kill-child"]
        self._switch, _ = self._keep(switch, "ip link add name switch up type bridge")

    def add(self, name: str, variables: Mapping[str, str] | None = None) -> Host:
        number = len(self.hosts) + 1
        own = self._folder / f"host{number}"
        (own / "tmp").mkdir(parents=True)
        hosts_file = own / "hosts"
        hosts_file.touch()
        process, inside = self._keep(
            [*self._in_switch("--pid"), "unshare", *_OF_A_HOST],
            f"""
            mount --make-rprivate /
            mount -t tmpfs tmpfs /dev/shm
            mount --bind {hosts_file} /etc/hosts
            mount --bind {own / "tmp"} {self._temporary}
            hostname {name}
            ip link set lo up
            """,
        )
        port, address = f"port{number}", f"10.77.0.{number}"
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(process)]
        _run(self._in_switch("--net", "ip", "link", "add", "name", port, "master", "switch", "up", *cable))
        temporary = {"TMPDIR": str(self._temporary), "XDG_RUNTIME_DIR": str(self._temporary)}
        host = Host(name, address, hosts_file, port, process, inside, {**temporary, **(variables or {})})
        host.run(
            "mount -t proc proc /proc;"
            f"ip addr add {address}/24 dev eth0; ip addr add fd77::{number}/64 dev eth0 nodad; ip link set eth0 up"
        )
        self.hosts.append(host)
        for each in self.hosts:
            self.tell_names(each, {one.name: [one.address] for one in self.hosts})
        return host

    def tell_names(self, host: Host, addresses: Mapping[str, Sequence[str]]) -> None:
        """What this host knows the others by, beside localhost; in this order."""
        known = {"localhost": ["127.0.0.1", "::1"], **addresses}
        lines = [f"{address} {name}\n" for name, some in known.items() for address in some]
        host.hosts_file.write_text("".join(lines), encoding="utf-8")

    def unplug(self, host: Host) -> None:
        """Pull its cable: what is sent on it is lost, and nobody is told."""
        self._set_port(host, "down")

    def drop_larger(self, host: Host, size: int) -> None:
        """Lose packets to this host that are longer, without a word: the way to it has another MTU than its ends."""
        self._set_port(host, "mtu", str(size))

    def agent(self) -> Path:
        """A program that mpirun can call in ssh's place: options, a host, and what is to be run there."""
        commands = {host.name: shlex.join(host.command(["sh", "-c"], from_host=True)) for host in self.hosts}
        lines = [
            "#!/bin/sh",
            'while [ "${1#-}" != "$1" ]; do shift; done',
            "host=$1; shift",
            "case $host in",
            *(f'{name}) exec {command} "$*";;' for name, command in commands.items()),
            'esac; echo "no host $host" >&2; exit 255\n',
        ]
        path = self._folder / "agent"
        path.write_text("\n".join(lines), encoding="utf-8")
        path.chmod(0o755)
        return path

    def close(self) -> None:
        """End every process on these hosts."""
        self._keepers.close()

    def _set_port(self, host: Host, *setting: str) -> None:
        _run(self._in_switch("--net", "ip", "link", "set", host.port, *setting))

    def _in_switch(self, *arguments: str) -> list[str]:
        return ["nsenter", "--target", str(self._switch), *arguments]

    def _keep(self, namespaces: Sequence[str], script: str) -> tuple[int, int]:
        """Make namespaces and run ``script`` in them. The number of the process that keeps them, out here and there."""
        told = "read -r number rest < /proc/self/stat; echo $number $$"  # the /proc of out here
        process = subprocess.Popen(
            [*namespaces, "sh", "-ec", f"{script}\n{told}\nexec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._keepers.callback(process.wait, _DEADLINE)
        self._keepers.enter_context(process.stdout)
        self._keepers.enter_context(process.stdin)  # at its end cat ends
        outside, inside = map(int, process.stdout.readline().split())
        return outside, inside


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=True,
        env=_environment(),
    )
    return done.stdout


@contextlib.contextmanager
def network_in(folder: Path) -> Iterator[Network]:
    """A network without hosts yet. Skips the test where it cannot be made."""
    if reason := why_not_here():
        pytest.skip(reason)
    network = Network(folder)
    try:
        yield network
    finally:
        network.close()
