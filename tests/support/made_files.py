"""Files, programs and installed packages, made up in a folder."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def package(folder: Path, name: str, *, version: str = "9.9", **modules: str) -> None:
    """A distribution with a module or package of its name; ``__`` in the name of a module is a folder."""
    write(
        folder / f"{name}-{version}.dist-info",
        {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"},
    )
    write(folder, {f"{module.replace('__', '/')}.py": text for module, text in modules.items()})
