"""A forked child comes to its end, also where it inherited ONNX Runtime without the threads that it started."""

from __future__ import annotations

import os

import pytest

from tests.support.children import run_python

pytestmark = pytest.mark.lab


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("3", 3),
        ("deleted", 5),
        ("", 0),
        ("uncaught", 1),
        ("at once", 4),
    ],
)
def test_it_ends_with_its_status_and_loses_nothing_that_was_written(end: str, status: int) -> None:
    told_to_be_quiet = ("CI", "ORT_DISABLE_TELEMETRY")  # with which ONNX Runtime starts no thread
    done = run_python(
        "process.forked_end.ends",
        end,
        env={name: value for name, value in os.environ.items() if name not in told_to_be_quiet},
    ).ok()
    assert f"status {status}" in done.stdout
    if end != "at once":
        assert "buffered by C" in done.stdout
        assert "buffered by Python" in done.stdout
    assert ("uncaught" in done.stderr) == ("uncaught" in end)
