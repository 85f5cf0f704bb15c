"""The operators that handle shapes, as the installed provider places them.

It places each on what is no shape, in every version and on every type, over libraries of CUDA that compute nothing.
"""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest

from ortgpu.provider import placement
from tests.lab.fixtures import Lab
from tests.support.shape_operators import NOT_TRIED, misjudged, models, models_beside_shapes

PLACE = "provider.kernels.place"


def test_all_operators_of_shapes_have_kernels(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    for name, content in models():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    machine = lab.machine_that_places(provider_library)
    on_gpu = machine.run_program(PLACE, str(tmp_path), timeout=100).ok().json
    assert {name.partition(" ")[0] for name in on_gpu} == placement._SHAPE_OPERATORS - NOT_TRIED


@pytest.mark.slow
def test_every_type_of_every_operator_beside_shapes(lab: Lab, provider_library: str, tmp_path: Path) -> None:
    """ONNX Runtime's own log says for which nodes CUDA has no kernel and which it prefers on the CPU."""
    path = tmp_path / "models.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in models_beside_shapes():
            archive.writestr(name, content)
    machine = lab.machine_that_places(provider_library)
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from logged_placement import logged
        report(logged(*sys.argv[2:]))"""
    arguments = [str(Path(__file__).parents[1] / "support"), str(path), str(tmp_path / "log")]
    assert misjudged(machine.run(textwrap.dedent(code), argv=arguments, timeout=110).ok().json) == []
