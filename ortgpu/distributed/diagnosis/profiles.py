"""The function ``ortgpu.diagnose``, for inference and for training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ...diagnosis.diagnosing import Diagnosis, check_timeout, diagnose_inference
from ...process.late import late

if TYPE_CHECKING:
    from . import training
else:
    training = late("ortgpu.distributed.diagnosis.training")

Profile = Literal["inference", "training"]


def diagnose(
    model: str | bytes | os.PathLike[str] | None = None,
    *,
    probe: bool = False,
    timeout: float = 30.0,
    profile: Profile = "inference",
    ssh: Sequence[str] = (),
    shared_folder: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Inspect this environment and judge it. Problems are returned, not raised.

    Args:
        model: a path or the bytes of a model, which is judged too. Only ``probe`` finds out if ONNX Runtime knows its
            opset and operators, and which of its nodes stay on the CPU; the latter needs a GPU.
        probe: also open the driver, the provider and a session (of ``model`` too), in a child process. A model in bytes
            is then written to a temporary file that no other user can read, and removed again. Without ``probe`` no
            CUDA is initialised, and a fault that only shows when CUDA works is not found. With ``profile="training"``:
            the driver, ``onnxruntime.training``, and MPI.
        timeout: seconds for each child, and for the ranks to meet in ``shared_folder``.
        profile: "training" judges if processes can train together with ONNX Runtime here, instead of if a session
            opens: the training package, MPI and NCCL, the network.
        ssh: hosts that must be reached without a password. Only for "training".
        shared_folder: a folder that every rank must see. Each rank must make this call, started by the launcher. Only
            for "training". One process alone only proves that it can write there.

    Raises:
        LauncherConflictError: with ``shared_folder``, if the launcher's variables contradict each other.
        TypeError: ``model`` is neither a path nor bytes.
        ValueError: an argument belongs to the other profile, ``shared_folder`` is empty, or ``timeout`` is no time to
            wait.

    Not promised: that a machine without problems runs every model. Only a session proves that.
    """
    check_timeout(timeout)
    if profile not in ("inference", "training"):
        raise ValueError(f"profile is 'inference' or 'training', not {profile!r}")
    if profile == "inference":
        if ssh or shared_folder is not None:
            raise ValueError("ssh and shared_folder belong to the profile 'training'")
        return diagnose_inference(model, probe=probe, timeout=timeout)
    if model is not None:
        raise ValueError("the profile 'training' judges no model")
    if shared_folder is not None and not os.fspath(shared_folder):  # it would mean the working directory
        raise ValueError("shared_folder is empty")
    return training.diagnose_training(ssh, shared_folder, probe=probe, timeout=timeout)
