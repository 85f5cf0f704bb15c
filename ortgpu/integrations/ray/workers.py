"""GPUs of Ray's workers: sessions in them, a trial of one from the driver, batches of Ray Data, and a preflight."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...errors import GPUError, NoDeviceError, RendezvousError, manual
from ...process.background import this_thread
from .assignment import address_of, ranks_of

if TYPE_CHECKING:
    from ...distributed.reports import Collective, PreflightReport
    from ...environment.ranks import Rank
    from ...provider.devices import Device
    from ...session.gpu_session import GPUSession

_GRACE = 15.0  # seconds for Ray to pass on the result of a rank


def open_session(
    path_or_bytes: str | bytes | os.PathLike[str],
    sess_options: Any | Callable[[], Any] = None,
    providers: Sequence[Any] | None = None,
    provider_options: Sequence[dict[Any, Any]] | None = None,
    **settings: Any,
) -> GPUSession:
    """Open a GPUSession on the GPU that Ray assigned to this worker. Call it inside an actor or a task.

    The arguments are the same as for GPUSession. Pass ``sess_options`` as a function that returns SessionOptions,
    because SessionOptions cannot be sent to a worker. ``device`` counts among the assigned GPUs and may be left out if
    there is only one. With ``allow_cpu`` a worker without a GPU runs on the CPU.

    The session's GPU is compared with the assigned one by UUID. This is not possible without NVML, or if CUDA may
    number the GPUs of the node in another order (different models without CUDA_DEVICE_ORDER=PCI_BUS_ID).

    Raises:
        NoDeviceError: Ray assigned no GPU.
        RankDeviceError: Ray assigned several GPUs and ``device`` names none, or CUDA shows this worker other GPUs.
        GPUError, Exception: as GPUSession raises. Outside of a worker, an error of Ray.

    Call it in a method of an actor, not in ``__init__``: its errors reach the driver only as text.
    """
    from .session import AssignedSession  # The driver may lack ONNX Runtime.

    return AssignedSession(path_or_bytes, sess_options, providers, provider_options, **settings)


def probe(*arguments: Any, num_gpus: float = 1, timeout: float = 60.0, **settings: Any) -> Device:
    """Open and close a session in a task of its own, and raise its errors here with their type.

    Use it before a long job, or before calls that report failures only as text, such as ``serve.run``. It proves that
    one worker on one node can open the session, not that all can.

    Args:
        arguments, settings: as for :func:`open_session`.
        timeout: seconds for the task, with the wait for a free GPU.

    Raises:
        NoDeviceError: Ray had no GPU for the task before the deadline.
        GPUError, Exception: as :func:`open_session` raised.
    """
    task = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(_open_and_close)
    result = task.remote(arguments, settings)
    done, _ = ray.wait([result], timeout=timeout)
    if not done:
        ray.cancel(result, force=True)
        raise _no_gpu_in_time(f"ran no task with num_gpus={num_gpus} to its end within {timeout:g} s")
    device: Device = _result_of(result)
    return device


def _open_and_close(arguments: Sequence[Any], settings: dict[str, Any]) -> Device:
    with open_session(*arguments, **settings) as session:
        return session.device


def _result_of(result: Any) -> Any:
    """Return ``ray.get(result)``. Raises the original GPUError in place of the object that Ray raises for it."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GPUError):
            raise error.cause from error
        raise


def _no_gpu_in_time(what: str) -> NoDeviceError:
    """Return the error for a GPU that Ray did not provide in time. ``what`` completes a sentence about Ray."""
    return NoDeviceError(
        f"Ray {what}",
        evidence=[
            f"GPUs of the cluster: {ray.cluster_resources().get('GPU', 0):g}",
            f"not in use: {ray.available_resources().get('GPU', 0):g}",
        ],
        fixes=[
            manual("start Ray on nodes with GPUs, or free one: `ray status` lists what is in use", needs="host"),
            manual("or raise timeout= where it takes longer than that"),
        ],
    )


