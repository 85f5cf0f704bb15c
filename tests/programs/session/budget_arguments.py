"""Programs of ``tests/session/test_budget.py``."""

from __future__ import annotations

from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, outcome, report


def arguments_are_checked_before_anything_is_opened() -> None:
    wrong = [
        {"memory": 0},
        {"memory": 1.5},
        {"memory": "lots"},
        {"memory": [1]},
        {"pinned_memory_limit": "much"},
        {"pinned_memory_limit": 0.5},
        {"pinned_memory_limit": -1},
    ]
    right = GPUSession(NEG, memory="1GiB", pinned_memory_limit="2MiB")
    report(
        [
            [outcome(lambda each=each: GPUSession("missing.onnx", **each)) for each in wrong],
            right.pinned_empty(4).size,
            right._pinned_memory_limit,
            right.memory.budget,
        ]
    )
