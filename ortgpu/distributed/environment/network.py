"""Facts about the network of this machine: interfaces, their speed, InfiniBand ports, and hosts that ssh reaches.

The network between two machines is not known: a fast card may be plugged into a slow switch.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...environment.child import run

_LOOPBACK: Final = 772  # ARPHRD_LOOPBACK, linux/if_arp.h
_CONNECT_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface other than the loopback. None means unknown."""

    name: str
    up: bool | None
    speed: int | None  # Mb/s, by the card's driver; virtual interfaces often report nothing, or a made-up 10000
    virtual: bool  # not a device of the machine: a bridge, one end of a veth pair

    def __str__(self) -> str:
        return f"{self.name}: {f'{self.speed} Mb/s' if self.speed is not None else 'speed not known'}"


@dataclass(frozen=True, slots=True)
class InfinibandPort:
    device: str  # "mlx5_0"
    port: int
    active: bool | None
    rate: float | None  # Gb/s
    link_layer: str | None  # "InfiniBand", or "Ethernet" for RoCE

    def __str__(self) -> str:
        rate = f"{self.rate:g} Gb/s" if self.rate is not None else "of unknown rate"
        return f"{self.device} port {self.port}: {self.link_layer or 'link layer not known'}, {rate}"


@dataclass(frozen=True, slots=True)
class Network:
    """The network interfaces. None means that sysfs cannot be read, as on systems other than Linux."""

    interfaces: tuple[Interface, ...] | None
    infiniband: tuple[InfinibandPort, ...] | None

    @property
    def cards(self) -> list[Interface]:
        """The network cards that are not known to be down."""
        return [card for card in self.interfaces or () if card.up is not False and not card.virtual]


@dataclass(frozen=True, slots=True)
class SshAttempt:
    """``returncode`` is that of the remote command, or 255 if ssh failed (ssh(1)). None: no end, or no ssh."""

    host: str
    program: str | None  # path of ssh; None: there is none
    returncode: int | None
    errors: str = ""
    timed_out: bool = False


def read_network(root: Path = Path("/")) -> Network:
    """Read the kernel's facts below ``root``/sys/class. Nothing raises.

    A container has its own network namespace and shows the virtual interface that it was given. It shows all InfiniBand
    devices, even those that it may not use.
    """
    classes = root / "sys/class"
    folders = _entries(classes / "net")
    interfaces = None if folders is None else [one for one in folders if _number(one / "type") != _LOOPBACK]
    devices = _entries(classes / "infiniband")
    if interfaces is not None and devices is None:
        devices = []  # the kernel makes this folder with the first device
    return Network(
        None if interfaces is None else tuple(map(_interface, interfaces)),
        None if devices is None else tuple(port for one in devices for port in _ports(one)),
    )


def try_ssh(host: str, *, timeout: float = 20.0) -> SshAttempt:
    """Run ``true`` on ``host`` through ssh, with this user's configuration and no password. Nothing raises."""
    program = shutil.which("ssh")
    if program is None:
        return SshAttempt(host, None, None)
    # A shared connection (ControlMaster) would stay in the background, or hide that a new one cannot be opened.
    options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ControlPath=none"]
    command = [program, *(word for option in options for word in ("-o", option)), "--", host, "true"]
    ended = run(command, timeout=timeout)
    return SshAttempt(host, program, ended.returncode, ended.errors.strip(), ended.timed_out)


def parse_rate(text: str | None) -> float | None:
    """Return the Gb/s of "200 Gb/sec (4X HDR)"."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text or "")
    return float(match[1]) if match else None


def parse_port_state(text: str | None) -> bool | None:
    """Return True for "4: ACTIVE". None means unknown."""
    match = re.match(r"\s*([0-9]): ", text or "")
    return match[1] == "4" if match else None  # IB_PORT_ACTIVE, rdma/ib_verbs.h


def _interface(folder: Path) -> Interface:
    speed = _number(folder / "speed")
    state = (_text(folder / "operstate") or "").strip()
    return Interface(
        name=folder.name,
        up=None if state in ("", "unknown") else state == "up",
        speed=speed if speed is not None and speed > 0 else None,  # -1: no carrier, or unknown
        virtual=not (folder / "device").exists(),
    )


def _ports(device: Path) -> list[InfinibandPort]:
    numbered = [one for one in _entries(device / "ports") or [] if one.name.isdigit()]
    return [
        InfinibandPort(
            device.name,
            int(one.name),
            parse_port_state(_text(one / "state")),
            parse_rate(_text(one / "rate")),
            (_text(one / "link_layer") or "").strip() or None,
        )
        for one in sorted(numbered, key=lambda one: int(one.name))
    ]


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _entries(folder: Path) -> list[Path] | None:
    try:
        return sorted(one for one in folder.iterdir() if one.is_dir())
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:  # `speed` of an interface without a link cannot be read: EINVAL
        return None
