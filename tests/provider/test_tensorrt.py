"""TensorRT beside CUDA: its libraries, which no loader finds in NVIDIA's wheels. Stubs under the real names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Stubs
from tests.support.cpu_session import child

PROGRAM = """
from ortgpu.provider.tensorrt import check_loadable
sys.path.insert(0, sys.argv[2])
def mapped():
    with open("/proc/self/maps") as file:
        return sorted({line.split()[-1] for line in file if sys.argv[2] in line})
before = outcome(lambda: check_loadable(sys.argv[1], in_wheels=False))
report([before, outcome(lambda: check_loadable(sys.argv[1])), mapped()])
"""


@pytest.fixture
def wheel(stubs: Stubs, tmp_path: Path, provider_library: str) -> Any:
    """Makes the folder of a wheel whose libraries are of a release other by ``newer`` than what is needed."""

    def make(newer: int = 0) -> list[str]:
        folder = tmp_path / "tensorrt_libs"
        folder.mkdir()
        names = []
        for name in ("libnvinfer", "libnvonnxparser"):
            major = int(needed(provider_library)[name]) + newer
            names.append(f"{name}.so.{major}")
            shutil.copy(stubs.library(names[-1]), folder)
        return [str(folder / name) for name in names]

    return make


def needed(provider_library: str) -> dict[str, str]:
    content = Path(provider_library).with_name("libonnxruntime_providers_tensorrt.so").read_bytes()
    found = re.findall(rb"\0(libnvinfer|libnvonnxparser)\.so\.(\d+)(?=\0)", content)
    return {name.decode(): major.decode() for name, major in found}


def test_the_libraries_of_a_wheel(wheel: Any, provider_library: str, tmp_path: Path) -> None:
    files = wheel()
    without, within, mapped = child(PROGRAM, provider_library, str(tmp_path))
    assert without["type"] == "LibraryNotFoundError"
    assert within == {"returned": None}
    assert mapped == files


def test_a_wheel_of_another_release(wheel: Any, provider_library: str, tmp_path: Path) -> None:
    found, _ = wheel(newer=1)
    _, within, mapped = child(PROGRAM, provider_library, str(tmp_path))
    assert within["type"] == "LibraryNotFoundError"
    assert f"found: {found}" in within["text"]
    assert f"install TensorRT in a release {needed(provider_library)['libnvinfer']}.*" in within["text"]
    assert mapped == []


def test_a_library_that_was_cut_off_is_not_opened(wheel: Any, provider_library: str, tmp_path: Path) -> None:
    """It would end the process without a word."""
    library, whole = Path(wheel()[0]), Path(provider_library).read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    _, within, mapped = child(PROGRAM, provider_library, str(tmp_path))
    assert within["type"] == "LibraryNotFoundError"
    assert f"{library}: truncated" in within["text"]
    assert str(library) not in mapped


def test_a_provider_that_was_cut_off_is_not_opened(provider_library: str, tmp_path: Path) -> None:
    whole = Path(provider_library).with_name("libonnxruntime_providers_tensorrt.so")
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    _, within, _ = child(PROGRAM, str(tmp_path / Path(provider_library).name), str(tmp_path))
    assert within["type"] == "BrokenPackageError"
    assert f"{tmp_path / whole.name}: truncated" in within["text"]
