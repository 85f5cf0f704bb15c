"""What the profile "training" really tries - MPI, ssh, a folder - and what is judged of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortgpu.distributed import Rank
from ortgpu.distributed.diagnosis.training import meet as meet_in_child
from ortgpu.distributed.diagnosis.training import try_mpi
from ortgpu.distributed.environment import Mpi, SshAttempt, try_ssh
from ortgpu.distributed.environment.shared_folder import FolderMeeting, meet_in_folder
from ortgpu.errors import GPUError
from tests.distributed.test_training_diagnosis import OPEN_MPI, only, problems, training_facts
from tests.lab import Stubs

pytestmark = pytest.mark.lab

DEADLINE = 60.0
ROOT = Path(__file__).resolve().parents[2]


# MPI


def stub_mpi(folder: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> Mpi:
    """mpi4py without MPI, and a launcher of one line of shell."""
    for name in os.environ.keys() & {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}:
        monkeypatch.delenv(name)
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").touch()
    (folder / "mpi4py/MPI.py").write_text(
        "class COMM_WORLD:\n    size = 1\n    allreduce = staticmethod(lambda value: value)\n"
        "def Get_library_version(): return 'made up'\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(folder))
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\n{launcher}\n", encoding="utf-8")
    program.chmod(0o755)
    return Mpi(str(program), OPEN_MPI, "4.1.2", OPEN_MPI, {})


def test_mpi_is_started_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = stub_mpi(tmp_path, monkeypatch, 'test "$1 $2" = "-np 1" || exit 9; shift 2; exec "$@"')
    step = try_mpi(mpi, timeout=DEADLINE)
    assert step is not None
    assert (step.ok, step.detail) == (True, "1 rank, made up")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert try_mpi(mpi, timeout=DEADLINE) is None, "a launcher in a launcher shows nothing"


def test_mpi_that_aborts_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = try_mpi(stub_mpi(tmp_path, monkeypatch, "echo 'MPI_ERRORS_ARE_FATAL' >&2; kill -ABRT $$"), timeout=DEADLINE)
    assert step is not None
    assert (step.ok, step.detail, step.data["errors"]) == (False, "ended with -6", "MPI_ERRORS_ARE_FATAL")


def test_mpi_that_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = try_mpi(stub_mpi(tmp_path, monkeypatch, "exec sleep 300"), timeout=1.0)
    assert step is not None
    assert step.detail == "did not end within 1 s"


def test_without_mpi_there_is_nothing_to_try() -> None:
    assert try_mpi(Mpi(None, None, None, None, {}), timeout=DEADLINE) is None


# Other hosts


def judged_ssh(*attempts: SshAttempt) -> GPUError:
    return only(problems(training=replace(training_facts(), ssh=attempts)))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody else gets while the test runs, and that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh program is on PATH")
def test_real_ssh_to_a_closed_port(closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh takes a port from its configuration, so a program of that name adds one."""
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -p {closed_port} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    attempt = try_ssh("localhost", timeout=DEADLINE)
    assert attempt.returncode == 255
    error = judged_ssh(attempt)
    assert (type(error).__name__, error.details()["phase"]) == ("DistributedError", "ssh")
    assert error.summary == "ssh to localhost fails without a password"
    assert "Connection refused" in error.evidence[0]
    assert "`ssh -v localhost true`" in error.fixes[0]


def stub_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_ssh_is_asked_for_nothing_that_needs_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_ssh(tmp_path, monkeypatch, f'printf "%s\\n" "$@" > {tmp_path}/arguments; exit 0')
    assert try_ssh("-oProxyCommand=touch x", timeout=DEADLINE).returncode == 0
    words = (tmp_path / "arguments").read_text(encoding="utf-8").splitlines()
    assert words[-3:] == ["--", "-oProxyCommand=touch x", "true"], "a host is never an option"
    assert {"BatchMode=yes", "ConnectTimeout=5"} <= set(words)


