"""What brings a package back after advice removed it: `uv run` first installs what its project's lock file names."""

from __future__ import annotations

from ..errors import Fix, manual
from .facts import Facts


def keep_out(facts: Facts) -> list[Fix]:
    """For packages that share the folder of the GPU build. docs.astral.sh/uv, "Dependency overrides"."""
    lock, owners = facts.environment.installer.lock, facts.environment.packages.onnxruntime.owners
    others = list(dict.fromkeys(owner.name for owner in owners if owner.name != "onnxruntime-gpu"))
    if lock is None or not others:
        return []
    never = ", ".join(f"\"{name} ; sys_platform == 'never'\"" for name in others)
    return [
        manual(
            f"and keep uv from installing again what {lock} names: uv remove {' '.join(others)}, or where another "
            f"package asks for it, override-dependencies = [{never}] under [tool.uv] in pyproject.toml; then "
            "uv add onnxruntime-gpu, and uv sync --reinstall-package onnxruntime-gpu"
        )
    ]
