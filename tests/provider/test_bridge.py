"""The library between ONNX Runtime and its providers: that of another ONNX Runtime must not answer."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ortgpu.environment.libraries.wheel import provider_beside
from ortgpu.environment.packages.installed import locate_packages
from tests.support.children import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loads libraries as Linux does")

PROGRAM = """
import ctypes
{first}
import onnxruntime
from ortgpu.environment.libraries.wheel import read_provider
from ortgpu.environment.packages.installed import locate_packages
from ortgpu.provider.preloading import why_provider_does_not_load
print(why_provider_does_not_load(read_provider(locate_packages().onnxruntime.provider_library)))
"""


@pytest.mark.parametrize(
    ("first", "variable", "dies"),
    [
        ("", "", False),
        ("ctypes.CDLL({other!r})", "", False),
        ("ctypes.CDLL({own!r}, mode=ctypes.RTLD_GLOBAL); ctypes.CDLL({other!r}, mode=ctypes.RTLD_GLOBAL)", "", False),
        ("ctypes.CDLL({other!r}, mode=ctypes.RTLD_GLOBAL)", "", True),
        ("", "LD_PRELOAD", True),
    ],
    ids=["alone", "other-for-itself", "own-first", "other-first", "preloaded"],
)
def test_provider_is_not_opened_where_another_would_answer(
    first: str, variable: str, dies: bool, tmp_path: Path
) -> None:
    provider = locate_packages().onnxruntime.provider_library
    assert provider is not None
    own = provider_beside(provider, "shared")
    other = str(shutil.copy(own, tmp_path))
    program = PROGRAM.format(first=first.format(own=own, other=other))
    said = run_python(program, env={variable: other} if variable else {}).ok().stdout
    assert said.startswith(f"Provider_GetHost is taken from {other}, not from {own}") == dies, said
