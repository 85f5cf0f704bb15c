"""What is chosen for a model by its outline alone; nothing where it cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortgpu.model.outline import UNREADABLE, GraphOutline
from ortgpu.session.chosen import choose


def gains_channels_last(model: Any) -> bool:
    return _judged(model, choose.gains_channels_last)


def needs_no_cudnn(model: Any) -> bool:
    return _judged(model, lambda outline: choose.has_only(outline, choose.WITHOUT_CUDNN))


def _judged(model: Any, judge: Callable[[GraphOutline], bool]) -> bool:
    try:
        return judge(GraphOutline(model))
    except UNREADABLE:
        return False
