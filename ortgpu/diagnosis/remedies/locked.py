"""Advice that keeps a removed package from coming back: by a lock file, or by another package that requires it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ...errors import Fix, manual
from ..facts import Facts

_WAYS = {
    # docs.astral.sh/uv, "Dependency overrides". `uv run` is enough to bring a package back.
    "uv": "uv remove {names}, or where another package asks for it, override-dependencies = [{never}] under [tool.uv] "
    "in pyproject.toml; then uv add onnxruntime-gpu, and uv sync --reinstall-package onnxruntime-gpu",
    # Poetry overrides nothing that a package requires: with a marker of the project's own it is locked all the same.
    "poetry": "poetry remove {names}{then}; where another package asks for it, Poetry cannot leave it out: "
    "run the command above again after each poetry install, add or sync",
    # pdm-project.org, "Exclude specific packages and their dependencies from the lock file"
    "pdm": "pdm remove {names}, or where another package asks for it, excludes = [{quoted}] under "
    "[tool.pdm.resolution] in pyproject.toml and pdm install{then}",
    # A marker in the Pipfile becomes the package's in the lock file, whoever asks for it. This once it is installed.
    "pipenv": "pipenv install {marked}{then}; then run the command above again",
}


def keep_out(facts: Facts, fixes: Sequence[Fix]) -> list[Fix]:
    """Return ``fixes``, which remove packages that share the folder of the GPU build, and what keeps these away."""
    manager, owners = facts.environment.installer.manager, facts.environment.packages.onnxruntime.owners
    installed = dict.fromkeys(owner.name for owner in owners)
    others = [name for name in installed if name != "onnxruntime-gpu"]
    if manager is None:
        removed = any(facts.environment.installer.uninstall in fix for fix in fixes)
        return [*fixes, *(_stand_in(facts) if removed else [])]
    if not others:
        return [*fixes]
    never = [f"\"{name} ; sys_platform == 'never'\"" for name in others]
    way = _WAYS[manager.name].format(
        names=" ".join(others),
        quoted=", ".join(f'"{name}"' for name in others),
        never=", ".join(never),
        marked=" ".join(never),
        then="" if "onnxruntime-gpu" in installed else f"; then {manager.add} onnxruntime-gpu",
    )
    return [*fixes, manual(f"and keep {manager.name} from installing again what {manager.lock} names: {way}")]


def _stand_in(facts: Facts) -> list[Fix]:
    """Return advice for a package that requires onnxruntime, if there is one.

    pip cannot override what a package requires; an empty package of that name satisfies it, and `pip check`.
    """
    environment = facts.environment
    owners = {owner.name: owner.version for owner in environment.packages.onnxruntime.owners}
    installer, version, requirers = environment.installer, owners.get("onnxruntime"), environment.packages.requirers
    if version is None or not requirers or environment.host.system == "Windows":
        return []
    lines = ("[project]", 'name = "onnxruntime"', f'version = "{version}"', "[tool.setuptools]", "py-modules = []")
    made = f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} > \"$empty/pyproject.toml\""
    return [
        manual(
            f"and keep {' and '.join(requirers)} from installing onnxruntime again: put an empty package in its place: "
            f'empty=$(mktemp -d) && {made} && {installer.install} "$empty"'
        )
    ]
