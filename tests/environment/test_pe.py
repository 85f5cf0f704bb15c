"""The PE reader: real programs and DLLs, made ones against binutils, and every kind of damage without an exception."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.libraries.library_file import (
    LibraryFile,
    borrows,
    exported_names,
    find_section,
    imported_names,
    read_library,
)
from tests.support.made_dlls import ARM64, EXECUTABLE, I386, X86_64, dll

OBJDUMP = shutil.which("llvm-objdump") or shutil.which("objdump")

NEEDS = {"cublasLt64_13.dll": ["cublasLtCreate", "cublasLtDestroy"], "KERNEL32.dll": ["Sleep"]}
WHOLE = dll(
    "cublas64_13.dll",
    NEEDS,
    delayed=["SHELL32.dll"],
    exports=["cublasCreate_v2", "cublasGetVersion_v2"],
    sections={".nv_fatb": b"\x50\xed\x55\xba" * 32},
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "made.dll"


def read_bytes(scratch: Path, data: bytes) -> LibraryFile:
    """All readers on these bytes, which may be anything: they answer."""
    scratch.write_bytes(data)
    section = find_section(scratch, ".nv_fatb")
    assert section is None or (section[0] >= 0 and section[0] + section[1] <= len(data))
    for names in (imported_names(scratch, "KERNEL32.dll"), exported_names(scratch)):
        assert names is None or all(names)
    assert borrows(scratch, ("Sleep",)) in (True, False)
    found = read_library(scratch)
    assert found.path == str(scratch)
    if found.problem is not None:
        assert found.problem
        assert (found.machine, found.name, found.needed, found.delayed) == (None, None, (), ())
    return found


def test_a_whole_dll(scratch: Path) -> None:
    found = read_bytes(scratch, WHOLE)
    assert found == LibraryFile(
        str(scratch),
        machine="x86_64",
        name="cublas64_13.dll",
        needed=("cublasLt64_13.dll", "KERNEL32.dll"),
        delayed=("SHELL32.dll",),
    )
    at = find_section(scratch, ".nv_fatb")
    assert at is not None
    assert WHOLE[at[0] : at[0] + at[1]] == b"\x50\xed\x55\xba" * 32
    assert imported_names(scratch, "CUBLASLT64_13.dll") == frozenset(NEEDS["cublasLt64_13.dll"])
    assert imported_names(scratch, "cudart64_13.dll") == frozenset()
    assert exported_names(scratch) == frozenset({"cublasCreate_v2", "cublasGetVersion_v2"})
    taken = [name for names in NEEDS.values() for name in names]
    assert all(borrows(scratch, (name,)) for name in taken)
    assert not borrows(scratch, ("cublasCreate_v2", "Provider_GetHost"))


@pytest.mark.skipif(OBJDUMP is None, reason="there is no objdump, binutils' or LLVM's, on PATH")
@pytest.mark.parametrize("machine", [X86_64, I386], ids=["64 bits", "32 bits"])
def test_a_made_dll_as_objdump_reads_it(machine: int, scratch: Path) -> None:
    """What the tests are made of is what others take for a DLL, too."""
    scratch.write_bytes(dll("a.dll", NEEDS, exports=["one", "two"], machine=machine, sections={".nv_fatb": b"x" * 9}))
    command = [OBJDUMP or "", "-p", "-h", str(scratch)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.findall(r"DLL [Nn]ame: (\S+)", text)[-2:] == list(NEEDS) or set(NEEDS) <= set(text.split())
    assert {"Sleep", "cublasLtCreate", "one", "two", ".nv_fatb"} <= set(re.split(r"[\s\]]+", text))
    assert read_library(scratch).needed == tuple(NEEDS)
    assert exported_names(scratch) == frozenset({"one", "two"})
    assert imported_names(scratch, "KERNEL32.dll") == frozenset({"Sleep"})


def test_real_programs_are_programs_and_no_dlls(tmp_path: Path) -> None:
    """Launchers for Windows that Python's installers bring on every system: for three machines."""
    packages = Path(sysconfig.get_path("purelib"))
    real = [*packages.glob("setuptools/*.exe"), *packages.glob("pip/_vendor/distlib/*.exe")]
    if not real:
        pytest.skip("this environment has neither pip nor setuptools, which bring them")
    for number, path in enumerate(real):
        renamed = shutil.copy(path, tmp_path / f"{number}.dll")
        assert read_library(renamed).problem == "not a DLL: a program"


