"""A GPUSession on the GPU that Ray assigned. Import it in workers only, since it imports ONNX Runtime."""

from __future__ import annotations

import os

import ray

from ...environment.gpu.driver import read_nvml
from ...session.gpu_session import GPUSession
from ...session.request import SessionRequest
from . import assignment


class AssignedSession(GPUSession):
    """The session of :func:`~ortgpu.integrations.ray.open_session`, on the assigned GPU also where it is unpickled."""

    def _open_request(self, request: SessionRequest) -> None:
        assigned = _assigned()
        if assigned:
            refusal = assignment.refusal(
                assigned,
                os.environ.get("CUDA_VISIBLE_DEVICES"),
                request.device,
                kept_by_ray=os.environ.get(assignment.NOSET, "").lower() not in ("1", "true"),
            )
            if refusal is not None:
                raise refusal
        super()._open_request(request)
        uuid = self.device.uuid
        if uuid is None:
            return
        allowed = assignment.uuids_of(assigned, read_nvml().gpus, os.environ.get("CUDA_DEVICE_ORDER"))
        if allowed is not None and not assignment.is_among(uuid, allowed):
            self.close()
            raise assignment.elsewhere(uuid, allowed)

    def _refuse_if_lost(self) -> None:
        super()._refuse_if_lost()
        if not _assigned():
            raise assignment.none_assigned(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _assigned() -> list[str]:
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ids
