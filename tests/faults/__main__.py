"""``python -m tests.faults``: play every case and print the table.

    --no-advice    leave out the execution of fixes, which fetches gigabytes
    --quick        leave out cases that have to fetch hundreds of megabytes, and such fixes
    --markdown     write the tables into tests/faults/README.md, or WINDOWS.md
    --windows      those of Windows, in Wine
    NAME ...       only cases whose name holds one of these words

The exit status is 1 when anything of ours was wrong.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from tests.faults import CASES, Case, on_windows, windows_cases
from tests.faults.case import AnyCase
from tests.faults.report import OF_WINDOWS, README, Played, as_text, cases_table, groups_table, play, write
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.lab.models import Models
from tests.lab.stubs import Stubs, why_not_here
from tests.lab.wheels import Wheels
from tests.lab.windows import version, why_not

C = TypeVar("C", bound=AnyCase)

CACHE = Path(".pytest_cache/d/lab-wheels")  # where pytest keeps what the tests download


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Play every fault; print the table.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name holds this")
    parser.add_argument("--no-advice", action="store_true", help="execute no fix")
    parser.add_argument("--quick", action="store_true", help="fetch nothing large")
    parser.add_argument("--markdown", action="store_true", help="write tests/faults/README.md, or WINDOWS.md")
    parser.add_argument("--windows", action="store_true", help="play those of Windows, in Wine")
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at a time (default: 2)")
    asked = parser.parse_args()
    if reason := why_not() if asked.windows else why_not_here():
        _note(reason)
        return 2
    with tempfile.TemporaryDirectory(prefix="ortgpu-faults-") as scratch:
        played = (_play_windows if asked.windows else _play_all)(Path(scratch), asked)
    sys.stdout.write(f"{as_text(cases_table(played))}\n\n{as_text(groups_table(played))}\n")
    wrong = [one for one in played if one.wrong]
    for one in wrong:
        sys.stdout.write("\n  ".join([f"\n{one.case.name}:", *one.wrong]) + "\n")
    if asked.markdown:
        if len(played) != len(windows_cases.CASES if asked.windows else CASES):
            _note("the recorded table is that of all cases: with the newest ONNX Runtime, without --quick and names")
            return 2
        write(played, *((_about_windows(), OF_WINDOWS) if asked.windows else (_about(), README)))
    return 1 if wrong else 0


def _is_chosen(case: AnyCase, asked: argparse.Namespace) -> bool:
    return not asked.names or any(name in case.name for name in asked.names)


def _play_all(scratch: Path, asked: argparse.Namespace) -> list[Played]:
    cases = [case for case in CASES if _is_chosen(case, asked) and older_than(case.since) is None]
    if asked.quick:
        cases = [case for case in cases if not case.slow_break]
    for name in ("stubs", "models"):
        (scratch / name).mkdir()
    CACHE.mkdir(parents=True, exist_ok=True)
    stubs, models, wheels = Stubs(scratch / "stubs"), Models(scratch / "models"), Wheels(CACHE)
    # Before there are threads that could build the same one twice.
    for built in (stubs.cuda, stubs.nvml, stubs.hide_from_loader, stubs.hide_from_search):
        assert built.exists()

    def one(case: Case) -> Played:
        folder = scratch / "cases" / case.name
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            lab = Lab(Path(own), stubs, models, wheels)
            return play(case, lab, advice=not (asked.no_advice or (asked.quick and case.slow_fix)))

    return _in_threads(one, cases, asked.jobs)


def _play_windows(scratch: Path, asked: argparse.Namespace) -> list[Played]:
    for name in ("models", "wheels", "cases"):
        (scratch / name).mkdir()
    models, wheels = Models(scratch / "models"), on_windows.Wheels(scratch / "wheels")
    cases = [case for case in windows_cases.CASES if _is_chosen(case, asked) and not (asked.quick and case.index)]

    def one(case: on_windows.WindowsCase) -> Played:
        return on_windows.play(case, scratch / "cases", wheels, models, advice=not asked.no_advice)

    return _in_threads(one, cases, asked.jobs)


def _in_threads(one: Callable[[C], Played], cases: Sequence[C], jobs: int) -> list[Played]:
    done: list[str] = []

    def noted(case: C) -> Played:
        played = one(case)
        done.append(case.name)
        _note(f"[{len(done)}/{len(cases)}] {case.name}" + ("" if played.right else "  WRONG"))
        return played

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(noted, cases))


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _about() -> str:
    version = metadata.version("onnxruntime-gpu")
    libc = " ".join(platform.libc_ver())
    return (
        f"Played on {time.strftime('%Y-%m-%d')} with onnxruntime-gpu {version}, Python {platform.python_version()}, "
        f"{libc}, on a machine without a GPU."
    )


def _about_windows() -> str:
    return (
        f"Played on {time.strftime('%Y-%m-%d')} with onnxruntime-gpu 1.31.1 and Python 3.11.9 for Windows, in "
        f"{version()}, on a machine without a GPU."
    )


if __name__ == "__main__":
    raise SystemExit(main())
