"""The network of a machine, read from made-up folders of /sys and from those of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ortgpu.distributed.environment.network import (
    InfinibandPort,
    Interface,
    Network,
    parse_port_state,
    parse_rate,
    read_network,
)
from tests.support.made_files import write

CARD = {"type": "1\n", "operstate": "up\n", "device/vendor": "0x15b3\n"}


def machine(root: Path, **interfaces: Mapping[str, str]) -> Path:
    for name, files in interfaces.items():
        write(root / "sys/class/net" / name, files)
    return root


def test_interfaces_and_their_speed(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        lo={"type": "772\n", "operstate": "unknown\n"},
        eth0={**CARD, "speed": "100000\n"},
        eth1={**CARD, "operstate": "down\n", "speed": "-1\n"},
        docker0={"type": "1\n", "operstate": "unknown\n", "speed": "10000\n"},
        wlan0={**CARD},
    )
    assert read_network(root) == Network(
        (
            Interface("docker0", None, 10_000, virtual=True),
            Interface("eth0", True, 100_000, virtual=False),
            Interface("eth1", False, None, virtual=False),
            Interface("wlan0", True, None, virtual=False),
        ),
        (),
    )


@pytest.mark.parametrize("text", ["", "fast\n", "-1\n", "0\n", "99999999999999\n", "\udcff"], ids=repr)
def test_speed_that_says_nothing_is_unknown(text: str, tmp_path: Path) -> None:
    root = machine(tmp_path, eth0=CARD)
    (root / "sys/class/net/eth0/speed").write_bytes(text.encode("utf-8", "surrogateescape"))
    interfaces = read_network(root).interfaces
    assert interfaces is not None
    assert [card.speed for card in interfaces] == [None]


def test_infiniband_ports(tmp_path: Path) -> None:
    port = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n", "link_layer": "InfiniBand\n"}
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1", port)
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/10", {**port, "state": "1: DOWN\n"})
    write(
        tmp_path / "sys/class/infiniband/mlx5_1/ports/1", {"rate": "25 Gb/sec (1X EDR)\n", "link_layer": "Ethernet\n"}
    )
    machine(tmp_path, eth0=CARD)
    assert read_network(tmp_path).infiniband == (
        InfinibandPort("mlx5_0", 1, True, 200.0, "InfiniBand"),
        InfinibandPort("mlx5_0", 10, False, 200.0, "InfiniBand"),
        InfinibandPort("mlx5_1", 1, None, 25.0, "Ethernet"),
    )


def test_without_sysfs_nothing_is_known(tmp_path: Path) -> None:
    assert read_network(tmp_path) == Network(None, None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400 Gb/sec (4X NDR)\n", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), (None, None), ("fast", None)],
)
def test_rate(text: str | None, rate: float | None) -> None:
    assert parse_rate(text) == rate


def test_port_state() -> None:
    assert [parse_port_state(text) for text in ("4: ACTIVE", "2: INIT", "", None)] == [True, False, None, None]


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="sysfs tells which interfaces there are")
def test_this_machine_has_the_interfaces_that_the_kernel_lists() -> None:
    interfaces = read_network().interfaces
    assert interfaces is not None
    assert {card.name for card in interfaces} == set(os.listdir("/sys/class/net")) - {"lo", "bonding_masters"}
