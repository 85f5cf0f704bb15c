"""A child process in which a GPUSessionPool works, where there is no GPU.

Its sessions are real ones, on the CPU, and each stands for a device. What fails is a session's C++ session that raises
ONNX Runtime's exception with the text of an H200, as in test_running.py; everything above it is the real thing.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.support.children import child_environment, run_python
from tests.support.fork_server import run_forked

DEADLINE = 60


def child(program: str, behind: str = "", fresh: bool = False) -> Any:
    """What a program reported, by name. Code finds what tests/programs/pools.py defines.

    ``fresh``: it is about imports, forks or the end of a process; see tests/support/fork_server.py.
    """
    run = run_python if fresh else run_forked
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    return run(program, behind=f"pools {behind}", env=env, deadline=DEADLINE).ok().reports


fresh_child = functools.partial(child, fresh=True)
