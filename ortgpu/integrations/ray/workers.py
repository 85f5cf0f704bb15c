"""A session inside a Ray worker, and a try of it from the driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from ...errors import GPUError, NoDeviceError, manual

if TYPE_CHECKING:
    from ...provider.devices import Device
    from ...session.gpu_session import GPUSession


def open_session(
    path_or_bytes: str | bytes | os.PathLike[str],
    sess_options: Any | Callable[[], Any] = None,
    providers: Sequence[Any] | None = None,
    provider_options: Sequence[dict[Any, Any]] | None = None,
    **settings: Any,
) -> GPUSession:
    """A GPUSession on the GPU that Ray assigned to this worker: inside an actor or a task.

    Arguments are GPUSession's. ``sess_options`` may be a function that makes them, since SessionOptions cannot be sent
    to a worker. ``device`` counts among the assigned GPUs, and may be left out when there is one. ``allow_cpu`` serves
    a worker without a GPU too.

    The UUID of the session's GPU is compared with NVML's of the assigned one. Not compared where NVML cannot be asked,
    or where CUDA may number the GPUs of this node in another order (different models, no CUDA_DEVICE_ORDER).

    Raises:
        NoDeviceError: Ray assigned no GPU.
        RankDeviceError: Ray assigned several and ``device`` names none, or CUDA shows this worker other GPUs.
        GPUError, Exception: as GPUSession. Outside of a worker, what Ray raises there.

    Raised in an actor's ``__init__`` it would reach the driver as text only: call this in a method.
    """
    from .session import AssignedSession  # needs ONNX Runtime, whose absence is the worker's error and not the driver's

    options = sess_options() if callable(sess_options) else sess_options
    return AssignedSession(path_or_bytes, options, providers, provider_options, **settings)


def probe(*arguments: Any, num_gpus: float = 1, timeout: float = 60.0, **settings: Any) -> Device:
    """Open a session in a task of its own and close it: what fails there is raised here, as itself.

    For what tells its failures as text only (``serve.run``), and before a long job. It proves that one worker on one
    node can have the session, not that all can.

    Args:
        arguments, settings: as for :func:`open_session`.
        num_gpus: what the task asks Ray for.
        timeout: seconds until the task has to be done, the wait for a free GPU included.

    Returns:
        The device that the session was on.

    Raises:
        NoDeviceError: Ray had no GPU for the task before the deadline.
        GPUError, Exception: what :func:`open_session` raised.
    """
    task = ray.remote(num_cpus=0, num_gpus=num_gpus, max_retries=0)(_open_and_close)
    result = task.remote(arguments, settings)
    done, _ = ray.wait([result], timeout=timeout)
    if not done:
        ray.cancel(result, force=True)
        raise no_gpu_in_time(f"ran no task with num_gpus={num_gpus} to its end within {timeout:g} s")
    device: Device = result_of(result)
    return device


def result_of(result: Any) -> Any:
    """``ray.get``, with errors of ours as they were raised, where Ray raises an object that stands for them."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GPUError):
            raise error.cause from error
        raise


def no_gpu_in_time(what: str) -> NoDeviceError:
    """``what``: the rest of a sentence about Ray."""
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


def _open_and_close(arguments: Sequence[Any], settings: dict[str, Any]) -> Device:
    with open_session(*arguments, **settings) as session:
        return session.device
