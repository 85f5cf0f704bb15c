"""Programs with a GPUSession on the CPU, each in a child with a deadline: see tests/programs/on_cpu.py."""

from __future__ import annotations

import functools
from typing import Any

from tests.support.children import DEADLINE_VARIABLE, child_environment, run_python
from tests.support.fork_server import run_forked


def child(program: str, *arguments: str, behind: str = "", deadline: float = 60, fresh: bool = False) -> Any:
    """What a program reported, or code behind tests/programs/on_cpu.py. It finds ``arguments`` in sys.argv.

    ``fresh``: it is about imports, forks or the end of a process; see tests/support/fork_server.py.
    """
    allowed = {"CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1", DEADLINE_VARIABLE: str(deadline)}
    run = run_python if fresh else run_forked
    env = child_environment(allowed)
    return run(program, *arguments, behind=f"on_cpu {behind}", env=env, deadline=deadline + 30).ok().json


fresh_child = functools.partial(child, fresh=True)
