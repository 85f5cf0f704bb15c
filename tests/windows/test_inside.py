"""The command line in Python for Windows itself: what it says, and whether its words are those of Windows.

It runs under Wine, on demand: ``pytest -m windows``. The faults are in test_faults.py.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import pytest

from tests.faults.on_windows import OF_LINUX
from tests.lab.models import Models
from tests.lab.windows import PYTHON, Windows
from tests.support.children import Child

# What Windows is made of is downloaded in the setup of the first test.
pytestmark = [pytest.mark.windows, pytest.mark.timeout(1200)]

MODEL = "C:\\relu.onnx"


@pytest.fixture(autouse=True)
def _a_model(windows: Windows, models: Models) -> None:
    windows.write(MODEL, models.relu.read_bytes())


def last_line(child: Child) -> Any:
    return json.loads(child.ok().stdout.splitlines()[-1])


def no_words_of_linux(text: str) -> bool:
    assert OF_LINUX.findall(text) == []
    return True


def test_it_is_windows(windows: Windows) -> None:
    code = "import json, os, sys; print(json.dumps([sys.platform, sys.executable, os.path.exists('/etc/os-release')]))"
    assert last_line(windows.python("-c", code)) == ["win32", PYTHON, False]


def test_a_program_that_is_left_behind_keeps_nobody_waiting(windows: Windows) -> None:
    """It has the output of the program that started it, and outlives it. What was written before is all there."""
    code = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=sys.stdout, stderr=sys.stderr)
        print("x" * 200_000)
    """
    assert windows.python("-c", textwrap.dedent(code), deadline=60).ok().stdout == "x" * 200_000 + "\n"


def test_a_program_that_does_not_end_is_told_with_what_is_left(windows: Windows) -> None:
    child = windows.python("-c", "import time; time.sleep(600)", deadline=2)
    assert child.returncode is None
    left = child.stderr.partition("--- left at the deadline\n")[2]
    assert re.search(r"^\d+ .*python\.exe .*sleep\(600\).*: waits in \['\w+'.*pipe:", left, re.MULTILINE), child.output


def test_doctor(windows: Windows) -> None:
    windows.write("C:\\etc\\os-release", b'PRETTY_NAME="Debian"\n')
    windows.write("C:\\.dockerenv")
    windows.write("C:\\proc\\meminfo", b"MemTotal: 1 kB\n")
    windows.write("C:\\proc\\driver\\nvidia\\version", b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    windows.write("C:\\dev\\nvidia0")
    found = windows.python("-m", "ortgpu", "doctor", "--json")
    assert found.returncode == 1, found.output
    said = json.loads(found.stdout)
    assert {problem["type"] for problem in said["problems"]} == {"LibraryNotFoundError", "DriverNotFoundError"}
    assert no_words_of_linux(json.dumps(said["problems"]))
    host, driver = said["environment"]["host"], said["environment"]["driver"]
    assert (host["system"], host["machine"], host["python"]) == ("Windows", "AMD64", [3, 11, 9])
    assert [host[name] for name in ("container", "libc", "wsl")] == [None, None, False]
    assert host["os_name"].startswith("Windows 10 10.0.")
    assert host["memory_total"] > 1 << 28
    assert (driver["kernel_version"], driver["device_nodes"], driver["libcuda"]) == (None, [], None)


def test_the_page_of_doctor(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "doctor", "--verbose")
    assert found.returncode == 1, found.output
    assert re.search(r"^  driver +nvcuda\.dll cannot be loaded$", found.stdout, re.MULTILINE), found.output
    assert no_words_of_linux(found.stdout)


def test_check(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "check", MODEL)
    assert found.returncode == 1, found.output
    assert "LibraryNotFoundError" in found.stdout + found.stderr
    assert no_words_of_linux(found.stdout + found.stderr)


def test_explain(windows: Windows) -> None:
    found = windows.python("-m", "ortgpu", "explain", "driver-not-found").ok()
    assert "nvcuda.dll" in found.stdout
