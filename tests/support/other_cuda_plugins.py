"""The real CUDA provider with another name in its file, as a plugin of another project would have."""

from __future__ import annotations

import re
from pathlib import Path

NAME = "NxrtExecutionProvider"  # as long as CUDA's
_IN_FILE = rb"(?<=\0)CUDA(?=ExecutionProvider\0)|CUDA(?=Exec(?!utionProvider))"  # the name, and its pieces in code


def renamed(provider: Path) -> bytes | None:
    """The content of the file with the other name. None if this release has the name in other places."""
    content, count = re.subn(_IN_FILE, NAME[:4].encode(), provider.read_bytes())
    return content if count == 3 else None
