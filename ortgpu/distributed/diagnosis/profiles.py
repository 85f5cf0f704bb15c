"""The function ``ortgpu.diagnose``: choose who gathers and judges the facts, for inference or for training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from ...diagnosis.diagnosing import Diagnosis, check_timeout, diagnose_inference, find_problems

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
    """Inspect this environment and judge it. What is wrong is returned, and not raised.

    Args:
        model: a path or the bytes of a model; what it needs is judged too. Whether ONNX Runtime knows its opset and
            operators, and which of its nodes stay on the CPU, is found out by ``probe`` alone; the latter takes a GPU.
        probe: also really open the driver, the provider and a session (of ``model`` too), in a child process. For that
            a model in bytes is written to a temporary file that no other user can read, and removed again. Without
            ``probe`` no CUDA is initialised anywhere, and a fault that only shows when CUDA works is not found. With
            ``profile="training"``: the driver, ``onnxruntime.training``, and MPI.
        timeout: seconds that each child may take, and the ranks to meet in ``shared_folder``.
        profile: "training" judges whether processes can train together with ONNX Runtime here, instead of whether a
            session opens: the training package, MPI and NCCL, the network.
        ssh: hosts that have to be reached without a password. Only for "training".
        shared_folder: a folder that every rank has to see. Each rank has to make this call, started by the launcher.
            Only for "training"; one process alone shows that it can write there, and no more.

    Raises:
        LauncherConflictError: with ``shared_folder``, when the launcher's variables contradict each other.
        TypeError: ``model`` is neither a path nor bytes.
        ValueError: for arguments of the other profile, and a ``timeout`` that is no time to wait.

    Not promised: that a machine without problems runs every model; that takes a session.
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
    from .training import gather  # its checks need much that inference does not

    facts, training, checks = gather(ssh, shared_folder, probe=probe, timeout=timeout)
    return Diagnosis(find_problems(facts, checks), facts.environment, facts.observed.probe, training)
