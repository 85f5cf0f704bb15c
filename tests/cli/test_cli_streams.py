"""The command line where its streams, folders or names are not the usual ones."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ortgpu import cli
from ortgpu.cli import report
from tests.lab.fixtures import Lab
from tests.lab.stubs import Stubs
from tests.support.children import run_child

DEADLINE = 110.0


@pytest.mark.parametrize("function", ["dup", "dup2"])
def test_a_closed_stream_hides_no_report(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ortgpu check <&- >&-`: the descriptor of stdout is closed, or only that of stderr."""

    real = getattr(os, function)

    def duplicate(*descriptors: int) -> int:
        if descriptors in ((1,), (2, 1)):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return int(real(*descriptors))

    done = []
    with monkeypatch.context() as patch:
        patch.setattr(os, function, duplicate)
        with report._libraries_print_to_stderr():
            done.append(True)
    assert done


def test_a_refused_document_without_a_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ortgpu doctor --json --python /bin/true | true` ends as quietly as any other command."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert cli.run(["doctor", "--json", "--timeout", "0"]) == 1
    assert capsys.readouterr().err == ""


def test_what_a_library_prints_is_not_in_the_document(lab: Lab) -> None:
    """It prints through C, whose buffer is written when the process ends: behind the document, if nobody cares."""
    code = """
    #include <stdio.h>
    __attribute__((constructor)) static void says(void) { printf("a library's word\\n"); }
    """
    talking = lab.stubs.compile("talking", code, "-Wl,-soname,libcurand.so.10")
    machine = lab.machine()
    real = machine.overlay.path("nvidia/*/lib/libcurand.so.10").relative_to(machine.overlay.site)
    machine.overlay.replace(str(real), talking)
    done = machine.run(argv=["-m", "ortgpu", "check", "--json"])
    assert json.loads(done.stdout)["error"]["type"] == "DriverNotFoundError", done.output
    assert "a library's word" in done.stderr


def test_a_terminal_of_no_size(tmp_path: Path) -> None:
    """As mpirun gives its ranks: before Python 3.11 its width is 0, and nothing was written."""
    mine, its = os.openpty()
    os.set_blocking(mine, False)
    without = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "ortgpu", "explain", "no-device"]
    subprocess.run(command, stdout=its, env=without, cwd=tmp_path, timeout=DEADLINE, check=True)
    assert b"NoDeviceError" in os.read(mine, 100_000)
    os.close(mine)
    os.close(its)


def test_demo_without_a_folder_for_temporary_files(stubs: Stubs, tmp_path: Path) -> None:
    """A container whose root is read-only: here, a process to which every folder is."""
    read_only = stubs.compile(
        "read_only.so",
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <errno.h>
        #include <fcntl.h>
        #include <stdarg.h>
        #include <sys/types.h>
        int open64(const char *path, int flags, ...) {
            va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);
            if (flags & O_CREAT) { errno = EROFS; return -1; }
            return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
        }
        """,
    )
    done = run_child(
        [sys.executable, "-m", "ortgpu", "demo"],
        env={**os.environ, "LD_PRELOAD": str(read_only), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        deadline=DEADLINE,
    )
    assert done.returncode == 0, done
    assert "no exception says so" in done.stdout


def test_errors_of_others_have_the_same_keys(tmp_path: Path) -> None:
    """A program that reads ``error["fixes"]`` must not fail over an invalid model."""
    model = tmp_path / "model.onnx"
    model.write_bytes(b"no model")
    keys = ["type", "code", "summary", "evidence", "fixes", "details", "others"]  # as `ortgpu check --help` has them
    ours, theirs = (documented_error("check", "--json"), documented_error("check", "--json", "--allow-cpu", str(model)))
    assert [key for key in keys if key not in ours] == [key for key in keys if key not in theirs] == []
    assert theirs["type"] == "InvalidProtobuf"
    assert theirs["code"] is None
    assert theirs["fixes"] == []


def documented_error(*arguments: str) -> dict[str, Any]:
    done = run_child(
        [sys.executable, "-m", "ortgpu", *arguments], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, deadline=DEADLINE
    )
    assert done.returncode == 1, done.stderr
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    return error
