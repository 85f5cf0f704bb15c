"""A deployment for Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import serve

from ...provider import lifetime
from .workers import open_session


class ServedGPUSession:
    """A replica with a session on the GPU that Ray assigned to it. :data:`GPUDeployment` is its deployment.

    The arguments are those of :func:`~ortgpu.integrations.ray.open_session`, and ``max_batch_size``,
    ``batch_wait_timeout_s`` (seconds) and ``inputs`` as for GPUSession.batched. The replica opens a path on its own
    node. Serve's controller keeps bytes with the configuration, so pass a path for a large model.

    A replica that cannot open its session does not become ready. ``serve.run`` then raises RuntimeError, and
    ``serve.status()`` has the cause as text. Once the session is closed, or its CUDA context poisoned, each request
    raises that error and the health check fails. After three failures in a row Serve replaces the replica.

    Raises:
        GPUError, ValueError, Exception: as open_session and GPUSession.batched raise.
    """

    def __init__(
        self,
        *arguments: Any,
        max_batch_size: int = 1,
        batch_wait_timeout_s: float = 0.002,
        inputs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.session = open_session(*arguments, **settings)
        self._outputs = [entry.name for entry in self.session.get_outputs()]
        self.batched = self.session.batched(max_batch_size, batch_wait_timeout_s, inputs=inputs)

    async def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model and return its outputs by name: ``handle.remote({"x": array})``.

        Raises:
            TypeError: ``inputs`` is not a mapping.
            GPUError, Exception: as ``run`` raises. Other requests are not affected.
        """
        if not isinstance(inputs, Mapping):
            raise TypeError(f"a request is a dict of arrays by input name, not {type(inputs).__name__}")
        feed = {name: np.asarray(value) for name, value in inputs.items()}
        return dict(zip(self._outputs, await self.batched.arun(self._outputs, feed), strict=True))

    def check_health(self) -> None:
        """Raise ExecutionError once the session cannot be used any more. Serve calls it; it does not run the model."""
        lifetime.refuse_if_unusable(self.session)


GPUDeployment = serve.deployment(
    ServedGPUSession,
    name="GPUDeployment",
    ray_actor_options={"num_gpus": 1},
    max_ongoing_requests=100,  # Serve's default of 5 would keep any batch at 5
    health_check_period_s=2,  # Three failures replace a replica, so this takes 6 s instead of 30.
)
"""Deploy it with ``serve.run(GPUDeployment.options(num_replicas=2).bind("model.onnx", max_batch_size=32))``.

All of Serve's ``options`` apply. ``ray_actor_options`` replaces the one GPU per replica of this deployment.
"""
