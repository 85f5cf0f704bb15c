"""Every rank has a GPU of its own: which one, and that no other rank of the job on this host has it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.environment.ranks import Rank, runtime_folder
from ortgpu.errors import RankDeviceError
from ortgpu.provider.rank_devices import own_device
from tests.lab import launchers
from tests.lab.fixtures import Lab, with_gpus
from tests.lab.launchers import launch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks of files are those of POSIX")

UUIDS = [f"GPU-00000000-0000-0000-0000-{number:012}" for number in range(4)]


def driver(count: int, hidden_by: str | None = None) -> CudaState:
    """A driver that shows so many GPUs, initialised while CUDA_VISIBLE_DEVICES was ``hidden_by``."""
    devices = [CudaDevice(number, UUIDS[number], "NVIDIA H200", (9, 0), 141 << 30, 0) for number in range(count)]
    return CudaState(0, tuple(devices), os.getpid(), hidden_by)


# Which GPU


@pytest.mark.parametrize(
    ("rank", "count", "ordinal"),
    [
        (Rank(0, 4, 0, 4), 4, 0),
        (Rank(3, 4, 3, 4), 4, 3),
        (Rank(6, 8, 2, 4), 4, 2),
        (Rank(1, 2, 1, 2), 4, 1),
        (Rank(3, 4, 3, 4), 1, 0),  # the launcher shows each rank its own
        (Rank(0, 1, 0, 1), 2, 0),
    ],
)
def test_gpu_by_local_rank(rank: Rank, count: int, ordinal: int) -> None:
    assert own_device(rank, driver(count)).ordinal == ordinal


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RankDeviceError) as caught:
        own_device(Rank(6, 8, 2, 4), driver(2, "0,1"))
    assert caught.value.ranks == (6,)
    assert UUIDS[0] in caught.value.evidence[0]
    assert "CUDA_VISIBLE_DEVICES=0,1" in caught.value.evidence
    assert "number 2 of 4 on this host" in caught.value.summary
    assert "sees 2 GPUs" in caught.value.summary


def test_a_variable_that_the_driver_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set after something had initialised CUDA, it is not what leaves a rank without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(RankDeviceError) as caught:
        own_device(Rank(2, 4, 2, 4), driver(2, "0,1"))
    assert "CUDA_VISIBLE_DEVICES was '0,1' when this process initialised CUDA" in caught.value.evidence[-1]
    assert "before anything in it uses CUDA" in caught.value.fixes[-1]


# Sessions of ranks, on a machine whose driver is the lab's: it names GPUs, and opens none


def test_session_asks_for_the_ranks_own_gpu(lab: Lab) -> None:
    job = launch(with_gpus(lab.machine(), 2), "environment", 2, "session_request", {"model": str(lab.models.relu)})
    assert [job.returned(number) for number in range(2)] == [0, 1]


def test_too_few_gpus_for_sessions(lab: Lab) -> None:
    job = launch(with_gpus(lab.machine(), 2), "environment", 3, "open_session", {"model": str(lab.models.relu)})
    assert job.error(2).type == "RankDeviceError"
    assert job.error(2).details["ranks"] == [2]


def test_two_sessions_on_the_only_gpu(lab: Lab) -> None:
    job = launch(
        with_gpus(lab.machine(), 1), "environment", 2, "session_request", {"model": str(lab.models.relu), "wait_for": 2}
    )
    errors = [outcome.error for outcome in job.ranks.values() if outcome.error is not None]
    assert errors
    for error in errors:
        assert error.type == "RankDeviceError"
        assert error.details["ranks"] == [0, 1]


def test_no_gpu_is_the_sessions_error(lab: Lab) -> None:
    job = launch(lab.machine(), "environment", 2, "open_session", {"model": str(lab.models.relu)})
    assert {job.error(number).type for number in range(2)} == {"DriverNotFoundError"}


def test_device_is_not_an_argument(lab: Lab) -> None:
    job = launch(lab.machine(), "environment", 1, "open_session", {"model": str(lab.models.relu), "device": 0})
    assert job.error(0).type == "TypeError"


# Claims


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS)
def test_ranks_with_a_gpu_each(lab: Lab, launcher: str) -> None:
    launchers.need(launcher)
    job = launch(lab.machine(), launcher, 3, "claim", {"uuids": UUIDS, "wait_for": 3})
    assert [job.returned(number) for number in range(3)] == UUIDS[:3]


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "environment"])
def test_two_ranks_claim_one_gpu(lab: Lab, launcher: str) -> None:
    if launcher != "environment":
        launchers.need(launcher)
    job = launch(lab.machine(), launcher, 2, "claim", {"uuids": [UUIDS[0]] * 2, "wait_for": 2})
    errors = [outcome.error for outcome in job.ranks.values() if outcome.error is not None]
    assert errors, "no rank noticed"
    for error in errors:
        assert error.type == "RankDeviceError"
        assert error.details["ranks"] == [0, 1]
        assert UUIDS[0] in error.text


CLAIM = """
import os, sys
from ortgpu.provider.rank_devices import claim
from ortgpu.environment.ranks import Rank
from ortgpu.errors import RankDeviceError
def take(rank, uuid):
    try:
        claim(Rank(rank, 4, rank, 4, "environment"), uuid)
        return "claimed"
    except RankDeviceError as error:
        return f"refused: {error.ranks}"
