"""A CUDA that came after this version: what the provider opens lazily is found by its name, whatever its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.library_versions import FOR_CUDA_13
from tests.faults.newer import with_cuda_14
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than

pytestmark = pytest.mark.skipif(older_than(FOR_CUDA_13) is not None, reason=f"{older_than(FOR_CUDA_13)}")

CHOSEN = """
import ortgpu
report({each.soname: each.chosen and each.chosen.path for each in ortgpu.inspect_environment().libraries})
"""


def test_lazily_opened_libraries_are_found(lab: Lab) -> None:
    machine = lab.machine()
    with_cuda_14(lab, machine.overlay)
    found = machine.run(CHOSEN).ok().json
    folders = {soname: Path(path).parent.parent.name for soname, path in found.items() if path is not None}
    assert folders["libcudnn.so.9"] == folders["libcudnn_graph.so.9"] == "cudnn"
    assert folders["libnvrtc.so.14"] == folders["libcufft.so.13"] == folders["libcublas.so.14"] == "cu14"


def test_a_cudnn_that_is_not_there_is_named(lab: Lab) -> None:
    machine = lab.machine()
    with_cuda_14(lab, machine.overlay)
    machine.overlay.remove("nvidia/cudnn")
    found = machine.run(CHOSEN).ok().json
    assert found["libcudnn.so.9"] is None
