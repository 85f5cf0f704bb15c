"""A session that is closed, forked away from or poisoned says so to every method that it has, whichever it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cpu_session import child

ENDS = {"ForkedSessionError": "forked", "ExecutionError": "closed", "PoisonedContextError": "poisoned"}


@pytest.mark.parametrize("error", ENDS)
def test_every_method_says_why_it_cannot_be_used(error: str) -> None:
    found: dict[str, Any]
    found, parent = child(f"session.refusals.{ENDS[error]}")
    assert {"run", "get_inputs", "get_providers", "explain_placement", "io_binding", "set_providers"} <= set(found)
    assert {name: each for name, each in found.items() if each.get("type") != error} == {}
    if error == "ForkedSessionError":
        assert parent == {"returned": [0, 0, 0, 0]}