def test_what_ssh_says_of_a_host_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "user@node7: Permission denied (publickey,password)."
    stub_ssh(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 255")
    error = judged_ssh(try_ssh("node7", timeout=DEADLINE))
    assert error.evidence == (f"node7: {said}",)
    assert "ssh-copy-id node7" in error.fixes[0]


def test_hosts_that_fail_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_ssh(tmp_path, monkeypatch, 'case "$*" in *good*) exit 0;; *shell*) exit 127;; *) exit 255;; esac')
    error = judged_ssh(*(try_ssh(host, timeout=DEADLINE) for host in ("good", "bad", "shell")))
    assert error.summary == (
        "ssh to bad fails without a password; ssh reaches shell, and the command `true` ended with 127 there"
    )
    assert len(error.fixes) == 2


def test_no_ssh_and_ssh_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_ssh(tmp_path, monkeypatch, "exec sleep 300")
    assert "did not end in time" in judged_ssh(try_ssh("slow", timeout=1.0)).summary
    error = judged_ssh(try_ssh("an\0y", timeout=DEADLINE))
    assert error.summary == r"ssh to an\x00y cannot be started"
    assert error.evidence == (r"an\x00y: embedded null byte",)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "there is no ssh program" in judged_ssh(try_ssh("any", timeout=DEADLINE)).summary


# A folder that all ranks share

MEET = """
import json, sys
from ortgpu.distributed.environment.shared_folder import meet_in_folder
folder, rank, world_size, timeout = sys.argv[1:]
found = meet_in_folder(folder, int(rank), int(world_size), timeout=float(timeout))
print(json.dumps([found.ok, found.missing, found.error]))
"""


def meet(*folders: Path, timeout: float, longer: Sequence[float] = ()) -> list[list[Any]]:
    """One process for each folder, as ranks of one job. ``longer``: seconds by which each waits longer."""
    command = [sys.executable, "-c", MEET]
    timeouts = [timeout + more for more in longer or [0.0] * len(folders)]
    ranks = [
        subprocess.Popen(
            [*command, str(folder), str(rank), str(len(folders)), str(timeouts[rank])], cwd=ROOT, stdout=subprocess.PIPE
        )
        for rank, folder in enumerate(folders)
    ]
    return [json.loads(rank.communicate(timeout=DEADLINE)[0]) for rank in ranks]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_meet_in_one_folder(count: int, tmp_path: Path) -> None:
    assert meet(*[tmp_path] * count, timeout=DEADLINE / 2) == [[True, [], None]] * count
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_ranks_with_two_folders_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert meet(*folders, timeout=1.5) == [[False, [1], None], [False, [0], None]]
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.mark.parametrize("longer", [(0, 0.4, 0, 0.8), (0.8, 0, 0, 0.4), (0.4, 0.8, 0.8, 0)], ids=str)
def test_who_gives_up_first_was_met_all_the_same(longer: tuple[float, ...], tmp_path: Path) -> None:
    """Ranks never have the same deadline to the moment: a launcher starts them one after the other."""
    folders = [tmp_path / name for name in "aaba"]
    for folder in set(folders):
        folder.mkdir()
    found = meet(*folders, timeout=2.0, longer=longer)
    assert found == [[False, missing, None] for missing in ([2], [2], [0, 1, 3], [2])]
    assert [list(folder.iterdir()) for folder in folders] == [[]] * 4


def test_tokens_of_an_earlier_run_are_not_taken_for_a_rank(tmp_path: Path) -> None:
    left = tmp_path / ".ortgpu-shared-folder"
    left.mkdir()
    (left / "1.json").write_text('{"token": "x", "seen": {"0": "y"}, "done": true}', encoding="utf-8")
    assert meet_in_folder(tmp_path, 0, 2, timeout=0.5).missing == (1,)
    (left / "1.json").parent.mkdir(exist_ok=True)
    (left / "1.json").write_text('{"token": "x", "seen": {"0": "y"}, "done": true}', encoding="utf-8")
    assert meet(tmp_path, tmp_path, timeout=DEADLINE / 2) == [[True, [], None]] * 2


def test_links_that_another_user_left(tmp_path: Path) -> None:
    """In a folder that everybody may write to: nothing is written through them, read through them or removed."""
    precious = tmp_path / "of the victim"
    precious.mkdir()
    for name in ("file", "0.json", "0.partial"):
        (precious / name).write_text("precious", encoding="utf-8")
    shared = tmp_path / "shared"
    place = shared / ".ortgpu-shared-folder"
    place.mkdir(parents=True)
    for name in ("0.partial", "0.json", "1.json"):
        (place / name).symlink_to(precious / "file")
    assert meet_in_folder(shared, 0, 1, timeout=1.0).ok
    assert [path.name for path in place.iterdir()] == ["1.json"]
    (place / "1.json").unlink()
    place.rmdir()
    place.symlink_to(precious)
    meeting = meet_in_folder(shared, 0, 1, timeout=1.0)
    assert meeting.error is not None
    assert str(place) in meeting.error
    assert {path.read_text(encoding="utf-8") for path in precious.iterdir()} == {"precious"}
    assert len(list(precious.iterdir())) == 3


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "leave",
    [
        _fifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text("[" * 100_000, encoding="utf-8"),
        lambda path: path.write_text('{"token": {}, "seen": [], "done": 1}', encoding="utf-8"),
        lambda path: path.write_text('{"token": "x", "seen": [], "done": 1}', encoding="utf-8"),
        lambda path: path.write_text("null", encoding="utf-8"),
    ],
    ids=["fifo", "folder", "link", "deep", "token", "seen", "null"],
)
def test_what_another_user_left_in_the_place_of_a_rank(leave: Callable[[Path], object], tmp_path: Path) -> None:
    """It is no rank, and keeps nobody from the deadline."""
    place = tmp_path / ".ortgpu-shared-folder"
    place.mkdir()
    leave(place / "1.json")
    before = os.listdir("/proc/self/fd")
    meeting = meet_in_folder(tmp_path, 2, 3, timeout=0.5)
    assert (meeting.missing, meeting.error) == ((0, 1), None)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert meeting.seconds < 5


