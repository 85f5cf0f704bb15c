"""The probe's child process: when there is none, and what is believed of its report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ortgpu.diagnosis.probe.probing import result_of
from tests.support.children import child_environment, run_python

PROGRAM = """
import sys
from ortgpu.diagnosis.probe.probing import run_probe

sys.frozen, sys.executable = True, sys.argv[1]
result = run_probe(None, timeout=20)
sys.stdout.write(f"{result.died_in}: {result.output}")
"""


def test_a_frozen_program_does_not_start_itself_again(tmp_path: Path) -> None:
    """Each copy of it would start the next, in sessions of their own that no deadline reaches."""
    program, mark = tmp_path / "program", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n", encoding="utf-8")
    program.chmod(0o755)
    done = run_python(PROGRAM, str(program))
    assert done.stdout.startswith("start: this program is frozen"), done.stdout + done.stderr
    assert not mark.exists()


def test_what_the_child_died_of_is_left_alone() -> None:
    begun: list[dict[str, Any]] = [{"begin": "driver", "printed": 0}, {"opening": "NVML"}]
    for last, deadly in (("libcuda.so.1", ("libcuda",)), ("/usr/lib/libcuda.so.1", ()), (None, ("nvml", "libcuda"))):
        result = result_of([*begun, *([{"opening": last}] if last else [])], b"", -6, 1.0)
        assert result.deadly == deadly
        assert result.opening == (last or "NVML")


def test_a_file_that_may_not_be_read_is_a_fact(tmp_path: Path) -> None:
    """Seen by a child without root's power to read everything."""
    from tests.faults.case import AS_A_USER

    closed = tmp_path / "onnxruntime" / "capi"
    closed.mkdir(parents=True)
    closed.chmod(0)
    code = (
        f"{AS_A_USER}\nfrom ortgpu.environment.packages.installed import read_refused\n"
        f"print(read_refused([{str(tmp_path)!r}], {str(closed.parent)!r}))"
    )
    try:
        done = run_python(code)
    finally:
        closed.chmod(0o755)
    assert f"path={os.fspath(closed)!r}, mode='d---------', own=True" in done.stdout, done.stdout + done.stderr


def test_the_telemetry_of_a_child_writes_into_no_folder_of_others(tmp_path: Path) -> None:
    """ONNX Runtime writes to TMPDIR/.ses, through a link that another user may have made there."""
    code = """
        from ortgpu.diagnosis.probe.probing import run_probe
        result = run_probe(None, timeout=60)
        print(result.measured("import", "providers"))
    """
    environ = {name: value for name, value in child_environment().items() if name != "ORT_DISABLE_TELEMETRY"}
    done = run_python(code, env={**environ, "TMPDIR": str(tmp_path)}).ok()
    assert "CPUExecutionProvider" in done.stdout
    assert os.listdir(tmp_path) == []
