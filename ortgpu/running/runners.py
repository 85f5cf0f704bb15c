"""The choice of the runner of a session: plain, staged or captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..provider.lifetime import device_of
from .plain_runs import PlainRunner
from .staging import StagedRunner, may_stage

if TYPE_CHECKING:
    from .plain_runs import RunningSession


def runner_of(session: RunningSession, *, cuda_graph: bool) -> PlainRunner:
    """Return the runner of an open session.

    Raises:
        ProviderRequestError: ``cuda_graph``, and the session cannot be captured.
    """
    if not device_of(session).is_gpu:
        return PlainRunner(session)
    if cuda_graph:
        from .graph_requests import captured

        return captured(session)
    return StagedRunner(session) if may_stage(session) else PlainRunner(session)
