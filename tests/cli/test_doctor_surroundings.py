"""The doctor where everything else fails: without a home, a disk, streams or a working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import WITHOUT_ITS_FOLDER
from tests.lab.fixtures import Lab
from tests.support.doctor_runs import EVERYTHING, LOOK, doctor


@pytest.mark.parametrize("options", [(), ("--json",), ("--redact",)], ids=" ".join)
def test_working_directory_that_is_gone(lab: Lab, options: tuple[str, ...]) -> None:
    machine = lab.machine(**EVERYTHING)
    code = "import os, tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())\n"
    code += f"from ortgpu.__main__ import main; report(main({['doctor', '--no-probe', *options]!r}))"
    result = machine.run(code, env=WITHOUT_ITS_FOLDER)
    assert result.json == 0, result.output
    assert result.stderr == ""


def test_the_training_profile_where_the_working_directory_is_gone(lab: Lab) -> None:
    code = """
import os, tempfile
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
import ortgpu
report([problem.code for problem in ortgpu.diagnose(profile="training").problems])
"""
    result = lab.machine(**EVERYTHING).run(code, env={**WITHOUT_ITS_FOLDER, "LD_LIBRARY_PATH": "relative"})
    assert "training-unavailable" in result.ok().json


@pytest.mark.parametrize("options", [("--no-probe",), ()], ids=["looking", "probing"])
def test_no_home_no_locale_and_bytes_that_are_no_text(lab: Lab, options: tuple[str, ...]) -> None:
    machine = lab.machine(**EVERYTHING)
    surroundings: dict[str, str | None] = {
        "HOME": None, "LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
        "CUDA_HOME": "/opt/caf\udce9", "CUDNN_HOME": "/opt/gr\u00fcn",
    }  # fmt: skip
    for more in ((), ("--json",), ("--verbose", "--redact")):
        result = doctor(machine, *options, *more, env=surroundings)
        assert result.stdout.isascii()
        assert "/opt/caf\\udce9" in result.stdout
        assert result.returncode == (0 if options else 1)


def test_nothing_is_written(lab: Lab) -> None:
    """By looking: no folder needs to be writable, a temporary one included."""
    code = """
import os, sys
writing = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        writing.append(str(arguments[0]))
    if event in ("os.mkdir", "os.remove", "os.rename"):
        writing.append(event)
from ortgpu.__main__ import main
sys.addaudithook(watch)
code = main(["doctor", "--no-probe", "--redact", "--verbose"])
seen = list(writing)
report({"code": code, "writing": seen})
"""
    assert lab.machine(**EVERYTHING).run(code).json == {"code": 0, "writing": []}


def ordinary(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """On this very machine, whatever it has."""
    return subprocess.run([sys.executable, "-m", "ortgpu", *arguments], timeout=100, check=False, **settings)


@pytest.mark.skipif(os.name == "nt", reason="file descriptors are inherited in another way on Windows")
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_streams_that_are_closed(closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    line = f'"$0" -m ortgpu doctor --no-probe {redirections}'
    result = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, timeout=100, check=False)
    assert result.returncode == ordinary(*LOOK, capture_output=True).returncode  # which is 0 or 1, as this machine is
    assert result.stderr == b""
    assert (result.stdout == b"") is (1 in closed)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is a disk without room")
def test_disk_without_room() -> None:
    with open("/dev/full", "wb") as full:
        result = ordinary(*LOOK, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 1
    assert result.stderr.startswith(b"ortgpu: the output cannot be written: ")
    assert b"Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_files_that_must_be_small(tmp_path: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)); from ortgpu.__main__ import main; "
    code += f"raise SystemExit(main({list(LOOK)!r}))"
    with (tmp_path / "report").open("wb") as small:
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, stdout=small, stderr=subprocess.PIPE, timeout=100, check=False)
    assert result.returncode == 1
    assert result.stderr == b"ortgpu: the output cannot be written: File too large\n"


def test_on_macos(lab: Lab) -> None:
    """As far as another system can stand for it: what Python says of itself, and nothing below /proc and /sys."""
    code = """
import builtins, ctypes, functools, io, json, os, platform, rich.progress, subprocess, sys, sysconfig
sysconfig.get_config_vars()  # of the real system: they are read by its name
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
sys.platform = "darwin"
def without_linux(function):
    def called(path=".", *arguments, **options):
        if not isinstance(path, int) and os.fsdecode(path).startswith(("/proc", "/sys", "/etc/ld.so")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)
    return functools.partial(called)  # which is no method in pathlib's accessor of Python 3.10
of_os = [(os, name) for name in ("open", "listdir", "scandir", "stat")]
for module, name in ((builtins, "open"), (io, "open"), *of_os):
    setattr(module, name, without_linux(getattr(module, name)))
from ortgpu.__main__ import main
sys.stdout = io.StringIO()
code = main(["doctor", "--json"])
report({"code": code, "problems": json.loads(sys.stdout.getvalue())["problems"]})
"""
    found = lab.machine().run(code).ok().json
    assert found["code"] == 1
    first, second = found["problems"]
    assert (first["code"], first["summary"]) == ("unsupported-platform", "there is no CUDA on Darwin arm64")
    assert (second["code"], second["consequence_of"]) == ("driver-not-found", "unsupported-platform")
    assert second["evidence"][0] == "no CUDA on macOS"
