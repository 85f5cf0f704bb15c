"""``python -m tests.gpu FOLDER [STEP ...]``: every test that carries the marker, on a host with one GPU or several.

Tests that measure free memory must have a GPU to themselves, and others need several. The steps, all unless named:

    lanes     files that see one GPU, in a lane for each GPU
    together  what shares GPUs: ranks, Ray, training, guarded libraries, and what is marked outside of tests/gpu
    alone     one after the other, with all GPUs: what measures and takes several, and what lanes skipped

FOLDER keeps a log and a JUnit file of each run. The end counts all that is in it: steps can be taken one by one, with
packages installed in between. A test has passed if it passed in one of them and failed in none. Examples import ortgpu
too: install it, or put this repository on PYTHONPATH.

The exit status is 0 when nothing failed and something passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.this_machine import GPUs, environment_record, find_gpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

LANES = (
    ("test_refused.py", "test_cudnn_handles.py", "test_running.py", "test_neighbours.py"),
    ("test_lifetime.py", "test_pipeline.py", "test_shapes.py"),
    ("test_staging.py", "test_layout.py", "test_streams.py"),
    (
        "test_placement.py", "test_requests.py", "test_other_cuda_plugins.py", "test_cudnn.py", "test_tensorrt.py",
        "test_models.py", "test_healthy_variations.py", "test_pytest_plugin.py",
    ),
)  # fmt: skip
RANKS = "test_distributed.py"
TOGETHER = ("test_ray.py", "test_training_profile.py", "test_training.py", "test_guard.py")
ALONE = ("test_devices.py", "test_memory.py", "test_pool.py")
# They measure how much of which GPU is free, and take several of them.
MEASURED = {RANKS: "out_of_memory or of_its_own", "test_ray.py": "fills"}

HOW_MUCH = ("ORTGPU_CYCLES", "ORTGPU_SOAK_SECONDS")  # variables that tests read: how many sessions, how long

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "ortgpu")
DEADLINE = 900  # seconds of one run of pytest
GROUPS_OF_RANKS = 4  # at a time, for each pair of GPUs
_ORDER = ("skipped", "passed", "failed")  # of what came out more than once, the last counts


class Outcome(NamedTuple):
    what: str  # one of _ORDER
    why: str


class Runs:
    """Runs of pytest whose logs and results are kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        models = os.environ.get("ORTGPU_TEST_MODELS") or str(folder / "models")
        self._env = {**os.environ, "ORTGPU_REQUIRE_GPU": "1", "ORTGPU_TEST_MODELS": models}

    def run(self, name: str, arguments: Iterable[str], env: Mapping[str, str] | None = None) -> None:
        results = self._folder / f"{name}.xml"
        results.unlink(missing_ok=True)
        with open(self._folder / f"{name}.log", "wb") as log:
            try:
                subprocess.run(
                    [*PYTEST, "-rfE", f"--junitxml={results}", *arguments],
                    cwd=ROOT, env={**self._env, **(env or {})}, stdout=log, stderr=log, timeout=DEADLINE, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                log.write(b"\nit took longer than %d seconds\n" % DEADLINE)
        if not results.exists():  # it crashed, or was killed
            failed = f'<testcase name="{name}"><failure message="see its log"/></testcase>'
            results.write_text(f"<testsuite>{failed}</testsuite>", encoding="utf-8")
        _say(f"{name}: {_count(outcomes([results]).values())}")

    def lanes(self, gpus: GPUs) -> None:
        uuids = [gpu.uuid for gpu in gpus.visible]

        def use(number: int) -> None:
            for lane in LANES[number :: len(uuids)]:
                for file in lane:
                    self.run(f"lane-{file}", [f"tests/gpu/{file}"], {"CUDA_VISIBLE_DEVICES": uuids[number]})

        with ThreadPoolExecutor(len(uuids)) as pool:
            list(pool.map(use, range(len(uuids))))

    def together(self, gpus: GPUs) -> None:
        several = len(gpus.visible) > 1
        ranks = _collected(f"tests/gpu/{RANKS}", *_but_measured(RANKS)) if several else []
        groups = min(len(ranks), GROUPS_OF_RANKS * (len(gpus.visible) // 2))
        with ThreadPoolExecutor(groups + len(TOGETHER) + 1) as pool:
            runs = [pool.submit(self.run, f"ranks-{group}", ranks[group::groups]) for group in range(groups)]
            runs += [
                pool.submit(self.run, f"together-{file}", [f"tests/gpu/{file}", *_but_measured(file)])
                for file in TOGETHER
            ]
            runs.append(pool.submit(self.run, "elsewhere", ["tests", "--ignore=tests/gpu"]))
            for each in runs:
                each.result()

    def alone(self) -> None:
        for file, measured in MEASURED.items():
            self.run(f"alone-of-{file}", [f"tests/gpu/{file}", "-k", measured])
        for file in ALONE:
            self.run(f"alone-{file}", [f"tests/gpu/{file}"])
        skipped = [test for test, found in outcomes(self._folder.glob("lane-*.xml")).items() if found.what == "skipped"]
        if skipped:
            self.run("alone-skipped", skipped)


def outcomes(files: Iterable[Path]) -> dict[str, Outcome]:
    """What came of each test, by the name that pytest takes for it."""
    found: dict[str, Outcome] = {}
    for file in sorted(files):
        for case in ElementTree.parse(file).iter("testcase"):
            module = case.get("classname", "")
            test = f"{module.replace('.', '/')}.py::{case.get('name')}" if module else str(case.get("name"))
            outcome = _outcome_of(case)
            if test not in found or _ORDER.index(outcome.what) > _ORDER.index(found[test].what):
                found[test] = outcome
    return found


def _outcome_of(case: ElementTree.Element) -> Outcome:
    for kind, what in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (part := case.find(kind)) is not None:
            return Outcome(what, part.get("message", "").partition("\n")[0])
    return Outcome("passed", "")


def _but_measured(file: str) -> list[str]:
    return ["-k", f"not ({MEASURED[file]})"] if file in MEASURED else []


def _collected(*arguments: str) -> list[str]:
    """Names of tests. Raises RuntimeError where there are none, or pytest could not tell."""
    command = [*PYTEST, "--collect-only", *arguments]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if listed.returncode:
        raise RuntimeError(f"pytest --collect-only ended with {listed.returncode}:\n{listed.stdout}{listed.stderr}")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def _record(gpus: GPUs, found: Mapping[str, Outcome], not_passed: Mapping[str, Outcome]) -> dict[str, object]:
    files: dict[str, list[Outcome]] = {}
    for test, outcome in sorted(found.items()):
        files.setdefault(test.partition("::")[0], []).append(outcome)
    return {
        **environment_record(gpus),
        "how much": {name: os.environ.get(name, "what the test says") for name in HOW_MUCH},
        "outcomes": _count(found.values()),
        "by file": {file: _count(of_file) for file, of_file in files.items()},
        "not passed": not_passed,
    }


def _count(found: Iterable[Outcome]) -> str:
    kinds = [each.what for each in found]
    return ", ".join(f"{kinds.count(what)} {what}" for what in reversed(_ORDER) if what in kinds) or "no tests"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    steps = ("lanes", "together", "alone")
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Run every test that carries the marker.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for logs and results")
    parser.add_argument("steps", nargs="*", metavar="STEP", default=steps, help=f"of {', '.join(steps)}")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.steps).difference(steps):
        parser.error(f"no step: {', '.join(sorted(unknown))}")
    gpus = find_gpus()
    if not gpus.visible:
        _say(f"no GPU to test on: {gpus.reason}")
        return 2
    folder: Path = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(folder)
    if "lanes" in asked.steps:
        runs.lanes(gpus)
    if "together" in asked.steps:
        runs.together(gpus)
    if "alone" in asked.steps:
        runs.alone()
    found = outcomes(folder.glob("*.xml"))
    not_passed = {test: outcome for test, outcome in sorted(found.items()) if outcome.what != "passed"}
    for test, outcome in not_passed.items():
        _say(f"{outcome.what}: {test}: {outcome.why}")
    _say(f"all: {_count(found.values())}")
    (folder / "summary.json").write_text(json.dumps(_record(gpus, found, not_passed), indent=1), encoding="utf-8")
    kinds = {outcome.what for outcome in found.values()}
    return 0 if "passed" in kinds and "failed" not in kinds else 1


if __name__ == "__main__":
    sys.exit(main())