@pytest.mark.parametrize(
    ("machine", "name"), [(X86_64, "x86_64"), (I386, "i386"), (ARM64, "aarch64"), (7, "machine 0x7")]
)
def test_machines(machine: int, name: str, scratch: Path) -> None:
    assert read_bytes(scratch, dll("a.dll", NEEDS, machine=machine)).machine == name


def test_a_dll_that_needs_nothing_and_exports_nothing(scratch: Path) -> None:
    found = read_bytes(scratch, dll(None))
    assert (found.problem, found.name, found.needed) == (None, None, ())
    assert exported_names(scratch) == frozenset()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty file"),
        (b"M", "not a DLL"),
        (b"\x7fELF" + bytes(100), "not a DLL"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 9, "not a DLL"),
        (b"MZ" + bytes(20), "truncated: the header is cut"),
        (b"MZ" + bytes(58) + struct.pack("<I", 1 << 30), "truncated"),
        (b"MZ" + bytes(200), "not a DLL: a program for DOS or a damaged file"),
        (dll(flags=EXECUTABLE), "not a DLL: a program"),
        (WHOLE[:-1], "truncated: "),
        (WHOLE[:0x300], "truncated: "),
        (WHOLE[:0x98] + b"\x07\x01" + WHOLE[0x9A:], "neither 32 nor 64 bits"),
    ],
    ids=["empty", "letter", "ELF", "git lfs", "cut", "no PE", "DOS", "program", "last byte", "headers only", "magic"],
)  # fmt: skip
def test_no_dll(scratch: Path, data: bytes, problem: str) -> None:
    found = read_bytes(scratch, data).problem
    assert found is not None
    assert problem in found
    assert find_section(scratch, ".rdata") is None
    assert imported_names(scratch, "KERNEL32.dll") is None
    assert exported_names(scratch) is None


@pytest.mark.parametrize("size", [*range(0, 0x400, 37), *range(0x400, len(WHOLE), 61)])
def test_every_truncation_is_told(scratch: Path, size: int) -> None:
    assert read_bytes(scratch, WHOLE[:size]).problem


@settings(max_examples=500, deadline=None)
@given(at=st.integers(0, len(WHOLE)), value=st.binary(min_size=1, max_size=8))
def test_damaged_bytes(scratch: Path, at: int, value: bytes) -> None:
    read_bytes(scratch, WHOLE[:at] + value + WHOLE[at + len(value) :])


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0x80, 0x400), values=st.lists(st.sampled_from([0, 1, 0xFF, 0x80, 0x7F]), min_size=1, max_size=16))
def test_damaged_headers(scratch: Path, at: int, values: list[int]) -> None:
    read_bytes(scratch, WHOLE[:at] + bytes(values) + WHOLE[at + len(values) :])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=512))
def test_any_bytes(scratch: Path, data: bytes) -> None:
    read_bytes(scratch, data)
    read_bytes(scratch, b"MZ" + data)


def test_tables_that_never_end(scratch: Path) -> None:
    """An import table that fills its section: the next entry is outside of it."""
    many = dll("a.dll", [f"{number}.dll" for number in range(300)])
    found = read_bytes(scratch, many)
    assert len(found.needed) == 300
    table = many.index(struct.pack("<IIIII", 0, 0, 0, 0, 0), 0x400)
    endless = many[:table].ljust(len(many), b"\1")
    assert read_bytes(scratch, endless).problem


def test_absent_folder_and_impossible_names(tmp_path: Path) -> None:
    loop = tmp_path / "loop.dll"
    loop.symlink_to(loop)
    for path, words in (
        (tmp_path / "absent.dll", "no such file"),
        (tmp_path, "is a directory"),
        (loop, "symbolic links"),
        (tmp_path / ("n" * 300), "name too long"),
    ):
        problem = read_library(path).problem
        assert problem is not None
        assert words in problem
        assert find_section(path, ".text") is None
        assert exported_names(path) is None
    assert read_library("nul\0byte").problem
    assert find_section("nul\0byte", ".text") is None


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.dll")
    assert read_library(tmp_path / "a.dll").problem == "is a pipe"
