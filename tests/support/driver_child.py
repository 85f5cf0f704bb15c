"""What reads the driver, in children with libraries that answer what a test tells them to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import run_python

COMPILER = shutil.which("cc")
needs_stubs = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"),
    reason="needs Linux and a C compiler for the stub libraries",
)
# Prints what a probe returns as JSON; dataclasses become dictionaries and tuples lists.
PROLOGUE = """
import dataclasses, json, sys
from pathlib import Path
from ortgpu.environment.gpu import driver
def show(value):
    print(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value))
"""


def child(
    code: str, *, library: Path | None = None, module: Path | None = None, environ: Mapping[str, str] | None = None
) -> Any:
    """Run ``code`` in a process of its own, with stub libraries and modules in front; return the JSON it printed."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*([str(module)] if module else []), *sys.path]),
        "LD_LIBRARY_PATH": str(library or ""),
        **(environ or {}),
    }
    return json.loads(run_python(PROLOGUE + code, env=env).ok().stdout)


def build(folder: Path, name: str, source: Path | str) -> Path:
    assert COMPILER is not None
    file = source if isinstance(source, Path) else folder / f"{name}.c"
    if isinstance(source, str):
        file.write_text(source)
    target = folder / name
    subprocess.run([COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", target, file], timeout=60, check=True)
    return target
