"""A real Slurm between the lab's hosts: its controller on the first, its daemon on each, started as a cluster's are."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import PATH, Network

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_DEADLINE = 30.0
_STATE = "/run/slurm"  # on each host another folder
_CONFIGURATION = """
ClusterName=lab
SlurmctldHost={first.name}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/daemon
SlurmctldPidFile={state}/controller.pid
SlurmdPidFile={state}/daemon.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not_here() -> str | None:
    """Why there can be no Slurm, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=PATH) is None]
    return f"there is no {', '.join(missing)}: apt install slurmctld slurmd slurm-client munge" if missing else None


@contextlib.contextmanager
def slurm_on(network: Network, folder: Path) -> Iterator[dict[str, str]]:
    """Variables for srun. ``folder``: for the log of the daemons, and what they need. Skips where there is no Slurm."""
    if reason := why_not_here():
        pytest.skip(reason)
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=4 State=UNKNOWN\n" for host in network.hosts]
    configuration.write_text("".join([*nodes, _CONFIGURATION.format(first=network.hosts[0], state=_STATE)]))
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    variables = {"SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as running, (folder / "log").open("ab") as log:
        for number, host in enumerate(network.hosts):
            host.run(
                f"mount -t tmpfs tmpfs /run; mkdir -p /run/munge {_STATE}/controller {_STATE}/daemon;"
                f" munged --force --key-file={key} --log-file=/run/munge/log --seed-file=/run/munge/seed"
            )
            for program in (*(["slurmctld"] if number == 0 else []), f"slurmd -N {host.name}"):
                daemon = subprocess.Popen(
                    host.command(["env", f"PATH={PATH}", f"SLURM_CONF={configuration}", *program.split(), "-D"]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                running.callback(daemon.wait)
                running.callback(daemon.kill)
        idle = "\n".join(["idle"] * len(network.hosts))
        until = time.monotonic() + _DEADLINE
        ask = f"SLURM_CONF={configuration} sinfo --noheader --Node --format=%T || :"
        while network.hosts[0].run(ask).strip() != idle:
            assert time.monotonic() < until, (folder / "log").read_text(errors="replace")
            time.sleep(0.1)
        yield variables
