"""Sessions inside Ray workers, and a trial of one from the driver."""

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
    """Open a GPUSession on the GPU that Ray assigned to this worker. Call it inside an actor or a task.

    The arguments are those of GPUSession. ``sess_options`` may be a function that returns them, because SessionOptions
    cannot be sent to a worker. ``device`` counts among the assigned GPUs and may be left out if there is only one. With
    ``allow_cpu`` a worker without a GPU runs on the CPU.

    The session's GPU is compared with the assigned one by UUID. This is not possible without NVML, or if CUDA may
    number the GPUs of the node in another order (different models without CUDA_DEVICE_ORDER=PCI_BUS_ID).

    Raises:
        NoDeviceError: Ray assigned no GPU.
        RankDeviceError: Ray assigned several GPUs and ``device`` names none, or CUDA shows this worker other GPUs.
        GPUError, Exception: as GPUSession raises. Outside of a worker, an error of Ray.

    Call it in a method of an actor, not in ``__init__``, whose errors reach the driver only as text.
    """
    from .session import AssignedSession  # not above: the driver may lack ONNX Runtime

    options = sess_options() if callable(sess_options) else sess_options
    return AssignedSession(path_or_bytes, options, providers, provider_options, **settings)


def probe(*arguments: Any, num_gpus: float = 1, timeout: float = 60.0, **settings: Any) -> Device:
    """Open and close a session in a task of its own, and raise its errors here with their type.

    Use it before a long job, or before calls that report failures only as text, such as ``serve.run``. It proves that
    one worker on one node can open the session, not that all can.

    Args:
        arguments, settings: as for :func:`open_session`.
        num_gpus: the GPUs that the task asks Ray for.
        timeout: seconds for the task, with the wait for a free GPU.

    Returns:
        The device of the session.

    Raises:
        NoDeviceError: Ray had no GPU for the task before the deadline.
        GPUError, Exception: as :func:`open_session` raised.
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
    """Return ``ray.get(result)``. Raises the original GPUError in place of the object that Ray raises for it."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GPUError):
            raise error.cause from error
        raise


def no_gpu_in_time(what: str) -> NoDeviceError:
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


def _open_and_close(arguments: Sequence[Any], settings: dict[str, Any]) -> Device:
    with open_session(*arguments, **settings) as session:
        return session.device
