"""Where this copy of ortgpu came from, for commands that install one of its extras from there."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def words_for_extra(extra: str) -> list[str]:
    """Return the arguments of `pip install` and `uv pip install` that add an extra to this copy of ortgpu.

    They name the clone, wheel or repository that it was installed from (direct_url.json). If that is unknown or gone,
    they name the requirements of the extra.
    """
    try:
        installed = metadata.distribution("ortgpu")
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError, OSError):
        installed, origin = None, {}
    url = origin.get("url", "")
    folder = url2pathname(urlsplit(url).path) if url.startswith("file:") else ""
    if folder and os.path.exists(folder) and origin.get("dir_info", {}).get("editable"):
        return ["-e", f"{folder}[{extra}]"]
    if (version_control := origin.get("vcs_info")) and url:
        return [f"ortgpu[{extra}] @ {version_control['vcs']}+{url}@{version_control['commit_id']}"]
    if url and (not folder or os.path.exists(folder)):
        return [f"ortgpu[{extra}] @ {url}"]
    clone = Path(__file__).resolve().parents[3]
    if (clone / "pyproject.toml").is_file():  # It is on PYTHONPATH, or an old setuptools installed it.
        return [f"{clone}[{extra}]"]
    marked = (line.partition(";") for line in (installed.requires or [] if installed is not None else []))
    own_marker = re.compile(rf"\s*extra\s*==\s*[\"']{extra}[\"']\s*")
    return [name.strip() for name, _, marker in marked if own_marker.fullmatch(marker)] or [f"ortgpu[{extra}]"]
