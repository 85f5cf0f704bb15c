"""A preflight between the GPUs of a Ray cluster, with one rank for each GPU."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...errors import RendezvousError, manual
from .assignment import address_of, ranks_of, strategy_for
from .workers import no_gpu_in_time, result_of

if TYPE_CHECKING:
    from ...distributed.reports import Collective, PreflightReport
    from ...environment.ranks import Rank

_GRACE = 15.0  # seconds for Ray to pass on the result of a rank


def preflight(
    num_ranks: int | None = None, timeout: float = 120.0, *, calls: Sequence[Collective] | None = None
) -> PreflightReport:
    """Run :func:`ortgpu.distributed.preflight` between actors with one GPU each. The driver calls it.

    Each rank is on its own node if the cluster has enough nodes; otherwise the ranks are spread over its nodes. They
    meet at the node of rank 0, at a port that was free there. Every node needs ortgpu and its extra ``distributed``.

    Args:
        num_ranks: the number of ranks; None means one for each GPU of the cluster.
        timeout: seconds for everything, with the wait for free GPUs and the start of the actors. An actor that has not
            answered by then gets 15 seconds more.
        calls: as for :func:`ortgpu.distributed.preflight`.

    Returns:
        The report of rank 0.

    Raises:
        NoDeviceError: Ray did not have enough free GPUs before the deadline.
        GPUError: as :func:`ortgpu.distributed.preflight` raises.
        RendezvousError: an actor did not start, or it ended. ``ranks`` names the ranks concerned.
        ValueError: ``num_ranks`` is less than one, or ``timeout`` is no positive number of seconds.

    No actor and no placement group is left behind.
    """
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} is no number of ranks")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds")
    count = num_ranks if num_ranks is not None else int(ray.cluster_resources().get("GPU", 0))
    deadline = time.monotonic() + timeout
    if count == 0:
        raise no_gpu_in_time("has no GPU for a rank")
    nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1)
    group = placement_group([{"GPU": 1}] * count, strategy=strategy_for(count, nodes))
    actors: list[Any] = []
    try:
        if not group.wait(timeout):
            raise no_gpu_in_time(f"had not {count} GPUs for a rank each within {timeout:g} s")
        actors = [_start(group, number) for number in range(count)]
        places = _gather([actor.place.remote() for actor in actors], deadline, "start of the ranks")
        address = address_of(places)
        left = max(deadline - time.monotonic(), 1.0)
        jobs = [
            actor.run.remote(rank, address, left, calls)
            for actor, rank in zip(actors, ranks_of([node for node, _, _ in places]), strict=True)
        ]
        reports: list[PreflightReport] = _gather(jobs, deadline + _GRACE, "preflight")
        return reports[0]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


class _RankActor:
    """The actor of one rank, in a worker."""

    def place(self) -> tuple[str, str, int]:
        """Return the node id, its address, and a port that was free a moment ago."""
        with socket.create_server(("", 0)) as server:
            port: int = server.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, rank: Rank, address: str, timeout: float, calls: Sequence[Collective] | None) -> PreflightReport:
        from ...distributed import preflight as preflight_of_a_rank

        return preflight_of_a_rank(timeout, rank=rank, address=address, calls=calls)


def _start(group: Any, number: int) -> Any:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return ray.remote(num_cpus=0, num_gpus=1, scheduling_strategy=place)(_RankActor).remote()


def _gather(results: list[Any], deadline: float, phase: str) -> list[Any]:
    """Return all results. A typed error of a rank is raised before an error about ranks that died."""
    ready, missing = ray.wait(results, num_returns=len(results), timeout=max(deadline - time.monotonic(), 0.0))
    died: dict[int, str] = {}
    values = []
    for number, result in enumerate(results):
        if result not in ready:
            continue
        try:
            values.append(result_of(result))
        except ray.exceptions.RayActorError as error:
            died[number] = str(error).splitlines()[0]
    if not died and not missing:
        return values
    concerned = sorted([*died, *(results.index(result) for result in missing)])
    raise RendezvousError(
        f"{len(concerned)} of {len(results)} ranks gave no answer: "
        + ", ".join(f"rank {number} {'died' if number in died else 'was too slow'}" for number in concerned),
        evidence=[f"rank {number}: {text}" for number, text in died.items()],
        fixes=[manual("look into Ray's logs of these workers, or raise timeout=")],
        ranks=tuple(concerned),
        phase=phase,
    )
