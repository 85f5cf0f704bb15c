"""Real launchers: Open MPI's and MPICH's from their wheels, torchrun from torch; and the ranks that they start.

Both wheels have a bin/mpirun, of which the last one installed stays: each is called by the name that only it has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lab.child import Machine, Problem, problem_from
from tests.lab.hosts import Network
from tests.support.children import Child

ROOT = Path(__file__).parents[2]
RANK_PROGRAM = ROOT / "tests" / "support" / "rank_program.py"
MARK = "LAB_JOB"  # a variable that all processes of one launch have

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # which Open MPI refuses by itself

_WHERE = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
_NAMES = {"openmpi": ("orterun", "prterun"), "mpich": ("mpiexec.hydra",)}
LAUNCHERS = ("openmpi", "mpich", "torchrun")


def why_not_here(launcher: str) -> str | None:
    """Why a launcher cannot be used, or None when it can."""
    if launcher == "torchrun":
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    return None if _path_of(launcher) else f"there is no {' or '.join(_NAMES[launcher])}: pip install {launcher}"


def need(launcher: str) -> None:
    """Skip the test where a launcher cannot be used."""
    if reason := why_not_here(launcher):
        pytest.skip(reason)


def _path_of(launcher: str) -> str | None:
    return next(filter(None, (shutil.which(name, path=_WHERE) for name in _NAMES[launcher])), None)


def starts_of(launcher: str, ranks: int, python: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines, and variables of each, that start ``python`` with arguments as often as there are ranks.

    "environment" is no launcher: each process is told by its variables who it is, and none is ended for another.
    """
    if launcher == "environment":
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": uuid.uuid4().hex}
        return [([*python], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [([*torchrun, "--no-python", *python], {})]
    found = _path_of(launcher)
    assert found is not None, why_not_here(launcher)
    return [([found, *(["--oversubscribe"] if launcher == "openmpi" else []), "-n", str(ranks), *python], {})]


def starts_between_hosts(
    launcher: str,
    network: Network,
    each: int,
    python: Sequence[str],
    by_host: Mapping[str, Mapping[str, str]] | None = None,
) -> list[tuple[list[str], dict[str, str]]]:
    """The same with ``each`` so many ranks on every host, and rank 0 on the first.

    ``by_host``: variables of those that are told by their variables who they are.
    """
    hosts = network.hosts
    first, size = hosts[0], each * len(hosts)
    if launcher == "environment":
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": first.name,
            "MASTER_PORT": "29500",
        }
        return [
            (
                host.command(python),
                {
                    **shared,
                    "RANK": str(each * number + local),
                    "LOCAL_RANK": str(local),
                    **(by_host or {}).get(host.name, {}),
                },
            )
            for number, host in enumerate(hosts)
            for local in range(each)
        ]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={each}"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.name}:29400", f"--rdzv-id={uuid.uuid4().hex}"]
        return [(host.command([*torchrun, *meeting, "--no-python", *python]), {}) for host in hosts]
    if launcher == "srun":
        return [(first.command(["srun", f"--nodes={len(hosts)}", f"--ntasks-per-node={each}", *python]), {})]
    found = _path_of(launcher)
    assert found is not None, why_not_here(launcher)
    agent = str(network.agent())
    places = ",".join(f"{host.name}:{each}" for host in hosts)
    options = {
        "openmpi": ["--mca", "plm_rsh_agent", agent, "--host", places],
        "mpich": ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", places],
    }
    return [(first.command([found, *options[launcher], "-n", str(size), *python]), {})]


@dataclass(frozen=True)
class RankOutcome:
    """What one rank reported: what its action returned, or what it raised; None: it did not come to that."""

    returned: Any
    error: Problem | None
    seconds: float


@dataclass(frozen=True)
class Job:
    """Ranks that a launcher started, by number. ``left``: processes and files that were still there at the end."""

    ranks: Mapping[int, RankOutcome]
    status: int
    left: tuple[str, ...]
    result: Child = field(repr=False)

    def error(self, rank: int) -> Problem:
        outcome = self.ranks.get(rank)
        assert outcome is not None, f"rank {rank} reported nothing: {self.result.output}"
        assert outcome.error is not None, f"rank {rank} returned {outcome.returned}"
        return outcome.error

    def returned(self, rank: int) -> Any:
        outcome = self.ranks.get(rank)
        assert outcome is not None, f"rank {rank} reported nothing: {self.result.output}"
        assert outcome.error is None, outcome.error.text
        return outcome.returned


def launch(
    machine: Machine,
    launcher: str,
    ranks: int,
    action: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60.0,
) -> Job:
    """Run an action of rank_program.py in each rank, and wait for the launcher's end."""
    return launch_command(machine, launcher, ranks, rank_program(action, arguments or {}), env=env, timeout=timeout)


def rank_program(action: str, arguments: Mapping[str, Any]) -> list[str]:
    """What Python is started with for an action of rank_program.py."""
    return [str(RANK_PROGRAM), json.dumps({"action": action, "arguments": dict(arguments)})]


def launch_command(
    machine: Machine,
    launcher: str,
    ranks: int,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60.0,
) -> Job:
    """Run the machine's Python with these arguments in each rank, and wait for the launcher's end."""
    starts = starts_of(launcher, ranks, [str(machine.overlay.python), *arguments])
    return launch_commands(machine, starts, env=env, timeout=timeout)


def launch_commands(
    machine: Machine,
    starts: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    *,
    env: Mapping[str, str | None] | None = None,
    timeout: float = 60.0,
) -> Job:
    """Run these commands at the same time, each with variables of its own, and wait for the end of all."""
    mark = uuid.uuid4().hex
    variables = {**AS_ROOT, MARK: mark, **(env or {})}
    code = (
        f"import os, subprocess\n"
        f"folder = os.environ['RANK_REPORTS'] = os.path.join(os.environ['TMPDIR'], 'ranks')\n"
        f"os.mkdir(folder)\n"
        f"started = [subprocess.Popen(command, env={{**os.environ, **more}}) for command, more in {starts!r}]\n"
        f"statuses = [process.wait() for process in started]\n"
        f"reports = [json.load(open(os.path.join(folder, name))) for name in sorted(os.listdir(folder))]\n"
        f"files = [name for _, _, names in os.walk(os.environ['TMPDIR']) for name in names if 'meeting-' in name]\n"
        f"report({{'status': max(statuses), 'ranks': reports, 'files': files}})\n"
    )
    result = machine.run(code, env=variables, timeout=timeout)
    left = processes_with(mark)
    assert result.json is not None, result.output
    return Job(outcomes_of(result.json["ranks"]), result.json["status"], (*left, *result.json["files"]), result)


def outcomes_of(reports: Iterable[Mapping[str, Any]]) -> dict[int, RankOutcome]:
    """What ranks wrote into their files, by rank."""
    return {
        entry["rank"]: RankOutcome(entry["returned"], problem_from(entry["error"]), entry["seconds"])
        for entry in reports
    }


def processes_with(mark: str) -> tuple[str, ...]:
    """Command lines of the processes that have this mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended, or is another user's
            continue
    return tuple(found)
