"""Facts about the network of this machine, from sysfs: interfaces, their speed, InfiniBand ports.

What lies between two machines is not among them: a fast card may be plugged into a slow switch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOOPBACK: Final = 772  # ARPHRD_LOOPBACK, linux/if_arp.h


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface other than the loopback. None means unknown."""

    name: str
    up: bool | None
    speed: int | None  # Mb/s, as the driver of the card says; virtual interfaces often say nothing, or a made-up 10000
    virtual: bool  # no device of the machine is behind it: a bridge, one end of a veth pair


@dataclass(frozen=True, slots=True)
class InfinibandPort:
    device: str  # "mlx5_0"
    port: int
    active: bool | None
    rate: float | None  # Gb/s
    link_layer: str | None  # "InfiniBand", or "Ethernet" for RoCE


@dataclass(frozen=True, slots=True)
class Network:
    """None: sysfs cannot be read, as on systems other than Linux. An empty tuple: there is none."""

    interfaces: tuple[Interface, ...] | None
    infiniband: tuple[InfinibandPort, ...] | None


def read_network(root: Path = Path("/")) -> Network:
    """Read what the kernel says below ``root``/sys/class. Nothing raises.

    A container has a network namespace of its own and sees the virtual interface that it was given; InfiniBand devices
    are shown in every container, whether they may be used there or not.
    """
    classes = root / "sys/class"
    interfaces = _entries(classes / "net")
    devices = _entries(classes / "infiniband") if interfaces is not None or (classes / "infiniband").is_dir() else None
    if interfaces is not None and devices is None:
        devices = []  # the kernel makes this folder with the first device
    return Network(
        None if interfaces is None else tuple(_interface(one) for one in interfaces if _kind(one) != _LOOPBACK),
        None if devices is None else tuple(port for one in devices for port in _ports(one)),
    )


def parse_rate(text: str | None) -> float | None:
    """Gb/s of "200 Gb/sec (4X HDR)"."""
    match = re.match(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", text or "")
    return float(match[1]) if match else None


def parse_port_state(text: str | None) -> bool | None:
    """Whether "4: ACTIVE" is active; None where it says nothing."""
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


def _kind(folder: Path) -> int | None:
    return _number(folder / "type")


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
