"""Programs with a GPUSession on the CPU, each in a child with a deadline: see tests/programs/on_cpu.py."""

from __future__ import annotations

from typing import Any

from tests.support.children import DEADLINE_VARIABLE, child_environment, run_python


def child(program: str, *arguments: str, behind: str = "", deadline: float = 60) -> Any:
    """What a program reported, or code behind tests/programs/on_cpu.py. It finds ``arguments`` in sys.argv."""
    allowed = {"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1", DEADLINE_VARIABLE: str(deadline)}
    env = child_environment(allowed)
    return run_python(program, *arguments, behind=f"on_cpu {behind}", env=env, deadline=deadline + 30).ok().json
