"""Children of a preflight that do not do what they should, each through the functions of the real one.

rank_program.py has it started in place of ortgpu.distributed.worker; RANK_MISBEHAVES says how.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

from ortgpu.distributed import worker
from ortgpu.distributed.worker import Channel, Task, make_unique_id, run_collectives


def _sleep_in_native_code() -> None:
    """With the interpreter lock held: no thread of this process runs any more."""
    ctypes.PyDLL(None).sleep(1000)


def killed(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    channel.begin("opening the GPU")
    channel.begin(worker.COMMUNICATOR)
    os.kill(os.getpid(), signal.SIGKILL)


def parent_killed(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """The rank itself dies; its child could go on."""
    channel.begin("opening the GPU")
    os.kill(os.getppid(), signal.SIGKILL)
    _sleep_in_native_code()


def parent_stopped(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """The rank itself stands still, and goes on when the others have given it up."""
    channel.begin("opening the GPU")
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(max(0.0, until + 3 - time.monotonic()))
    os.kill(os.getppid(), signal.SIGCONT)


def idle(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Joins, and calls nothing."""
    channel.begin("opening the GPU")
    gpu = worker.open_gpu(ordinal)  # without it NCCL would find all ranks on the first GPU
    channel.begin(worker.COMMUNICATOR)
    communicator = worker.Communicator(task.rank.rank, task.rank.world_size, unique_id)
    while not communicator.is_ready():
        time.sleep(0.01)
    channel.wait()
    del gpu


def never_joins(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    channel.begin("opening the GPU")
    channel.wait()


def asleep(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Hangs in the communicator's making, where the interpreter lock is held."""
    channel.begin("opening the GPU")
    channel.begin(worker.COMMUNICATOR)
    _sleep_in_native_code()


def asleep_in_operation(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Hangs between two calls of the first operation: the other ranks have begun the second."""
    vars(worker)["check"] = lambda *_: _sleep_in_native_code()
    run_collectives(channel, task, ordinal, unique_id, until)


def killed_in_operation(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Dies between two calls of the first operation: NCCL of the other ranks is left with a connection that ended."""
    vars(worker)["check"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    run_collectives(channel, task, ordinal, unique_id, until)


def asleep_with_results(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Has run everything, and hangs before it says so."""
    send = channel.send
    vars(channel)["send"] = lambda message: _sleep_in_native_code() if "results" in message else send(message)
    run_collectives(channel, task, ordinal, unique_id, until)


def deaf(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """As asleep, with a process of its own that ignores what can be ignored."""
    subprocess.Popen(["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"])
    asleep(channel, task, ordinal, unique_id, until)


def noisy(channel: Channel, task: Task, ordinal: int, unique_id: bytes, until: float) -> None:
    """Hangs, and prints one line without an end all the while."""
    channel.begin("opening the GPU")
    channel.begin(worker.COMMUNICATOR)
    while True:
        os.write(1, b"x" * (1 << 16))


RUNS = {
    run.__name__: run
    for run in (
        *(killed, parent_killed, parent_stopped, idle, never_joins),
        *(asleep, asleep_in_operation, killed_in_operation, asleep_with_results, deaf, noisy),
    )
}


def _make_id_without_files() -> bytes:
    """A call of the system fails in NCCL: no socket can be opened. The first id is made before, with its interface."""
    make_unique_id()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # both: a thread of NCCL raises the soft one (bootstrap.cc)
    return make_unique_id()


def _make_id_that_is_stale() -> bytes:
    """Of a process that has ended: what a job finds in a file that one before it has left there."""
    program = "from ortgpu.distributed.worker import make_unique_id; print(make_unique_id().hex())"
    told = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    return bytes.fromhex(told.stdout.split()[-1])


_IDS = {"without_files": _make_id_without_files, "stale_id": _make_id_that_is_stale}


def main(parent: int) -> None:
    kind = os.environ["RANK_MISBEHAVES"]
    if kind == "asleep_in_driver":
        vars(worker)["initialise"] = _sleep_in_native_code  # in place of the driver's cuInit
    elif kind == "killed_in_driver":
        vars(worker)["initialise"] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    elif kind in _IDS:
        vars(worker)["make_unique_id"] = _IDS[kind]
    vars(worker)["run_collectives"] = RUNS.get(kind, run_collectives)
    worker.main(parent)