class RayGPUSession:
    """A callable class for ``ray.data.Dataset.map_batches``, with a session in each actor on its assigned GPU.

    The arguments, given as ``fn_constructor_args``, are the same as for
    :func:`~ortgpu.integrations.ray.open_session`. Each actor opens a path on its own node. Bytes go to the object store
    once, whatever the number of actors.

    The first batch opens the session, not the constructor, so an error keeps its type on the way to the driver.
    (Ray Data wrongly logs it as an error of its own code.) Each actor takes one of Ray's CPUs beside its GPU, unless
    ``num_cpus=0`` is set. Tasks that read data take a CPU too. If no CPU is left for them, Ray Data waits forever.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._arguments, self._settings = arguments, settings
        self._session: GPUSession | None = None
        self._lock = threading.RLock()  # ActorPoolStrategy(enable_true_multi_threading=True) calls from many threads

    @property
    def session(self) -> GPUSession:
        """The session, opened at first use. Raises the errors of :func:`~ortgpu.integrations.ray.open_session`."""
        with this_thread.holds, self._lock:
            if self._session is None:
                self._session = open_session(*self._arguments, **self._settings)
            return self._session

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the model by name, with the columns of ``batch`` that are not inputs.

        ``batch`` is in Ray Data's default format "numpy": arrays by column. The first axis counts the rows.

        Raises:
            ValueError: an output has the name of a column that is no input.
            GPUError, Exception: as :func:`open_session` and ``run`` raise.
        """
        try:
            session = self.session
            inputs = {entry.name for entry in session.get_inputs()}
            columns = {name: column for name, column in batch.items() if name not in inputs}
            names = [entry.name for entry in session.get_outputs()]
            twice = sorted(set(columns) & set(names))
            if twice:
                raise ValueError(
                    f"outputs of the model and columns of the batch have the same name: {', '.join(twice)}"
                )
            feed = {name: column for name, column in batch.items() if name in inputs}
            return {**columns, **dict(zip(names, session.run(names, feed), strict=True))}
        except GPUError:
            import ray.data  # Only a worker of Ray Data gets here.

            # Otherwise Ray Data wraps it in a UserCodeException, and that loses its cause on the way to the driver.
            ray.data.DataContext.get_current().raise_original_map_exception = True
            raise


def preflight(
    num_ranks: int | None = None, timeout: float = 120.0, *, calls: Sequence[Collective] | None = None
) -> PreflightReport:
    """Run :func:`ortgpu.distributed.preflight` between actors with one GPU each. The driver calls it.

    Each rank is on its own node if the cluster has enough nodes; otherwise the ranks are spread over its nodes. They
    meet at the node of rank 0, at a port that was free there. Every node needs ortgpu and its extra ``distributed``.

    Args:
        num_ranks: None means one for each GPU of the cluster.
        timeout: seconds for everything, with the wait for free GPUs and the start of the actors. An actor that has not
            answered by then gets 15 seconds more.
        calls: as for :func:`ortgpu.distributed.preflight`.

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
        raise _no_gpu_in_time("has no GPU for a rank")
    nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1)
    group = placement_group([{"GPU": 1}] * count, strategy="STRICT_SPREAD" if count <= nodes else "SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(timeout):
            raise _no_gpu_in_time(f"had not {count} GPUs for a rank each within {timeout:g} s")
        actors = [_start(group, number) for number in range(count)]
        places = _gather([actor.place.remote() for actor in actors], deadline, "start of the ranks")
        address = address_of(places)
        seconds = max(deadline - time.monotonic(), 1.0)
        jobs = [
            actor.run.remote(rank, address, seconds, calls)
            for actor, rank in zip(actors, ranks_of([node for node, _, _ in places]), strict=True)
        ]
        reports: list[PreflightReport] = _gather(jobs, deadline + _GRACE, "preflight")
        return reports[0]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


class _RankActor:
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
            values.append(_result_of(result))
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
