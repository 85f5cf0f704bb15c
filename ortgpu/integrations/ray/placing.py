"""Placement of the ranks of a job in a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

from ...environment.ranks import Rank


def strategy_for(count: int, nodes: int) -> str:
    """Return Ray's placement strategy that spreads ``count`` ranks over as many of the ``nodes`` as possible."""
    if nodes <= 1:
        return "STRICT_PACK"
    return "STRICT_SPREAD" if count <= nodes else "SPREAD"


def ranks_of(nodes: Sequence[str]) -> list[Rank]:
    """Return the ranks of a job. ``nodes`` has the node id of each rank, in order."""
    every = list(nodes)
    return [
        Rank(number, len(every), every[:number].count(node), every.count(node)) for number, node in enumerate(every)
    ]


def address_of(places: Sequence[tuple[str, str, int]]) -> str:
    """Return the address at which rank 0 listens. ``places`` has node id, node address and port of each rank.

    If all ranks are on one node, it is the loopback address, which the network cannot reach.
    """
    _, ip, port = places[0]
    host = "127.0.0.1" if len({node for node, _, _ in places}) == 1 else ip
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
