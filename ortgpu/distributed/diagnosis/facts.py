"""What the profile "training" is judged by, beside the facts of every diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment.ssh import SshAttempt
from ..environment.training import TrainingEnvironment
from ..shared_folder import FolderMeeting


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The facts about training together. ``ssh`` and ``shared_folder`` are there if they were asked for."""

    environment: TrainingEnvironment
    ssh: tuple[SshAttempt, ...] = ()
    shared_folder: FolderMeeting | None = None
