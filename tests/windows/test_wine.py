"""The prepared kernel beside Wine's loader, on the same DLLs: where Wine is known to do as Windows does.

It is not Windows: Wine puts a stub in the place of a function that a DLL lacks, where Windows refuses with error 127,
and takes some damaged files and those of 32 bits, where Windows refuses with 193. Neither is compared.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from tests.support.made_dlls import ARM64, dll
from tests.windows.machine import PreparedKernel

COMPILER = shutil.which("x86_64-w64-mingw32-gcc")
WINE = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine") or shutil.which("wine")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(COMPILER is None, reason="there is no MinGW (Debian's gcc-mingw-w64-x86-64) on PATH"),
    pytest.mark.skipif(WINE is None, reason="there is no Wine (Debian's wine64)"),
]

KERNEL = {"KERNEL32.dll": ["Sleep"]}
FILES = {
    "a/lt.dll": dll("lt.dll", KERNEL, exports=["call"]),
    "a/blas.dll": dll("blas.dll", {**KERNEL, "lt.dll": ["call"]}),
    "b/LT.dll": dll("lt.dll", KERNEL, exports=["call"]),
    "c/alone.dll": dll("alone.dll", {**KERNEL, "gone.dll": ["x"]}, exports=["x"]),
    "c/behind.dll": dll("behind.dll", {**KERNEL, "alone.dll": ["x"]}),
    "d/arm.dll": dll("arm.dll", machine=ARM64),
    "d/text.dll": b"no DLL",
    "d/empty.dll": b"",
    "e/late.dll": dll("late.dll", KERNEL, delayed=["never_there.dll"]),
    "e/bare.dll": dll("bare.dll"),
}


@dataclass(frozen=True)
class Loaded:
    codes: list[int]
    names: list[str]  # folder and name of what of ours is loaded, in small letters


Load = Callable[..., Loaded]


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("wine")
    _write(folder)
    source = Path(__file__).with_name("load.c")
    command = [COMPILER or "", "-municode", "-o", str(folder / "load.exe"), str(source)]
    subprocess.run(command, check=True, timeout=120)
    variables = {**os.environ, "WINEPREFIX": str(folder / "prefix"), "WINEDEBUG": "-all"}

    def load(*paths: str) -> Loaded:
        given = ["Z:" + str(folder / path).replace("/", "\\") if "/" in path else path for path in paths]
        done = subprocess.run([WINE or "", str(folder / "load.exe"), *given], env=variables, capture_output=True,
                              text=True, timeout=120, check=True)  # fmt: skip
        modules = re.findall(r"^module Z:.*\\([a-e]\\[\w.]+)$", done.stdout, re.MULTILINE)
        codes = [int(code) for code in re.findall(r"^load (\d+)$", done.stdout, re.MULTILINE)]
        return Loaded(codes, sorted(name.lower().replace("\\", "/") for name in modules))

    return load


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("prepared")
    _write(folder)
    (folder / "system").mkdir()
    (folder / "system/KERNEL32.dll").write_bytes(dll("KERNEL32.dll", exports=["Sleep"]))

    def load(*paths: str) -> Loaded:
        kernel = PreparedKernel([str(folder / "system")])
        codes = [kernel.load(str(folder / path) if "/" in path else path) for path in paths]
        ours = (PurePosixPath(path) for path in kernel.modules() if "system" not in path)
        return Loaded(codes, sorted(f"{path.parent.name}/{path.name}".lower() for path in ours))

    return load


def _write(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("paths", "codes"),
    [
        (["a/lt.dll", "a/blas.dll"], [0, 0]),
        (["a/blas.dll"], [0]),
        (["b/LT.dll", "a/blas.dll"], [0, 0]),
        (["a/lt.dll", "b/LT.dll"], [0, 0]),
        (["a/lt.dll", "a/lt.dll"], [0, 0]),
        (["a/lt.dll", "lt.dll"], [0, 0]),
        (["lt.dll"], [126]),
        (["c/alone.dll"], [126]),
        (["c/behind.dll"], [126]),
        (["c/absent.dll"], [126]),
        (["d/arm.dll"], [193]),
        (["d/text.dll"], [193]),
        (["d/empty.dll"], [193]),
        (["e/late.dll", "e/bare.dll"], [0, 0]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_the_same_is_loaded_and_refused(paths: list[str], codes: list[int], wine: Load, prepared: Load) -> None:
    assert wine(*paths).codes == codes
    assert prepared(*paths) == wine(*paths)


def test_what_is_in_the_process_serves_by_its_name(wine: Load) -> None:
    """What loading before ONNX Runtime rests upon: from another folder, and in whatever letters."""
    assert wine("b/LT.dll", "a/blas.dll").names == ["a/blas.dll", "b/lt.dll"]
