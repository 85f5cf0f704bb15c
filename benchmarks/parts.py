"""Measure the parts of a benchmark, each in a process of its own, and write what they report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.this_machine import environment_record, find_gpus


def measure_parts(module: str, flag: str, parts: Sequence[str], more: Sequence[str], out: Path | None) -> int:
    """Run a module for each part, with ``--child FILE`` for its report. Print the figures. Return the exit code.

    Args:
        flag: names a part on the command line.
        more: further arguments of the module.
        out: the JSON file that gets the figures; it is complete after each part.
    """
    results: dict[str, Any] = {}
    record = {"benchmark": module.rpartition(".")[2], **environment_record(find_gpus()), "parts": results}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [sys.executable, "-m", module, flag, part, "--child", str(report), *more]
            child = subprocess.run(command, timeout=900, check=False)
            results[part] = json.loads(report.read_text()) if report.is_file() else {"failed": child.returncode}
        print(part)
        for name, value in results[part].items():
            print(f"  {name:44s}", _rounded(value), flush=True)
        if out is not None:
            out.write_text(json.dumps(record, indent=1))
    return int(any("failed" in figures for figures in results.values()))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value
