"""CUDA by a plugin whose provider has a name of its own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.lab.fixtures import provider_library
from tests.support.other_cuda_plugins import NAME, renamed

from .children import run_program

pytestmark = pytest.mark.ortgpu


@pytest.fixture(params=["nxrt-ep-cuda", "the provider of onnxruntime-gpu, renamed"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if "renamed" not in request.param:
        if importlib.util.find_spec("nxrt_ep_cuda") is None:
            pytest.skip("nxrt-ep-cuda is not installed here")
        path: str = importlib.import_module("nxrt_ep_cuda").get_library_path()
        return Path(path)
    content = renamed(provider_library())
    if content is None:
        pytest.skip("the installed provider has its name in other places of its file")
    file = tmp_path / "libcuda_plugin.so"
    file.write_bytes(content)
    return file


def test_a_session_that_carries_its_device(mlp: Path, library: Path) -> None:
    report = run_program("by_a_plugin_of_another_name", {"model": mlp, "library": library})
    name = report["name"]
    assert name == (NAME if "nxrt" not in str(library) else "cuda_ep")
    for way, kind in (("verified", "GPUSession"), ("guarded", "other")):
        found = report.returned(way)
        assert found["providers"][0] == name, found
        assert found["error"] < 1e-2
        assert found["records"][-1][0] == kind, found
    assert report.returned("verified")["records"][-1] == ["GPUSession", "cuda:0"]
