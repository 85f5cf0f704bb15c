"""The request for a session, and the facts verified after opening it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model.structure import ModelSource
from ..provider.devices import Device, DeviceRequest
from ..provider.placement import Placement
from ..provider.requests import CPUNodes


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The arguments of a constructor, checked."""

    model: ModelSource
    sess_options: Any = None
    providers: Sequence[Any] | None = None
    provider_options: Sequence[dict[Any, Any]] | None = None
    device: DeviceRequest = None
    cpu_nodes: CPUNodes = "warn"
    cuda_graph: bool = False
    choose_options: bool = True  # set CHOSEN_OPTIONS where the caller does not
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of InferenceSession
    allow_cpu: bool | None = False  # None: the variable ORTGPU_ALLOW_CPU decides


@dataclass(frozen=True, slots=True)
class Verified:
    device: Device
    placement: Placement
    options_chosen: dict[str, tuple[str, str]]
