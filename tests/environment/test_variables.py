"""What the environment says now, and what it said when the process started."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.environment.variables import NAMES, Variables, entries_of, parse_environment_block, read_variables
from tests.support.children import run_python

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "ORTGPU_ALLOW_CPU"} <= set(NAMES)


def test_only_the_named_variables_are_kept() -> None:
    environ = {"SECRET_TOKEN": "x", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "cuda_home": "/no"}
    variables = read_variables(environ, b"PATH=/usr/bin\0SECRET_TOKEN=x\0")
    # An empty value is a value: CUDA_VISIBLE_DEVICES="" hides every GPU.
    assert variables == Variables({"CUDA_VISIBLE_DEVICES": "", "PATH": "/bin"}, {"PATH": "/usr/bin"})


def test_facts_are_a_snapshot() -> None:
    environ = {"PATH": "/bin"}
    variables = read_variables(environ, b"")
    environ["PATH"] = "/changed"
    assert variables.now == {"PATH": "/bin"}
    assert pickle.loads(pickle.dumps(variables)) == variables


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        pytest.param(b"", {}, id="empty-environment"),
        pytest.param(b"A=1\0B=2\0", {"A": "1", "B": "2"}, id="ordinary"),
        pytest.param(b"A=1", {"A": "1"}, id="no-final-nul"),
        pytest.param(b"A=x=y\0", {"A": "x=y"}, id="equals-in-value"),
        pytest.param(b"A=\0", {"A": ""}, id="empty-value"),
        pytest.param(b"A=1\0A=2\0", {"A": "1"}, id="first-wins-as-for-getenv"),
        pytest.param(b"junk\0=x\0A=1\0", {"A": "1"}, id="entries-that-are-none"),
        pytest.param(b"\0\0\0\0", None, id="overwritten-with-zeros"),
        pytest.param(b"ray::IDLE\0\0\0", None, id="overwritten-with-a-title"),
    ],
)
def test_parse_environment_block(block: bytes, expected: dict[str, str] | None) -> None:
    assert parse_environment_block(block) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_a_block(block: bytes) -> None:
    variables = read_variables({}, block)
    assert variables.at_start is None or set(variables.at_start) <= set(NAMES)


@needs_proc
def test_the_start_is_not_the_present() -> None:
    code = """
import json, os
from ortgpu.environment.variables import read_variables
os.environ["LD_LIBRARY_PATH"] = "/too/late"
del os.environ["CUDA_HOME"]
v = read_variables()
print(json.dumps([dict(v.now), dict(v.at_start)]))
"""
    environ = dict(os.environ, LD_LIBRARY_PATH="/at/start", CUDA_HOME="/opt/cuda", PYTHONPATH=os.pathsep.join(sys.path))
    now, start = json.loads(run_python(code, env=environ).ok().stdout)
    assert (now["LD_LIBRARY_PATH"], start["LD_LIBRARY_PATH"]) == ("/too/late", "/at/start")
    assert "CUDA_HOME" not in now
    assert start["CUDA_HOME"] == "/opt/cuda"


@needs_proc
def test_a_value_that_is_not_utf8_survives() -> None:
    code = """
import os
from ortgpu.environment.variables import read_variables
v = read_variables()
assert os.fsencode(v.now["CUDA_HOME"]) == os.fsencode(v.at_start["CUDA_HOME"]) == b"/opt/\\xff"
"""
    environ = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    environ |= {b"CUDA_HOME": b"/opt/\xff", b"PYTHONPATH": os.fsencode(os.pathsep.join(sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=True)


@pytest.mark.parametrize(
    ("variable", "value", "entries"),
    [
        ("LD_LIBRARY_PATH", "/a:/b c", ["/a", "/b c"]),
        ("LD_PRELOAD", "/a:/b /c", ["/a", "/b", "/c"]),
        ("LD_PRELOAD", "/a", ["/a"]),
    ],
)
@pytest.mark.skipif(os.pathsep != ":", reason="variables of Linux")
def test_entries_of_a_variable(variable: str, value: str, entries: list[str]) -> None:
    """The loader separates the entries of LD_PRELOAD by spaces, too."""
    assert entries_of(variable, value) == entries