def test_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    meeting = meet_in_folder(tmp_path / "file", 0, 1, timeout=1.0)
    error = only(problems(training=replace(training_facts(), shared_folder=meeting)))
    assert error.code == "distributed-error"
    assert (error.details()["phase"], error.details()["ranks"]) == ("shared folder", (0,))
    assert "cannot write and read" in error.summary


def test_a_file_system_that_never_answers(stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = stubs.compile("hanging_mkdir.so", "#include <unistd.h>\nint mkdir(void) { for (;;) pause(); }")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # else Python makes folders of its own
    monkeypatch.setenv("LD_PRELOAD", str(hanging))
    meeting = meet_in_child(tmp_path, Rank(0, 2, 0, 2), timeout=0.5)
    assert (meeting.error, meeting.missing) == ("the file system does not answer", (1,))
    monkeypatch.delenv("LD_PRELOAD")
    assert meet_in_child(tmp_path, Rank(0, 1, 0, 1), timeout=DEADLINE).ok


STALE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static char own; /* the rank that this process writes as: nobody else replaces its file */
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    own = to[strlen(to) - strlen("0.json")];
    void *real = dlsym(RTLD_NEXT, "renameat");
    return ((int (*)(int, const char *, int, const char *))real)(from_folder, from, to_folder, to);
}
ssize_t read(int descriptor, void *buffer, size_t size) {
    static int looks;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path);
    int is_token = length > 6 && memcmp(path + length - 5, ".json", 5) == 0 && path[length - 6] != own;
    if (is_token && looks++ % 3 == 0) { /* a look that succeeds reads twice: the text, and its end */
        errno = ESTALE;
        return -1;
    }
    return ((ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read"))(descriptor, buffer, size);
}
"""


def test_a_file_that_another_host_replaced_while_it_was_read(
    stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS then says ESTALE, as nfs(5) and open(2) have it: the new file is there at the next look."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("LD_PRELOAD", str(stubs.compile("stale_read.so", STALE)))
    assert meet(tmp_path, tmp_path, timeout=DEADLINE / 2) == [[True, [], None]] * 2


# A token that was looked for in vain is not there again before its folder is listed
REMEMBERED = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/fcntl.h>
#include <string.h>
#include <sys/types.h>
static char absent[16][4096];
static int count;
static int look(const char *name, int folder, const char *path, int flags, mode_t mode) {
    size_t length = strlen(path);
    int is_token = length > 5 && length < sizeof *absent && strcmp(path + length - 5, ".json") == 0;
    for (int number = 0; is_token && number < count; number++)
        if (strcmp(absent[number], path) == 0) {
            errno = ENOENT;
            return -1;
        }
    int descriptor = ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, name))(folder, path, flags, mode);
    if (descriptor < 0 && errno == ENOENT && is_token && count < 16) strcpy(absent[count++], path);
    return descriptor;
}
DIR *fdopendir(int folder) {
    count = 0;
    return ((DIR *(*)(int))dlsym(RTLD_NEXT, "fdopendir"))(folder);
}
int open(const char *path, int flags, mode_t mode) { return look("openat", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, mode_t mode) { return look("openat64", AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, mode_t mode) { return look("openat", folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, mode_t mode) {
    return look("openat64", folder, path, flags, mode);
}
"""


def test_a_file_system_that_remembers_what_was_not_there(stubs: Stubs, tmp_path: Path) -> None:
    """NFS does so for half a minute, which is all the time that the doctor gives the ranks: nfs(5), lookupcache."""
    preload = stubs.compile("remembered.so", REMEMBERED)

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", MEET, str(tmp_path), str(rank), "2", "8"]
        environment = {**os.environ, "LD_PRELOAD": str(preload), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment)

    first = start(0)
    until = time.monotonic() + DEADLINE
    while not (tmp_path / ".ortgpu-shared-folder/0.json").exists() and time.monotonic() < until:
        time.sleep(0.01)  # it has looked for the other one when it writes its own
    ranks = [first, start(1)]
    assert [json.loads(rank.communicate(timeout=DEADLINE)[0]) for rank in ranks] == [[True, [], None]] * 2


def test_ranks_that_were_not_met_are_named() -> None:
    meeting = FolderMeeting("/mnt/job", 0, 4, (2, 3), None, 30.0)
    error = only(problems(training=replace(training_facts(), shared_folder=meeting)))
    assert (type(error).__name__, error.details()["ranks"]) == ("RendezvousError", (2, 3))
    assert "rank 0 did not meet rank 2, 3 in /mnt/job" in error.summary
