"""Jobs of several processes with one GPU each: the rank of this process, and a check that the ranks work together.

Every name is imported when it is first used. ``import ortgpu`` loads nothing of this package.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ..environment.ranks import Rank as Rank
    from ..environment.ranks import current_rank as current_rank
    from . import checkpoint as checkpoint
    from .diagnosis.packages import has_collective_ops as has_collective_ops
    from .diagnosis.packages import require_training as require_training
    from .preflighting import preflight as preflight
    from .reports import Collective as Collective
    from .reports import PreflightReport as PreflightReport

# The module of each name, relative to this package. No module has the name of a function, because its import would
# replace the function.
_HOMES = {
    "Collective": "reports",
    "PreflightReport": "reports",
    "Rank": ".environment.ranks",
    "current_rank": ".environment.ranks",
    "has_collective_ops": "diagnosis.packages",
    "preflight": "preflighting",
    "require_training": "diagnosis.packages",
}

__all__ = sorted((*_HOMES, "checkpoint"))  # help() shows no other lazy names.


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "checkpoint":  # a module
        return import_module(".checkpoint", __name__)
    globals()[name] = value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("_")), *__all__})