def hold(said):
    print(said, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.end()


class Starter:
    """Processes of one job that say what came of a claim, and stay until they are let go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, code: str, port: str = "29500") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLAIM + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.folder), "MASTER_ADDR": "here", "MASTER_PORT": port},
        )
        self.started.append(process)
        return process

    def says(self, code: str, port: str = "29500") -> str:
        return said(self(code, port))

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    @property
    def files(self) -> set[str]:
        return {path.name for path in (self.folder / "ortgpu").iterdir()}


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_claim_lasts_as_long_as_the_process(start: Starter) -> None:
    first = start(f"hold(take(0, {UUIDS[0]!r}))")
    assert said(first) == "claimed"
    assert start.says(f"hold(take(1, {UUIDS[0]!r}))") == "refused: (0, 1)"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert start.says(f"hold(take(2, {UUIDS[0]!r}))") == "claimed", "rank 1 lives, and has nothing since it was refused"
    assert start.files == {f"claims-{UUIDS[0]}"}, "one file, however many claims there are"


def test_same_rank_again_and_in_a_process_of_its_own(start: Starter) -> None:
    assert start.says(f"take(0, {UUIDS[0]!r}); hold(take(0, {UUIDS[0]!r}))") == "claimed"
    assert start.says(f"hold(take(0, {UUIDS[0]!r}))") == "claimed"
    assert start.says(f"hold(take(1, {UUIDS[0]!r}))") == "refused: (0, 1)"


def test_a_rank_with_two_gpus_and_one_that_was_refused(start: Starter) -> None:
    assert start.says(f"take(0, {UUIDS[0]!r}); hold(take(0, {UUIDS[1]!r}))") == "claimed"
    refused = f"take(1, {UUIDS[0]!r}); hold(take(1, {UUIDS[2]!r}))"
    assert start.says(refused) == "claimed"
    assert start.says(f"hold(take(2, {UUIDS[2]!r}))") == "refused: (1, 2)"


def test_another_job_is_of_no_concern(start: Starter) -> None:
    assert start.says(f"hold(take(0, {UUIDS[0]!r}))") == "claimed"
    assert start.says(f"hold(take(1, {UUIDS[0]!r}))", port="29501") == "claimed"


def test_a_forked_child_does_not_hold_the_gpu(start: Starter) -> None:
    """As a DataLoader's worker, which may outlive the rank that was killed."""
    rank = start(
        f"said = take(0, {UUIDS[0]!r})\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "hold(said)"
    )
    assert said(rank) == "claimed"
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert start.says(f"hold(take(1, {UUIDS[0]!r}))") == "claimed"


def test_ranks_at_the_same_moment(start: Starter) -> None:
    """Of all that have one GPU, at most one goes on."""
    processes = [start(f"hold(take({number}, {UUIDS[0]!r}))") for number in range(4)]
    outcomes = [said(process) for process in processes]
    assert outcomes.count("claimed") <= 1, outcomes


def test_runtime_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder == tmp_path / "ortgpu"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # somebody else could have put something there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    assert runtime_folder() == tmp_path / "other" / f"ortgpu-{os.getuid()}"
    (tmp_path / "other" / f"ortgpu-{os.getuid()}").rmdir()
    (tmp_path / "other" / f"ortgpu-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is not this user's alone"):
        runtime_folder()


def test_nowhere_to_write(start: Starter) -> None:
    (start.folder / "ortgpu").write_text("in the way")
    code = (
        f"import tempfile; tempfile.tempdir = {str(start.folder / 'nothing')!r}\n"
        "try: claim(Rank(0, 4, 0, 4, 'environment'), 'GPU-1')\n"
        "except RankDeviceError as error: hold(error.summary)"
    )
    assert start.says(code) == "ortgpu cannot verify that every rank has a GPU of its own"
