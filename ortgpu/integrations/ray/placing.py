"""Where the ranks of a job go in a Ray cluster, and which rank is where."""

from __future__ import annotations

from collections.abc import Sequence

from ...environment.ranks import Rank


def strategy_for(count: int, nodes: int) -> str:
    """Ray's name for how ``count`` ranks go on so many ``nodes`` with GPUs: on as many of them as can be."""
    if nodes <= 1:
        return "STRICT_PACK"
    return "STRICT_SPREAD" if count <= nodes else "SPREAD"


def ranks_of(nodes: Sequence[str]) -> list[Rank]:
    """The ranks of a job. ``nodes``: the id of the node that each is on, in their order."""
    every = list(nodes)
    return [
        Rank(number, len(every), every[:number].count(node), every.count(node)) for number, node in enumerate(every)
    ]


def address_of(places: Sequence[tuple[str, str, int]]) -> str:
    """Where rank 0 listens, for all ranks. ``places``: node id, its address and a port of it, of each rank.

    The loopback where nobody is elsewhere: then it cannot be reached from the network.
    """
    _, ip, port = places[0]
    host = "127.0.0.1" if len({node for node, _, _ in places}) == 1 else ip
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
