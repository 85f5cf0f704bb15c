"""How libraries are opened: no name of theirs may stand before that of another copy."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.children import run_python

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="ELF, whose names are shared or not")

OPEN = """
import ctypes, sys
from ortgpu.provider.preloading import open_library
assert open_library(sys.argv[1]) is None
print(hasattr(ctypes.CDLL(None), "only_of_this_test"), ctypes.CDLL(sys.argv[1]).only_of_this_test())
"""


def test_the_names_of_an_opened_library_stay_its_own(tmp_path: Path) -> None:
    source, library = tmp_path / "own.c", tmp_path / "libown.so"
    source.write_text("int only_of_this_test(void) { return 7; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert run_python(OPEN, str(library)).ok().stdout.split() == ["False", "7"]
