"""Bytecode of what tests and their children import, kept where the environment forbids it beside the sources.

Without it each of thousands of children compiles NumPy, ONNX Runtime and this package, which is most of what it does.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path


def keep_bytecode() -> None:
    """Keep it in a folder of its own for this process and its children, if PYTHONDONTWRITEBYTECODE is set.

    The workers of pytest-xdist find it done. What earlier runs compiled in temporary folders goes.
    """
    if not os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ortgpu-bytecode")
    temporary = Path(tempfile.gettempdir()).absolute()
    shutil.rmtree(folder / temporary.relative_to(temporary.anchor), ignore_errors=True)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
    sys.dont_write_bytecode = False
