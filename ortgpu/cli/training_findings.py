"""The rows that the profile "training" adds to a doctor's report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortgpu.distributed.diagnosis.training import TrainingFacts
    from ortgpu.distributed.environment import Mpi, Network
    from ortgpu.distributed.shared_folder import FolderMeeting


def rows(training: TrainingFacts) -> dict[str, list[str]]:
    """Return the lines of each row, by the name of the row."""
    environment = training.environment
    ssh = [f"{one.host}: {'reached' if one.returncode == 0 else 'not reached'}" for one in training.ssh]
    return {
        "NCCL": list(map(str, environment.nccl.libraries)) or ["no libnccl.so.2 was found"],
        "MPI": _mpi(environment.mpi),
        "network": _network(environment.network),
        **({"ssh": ssh} if ssh else {}),
        **({"shared folder": [_meeting(training.shared_folder)]} if training.shared_folder is not None else {}),
    }


def _mpi(mpi: Mpi) -> list[str]:
    launcher = f"{mpi.launcher or 'launcher of unknown version'}, {mpi.mpirun}" if mpi.mpirun else "no mpirun"
    library = f"mpi4py {mpi.mpi4py or ''}".rstrip() + f" with {mpi.library or 'no library'}"
    return [launcher, library if mpi.mpi4py or mpi.library else "no mpi4py"]


def _network(network: Network) -> list[str]:
    if network.interfaces is None:
        return ["not known"]
    cards = ", ".join(map(str, network.cards)) or "no card that is up"
    ports = ", ".join(f"{port.device} port {port.port}" for port in network.infiniband or ())
    return [f"{cards}; InfiniBand: {ports or 'none'}"]


def _meeting(meeting: FolderMeeting) -> str:
    if not meeting.ok:
        return f"{meeting.folder}: rank {meeting.rank} did not meet all of {meeting.world_size}"
    if meeting.world_size == 1:
        return (
            f"{meeting.folder}: written and read by this process alone; start the doctor with mpirun to compare ranks"
        )
    return f"{meeting.folder}: rank {meeting.rank} met all {meeting.world_size}"
