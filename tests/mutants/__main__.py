"""``python -m tests.mutants``: plant each mutant of the list in a copy of the package, and run its tests there.

    --lab      run also the tests of the laboratory, which plain pytest leaves out
    --healthy  plant nothing: the tests must pass
    NAME ...   only the mutants whose name contains one of these words

A mutant is killed if a test fails, or if the tests do not end in time. The exit status is 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.planted import MUTANTS, Mutant
from tests.support.children import ROOT

_COPIED = ("ortgpu", "tests", "examples", "benchmarks", "README.md", "pyproject.toml")
_DEADLINE = 400  # seconds for the tests of one mutant
_LAB = "not matrix and not slow and not windows"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant faults; say which tests see.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutants whose name contains this")
    parser.add_argument("--lab", action="store_true", help="run also the tests of the laboratory")
    parser.add_argument("--healthy", action="store_true", help="plant nothing: the tests must pass")
    arguments = parser.parse_args()
    chosen = [
        mutant for mutant in MUTANTS if not arguments.names or any(name in mutant.name for name in arguments.names)
    ]
    survivors = 0
    for mutant in chosen:
        began = time.monotonic()
        is_killed, reason = run(mutant, with_lab=arguments.lab, healthy=arguments.healthy)
        survivors += not is_killed
        verdict = "killed" if is_killed else "SURVIVED"
        sys.stdout.write(f"{verdict:8}  {time.monotonic() - began:5.1f} s  {mutant.name}: {reason}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - survivors} of {len(chosen)} killed\n")
    return 1 if survivors else 0


def run(mutant: Mutant, *, with_lab: bool = False, healthy: bool = False) -> tuple[bool, str]:
    """Return True if a test fails with the mutant, and the name of the test or the last line of pytest."""
    with tempfile.TemporaryDirectory(prefix="ortgpu-mutant-") as folder:
        for name in _COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, Path(folder, name))
        path = Path(folder, "ortgpu", mutant.path)
        if not healthy:
            path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()
        marker = ["-m", _LAB] if with_lab else []
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *marker]
        process = subprocess.Popen(
            [*command, *mutant.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return True, f"the tests did not end in {_DEADLINE} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    lines = output.strip().splitlines()
    if process.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {process.returncode}: {lines[-1:]}")
    return process.returncode != 0, failed[0] if failed else " ".join(lines[-1:])


if __name__ == "__main__":
    sys.exit(main())
