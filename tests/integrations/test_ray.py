"""``ortgpu.integrations.ray`` as a package: what it says without Ray, and what importing it loads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ortgpu.environment.packages.installer import install_extra
from ortgpu.errors import PackageError
from tests.support.children import run_python

NAMES = ("open_session", "probe", "preflight", "RayGPUSession", "GPUDeployment", "ServedGPUSession")


@pytest.mark.parametrize("name", NAMES)
def test_without_ray_each_name_says_what_to_install(name: str) -> None:
    code = f"""
import pickle, sys
sys.modules["ray"] = None  # whether it is installed or not
import ortgpu.integrations.ray
try:
    from ortgpu.integrations.ray import {name}
except ImportError as error:
    print(pickle.dumps(error).hex())
"""
    error = pickle.loads(bytes.fromhex(run_python(code).ok().stdout))
    assert type(error) is PackageError
    assert error.evidence[0].startswith("there is no module ray")
    assert [(str(fix), fix.executable) for fix in error.fixes] == [(install_extra("ray"), True)]


def test_a_ray_that_is_broken_raises_what_it_raises(tmp_path: Path) -> None:
    """Installing it once more would change nothing: it is there."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('libray.so: cannot open shared object file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ortgpu.integrations.ray import open_session"
    done = run_python(code)
    assert done.stderr.endswith("\nImportError: libray.so: cannot open shared object file\n")


def test_a_name_that_there_is_not() -> None:
    import ortgpu.integrations.ray as module

    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        _ = module.sesion


def test_importing_the_package_loads_neither_ray_nor_onnx_runtime() -> None:
    code = "import sys, ortgpu.integrations.ray as r; dir(r); print(sorted({'ray', 'onnxruntime'} & set(sys.modules)))"
    done = run_python(code).ok()
    assert done.stdout == "[]\n"
