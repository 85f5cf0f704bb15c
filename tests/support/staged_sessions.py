"""Sessions that stage their runs, as far as that goes without a GPU: for :func:`tests.support.cpu_session.child`.

The session is a real one on the CPU, and so is what runs it with inputs and outputs in its own memory; "device" memory
is the host's, and a stub runtime copies. It copies as late as CUDA may: what is read or used again too early shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.installed import older_than
from tests.lab.stubs import Stubs
from tests.support.cpu_session import child

STAGES = (1, 30)  # gives sessions memory on the device, create_ortvalue_from_shape_and_type


@pytest.fixture
def staged_child(stubs: Stubs) -> Callable[..., Any]:
    """Called with a program and a deadline: what it reported. Code finds what tests/programs/staged.py defines."""
    if reason := older_than(STAGES):
        pytest.skip(reason)

    def run(program: str, *arguments: str, deadline: float = 60, behind: str = "") -> Any:
        return child(program, str(stubs.cudart), *arguments, behind=f"staged {behind}", deadline=deadline)

    return run
