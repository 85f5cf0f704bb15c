"""What programs do with ONNX Runtime on the GPU before they open a session, after ``ortgpu.preload()``."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import soname

STEPS = "session.before_the_first_session.steps"
OPERATORS = """
int cudaGetDeviceCount(int *);
void *RegisterCustomOps(void *options, void *api) { int count; cudaGetDeviceCount(&count); return 0; }
"""


@pytest.mark.parametrize(
    ("arguments", "outcomes"),
    [
        ((), {"OrtValue": "RuntimeError", "add_provider": "InvalidArgument", "operators": "Fail"}),
        (("preload",), {"OrtValue": "cuda", "add_provider": None, "operators": None}),
    ],
    ids=["without", "with"],
)
def test_preload_is_what_they_need(
    lab: Lab, provider_library: str, tmp_path: Path, arguments: tuple[str, ...], outcomes: dict[str, Any]
) -> None:
    """Without it ONNX Runtime fails with words that blame the provider. The page about sessions names it."""
    machine = lab.machine_that_places(provider_library)
    runtime = machine.overlay.path(f"nvidia/*/lib/{soname('libcudart')}")
    library = tmp_path / "libops.so"
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-xnone", str(runtime), "-o", str(library)]
    subprocess.run(command, input=OPERATORS, text=True, check=True, timeout=60)
    assert machine.run_program(STEPS, str(library), *arguments).ok().json == outcomes
    page = Path(__file__).parents[2] / "examples" / "SESSION.md"
    assert "`ortgpu.preload()`" in page.read_text(encoding="utf-8")
