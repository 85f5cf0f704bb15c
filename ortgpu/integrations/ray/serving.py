"""Serving: a deployment for Ray Serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray import serve

from ...provider import lifetime
from . import joining
from .workers import open_session


class ServedGPUSession:
    """A replica with a session on the GPU that Ray assigned to it. :data:`GPUDeployment` is its deployment.

    Args:
        path_or_bytes, sess_options, providers, provider_options, settings: as for
            :func:`~ortgpu.integrations.ray.open_session`. A path is opened by the replica, on its node. Bytes are kept
            by Serve's controller with the configuration: for a large model, give a path.
        max_batch_size: how many requests may be joined into one run. More than 1 is a promise: that the first axis of
            all inputs and outputs counts items which do not depend on each other. No model says that of itself.
        batch_wait_timeout_s: seconds that a request waits for others.

    A replica without its session does not become ready: ``serve.run`` raises RuntimeError, and the cause is a text in
    ``serve.status()``. Once the session is closed, or its CUDA context poisoned, each request raises that error and the
    health check fails: after three in a row Serve replaces the replica.

    A subclass may prepare requests around ``super().__call__``, and is deployed by ``serve.deployment``.

    Raises:
        ValueError: ``max_batch_size`` is less than 1.
        GPUError, Exception: as :func:`~ortgpu.integrations.ray.open_session`.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: Any | Callable[[], Any] = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        max_batch_size: int = 1,
        batch_wait_timeout_s: float = 0.002,
        **settings: Any,
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size}: a run takes one request or more")
        self.session = open_session(path_or_bytes, sess_options, providers, provider_options, **settings)
        self._outputs = [entry.name for entry in self.session.get_outputs()]
        self._answer.set_max_batch_size(max_batch_size)
        self._answer.set_batch_wait_timeout_s(batch_wait_timeout_s)

    async def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs of the model by name, for its inputs by name: arrays as ``session.run`` takes them.

        Called through a handle, ``handle.remote({"x": array})``. What HTTP brings is no such mapping: put a deployment
        in front of it that makes one.

        Raises:
            TypeError: not a mapping.
            GPUError: the session failed, or is no more.
            Exception: ONNX Runtime's own, for inputs that the model does not take; other requests do not notice.
        """
        if not isinstance(inputs, Mapping):
            raise TypeError(f"a request is a dict of arrays by input name, not {type(inputs).__name__}")
        result = await self._answer({name: np.asarray(value) for name, value in inputs.items()})
        if isinstance(result, Exception):
            raise result
        return dict(result)

    @serve.batch  # type: ignore[untyped-decorator]  # Ray's annotations are not followed
    async def _answer(self, requests: list[Any]) -> list[Any]:
        # In a thread: the loop of this replica goes on taking requests, and answers the health check.
        return await asyncio.to_thread(joining.answer, self._run, requests)

    def _run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._outputs, self.session.run(self._outputs, dict(inputs)), strict=True))

    def check_health(self) -> None:
        """For Serve. Raises ExecutionError once the session cannot be used any more; does not run the model."""
        lifetime.refuse_if_unusable(self.session)


GPUDeployment = serve.deployment(
    ServedGPUSession,
    name="GPUDeployment",
    ray_actor_options={"num_gpus": 1},
    max_ongoing_requests=100,  # Serve's default of 5 would keep any batch at 5
    health_check_period_s=2,  # three failures replace a replica: after 6 s, where Serve's default makes it 30
)
"""One line deploys it: ``serve.run(GPUDeployment.options(num_replicas=2).bind("model.onnx", max_batch_size=32))``.

Everything of Serve's ``options`` applies. ``ray_actor_options`` replaces the one GPU per replica of this deployment.
"""
