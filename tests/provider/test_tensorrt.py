"""TensorRT beside CUDA: its libraries, which no loader finds in NVIDIA's wheels. Stubs under the real names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.environment.gpu.cuda import CudaDevice
from ortgpu.errors import ProviderRequestError
from ortgpu.provider import tensorrt as tensorrt_module
from ortgpu.provider.requests import TENSORRT
from tests.lab import Stubs
from tests.support.cpu_session import child

tensorrt: Any = tensorrt_module

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


@pytest.mark.parametrize("takes", [True, False], ids=["by device_id", "without device_id"])
@pytest.mark.parametrize("ordinal", [None, 0, 1])
def test_a_plugin_without_device_id_is_on_the_first_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, takes: bool, ordinal: int | None
) -> None:
    """ONNX Runtime would open it on the first GPU, whichever was asked for."""
    monkeypatch.setattr("ortgpu.provider.tensorrt.takes_ordinal", lambda name: takes)
    monkeypatch.setattr(tensorrt, "collection", SimpleNamespace(InferenceSession=object))
    gpu = CudaDevice(ordinal, f"GPU-{ordinal}", "NVIDIA L4", (8, 9), 24 << 30, 0) if ordinal is not None else None
    if ordinal == 1 and not takes:
        with pytest.raises(ProviderRequestError, match="takes no device_id, and cuda:1 was asked for") as refused:
            tensorrt.check_plugin(TENSORRT[0], gpu)
        assert any("CUDA_VISIBLE_DEVICES=GPU-1" in fix for fix in refused.value.fixes)
    else:
        tensorrt.check_plugin(TENSORRT[0], gpu)
