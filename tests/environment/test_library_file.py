"""The ELF reader: real libraries against binutils, and every kind of damage without an exception."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.libraries.library_file import LibraryFile, find_section, read_library
from tests.lab.stubs import Stubs, compiler

READELF = shutil.which("readelf")

MACHINE_OFFSET, CLASS_OFFSET, DATA_OFFSET, TYPE_OFFSET = 18, 4, 5, 16
PROGRAM_TABLE, SECTION_TABLE, PROGRAM_COUNT = 32, 40, 56


def real_libraries() -> list[Path]:
    """Libraries of the installed ONNX Runtime and of the CUDA wheels."""
    found: list[Path] = []
    for package, pattern in (("onnxruntime", "capi/*.so"), ("nvidia", "*/lib/*.so.*")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            found += sorted(Path(folder).glob(pattern))
    return found


REAL = real_libraries()
EACH_REAL = pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def tiny(stubs: Stubs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of a few kilobytes with a name, two needs and two search paths."""
    path = tmp_path_factory.mktemp("elf") / "libtiny.so.3.2.1"
    options = ["-shared", "-Wl,-soname,libtiny.so.3", "-Wl,-rpath,/one:$ORIGIN/two", "-Wl,--no-as-needed", "-lm"]
    source = stubs.library("libtiny.so.3").with_suffix(".3.c")
    subprocess.run([compiler() or "cc", "-fPIC", "-o", str(path), str(source), *options], timeout=60, check=True)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "lib.so"


def read_bytes(scratch: Path, data: bytes) -> LibraryFile:
    """Both readers on these bytes, which may be anything: they answer."""
    scratch.write_bytes(data)
    section = find_section(scratch, ".dynstr")
    assert section is None or (section[0] >= 0 and section[0] + section[1] <= len(data))
    elf = read_library(scratch)
    assert elf.path == str(scratch)
    if elf.problem is not None:
        assert elf.problem
        assert (elf.machine, elf.soname, elf.needed, elf.search_path) == (None, None, (), ())
    return elf


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


# Real libraries


def test_there_are_real_libraries() -> None:
    names = {path.name for path in REAL}
    assert "libonnxruntime_providers_cuda.so" in names, "install onnxruntime-gpu: pip install -e '.[cuda,test]'"
    assert any(name.startswith("libcudnn.so") for name in names)


@EACH_REAL
def test_a_real_library_is_whole(path: Path) -> None:
    elf = read_library(path)
    assert elf.problem is None
    assert elf.machine == os.uname().machine
    assert any(name.startswith("libc.so") for name in elf.needed)
    if ".so." in path.name:
        assert elf.soname == path.name  # wheels name their files by SONAME


@pytest.mark.skipif(READELF is None, reason="binutils' readelf is not on PATH")
@EACH_REAL
def test_a_real_library_as_binutils_reads_it(path: Path) -> None:
    assert_as_readelf(path)


@pytest.mark.skipif(READELF is None, reason="binutils' readelf is not on PATH")
def test_the_tiny_library_as_binutils_reads_it(tiny: Path) -> None:
    assert_as_readelf(tiny)


def assert_as_readelf(path: Path) -> None:
    command = [READELF or "", "--wide", "--dynamic", "--sections", "--segments", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    elf = read_library(path)

    def values(tag: str) -> list[str]:
        return re.findall(rf"\({tag}\).*\[(.*)\]", text)

    assert list(elf.needed) == values("NEEDED")
    assert elf.soname == next(iter(values("SONAME")), None)
    paths = [part for line in values("RPATH") + values("RUNPATH") for part in line.split(":") if part]
    assert list(elf.search_path) == paths
    stack = re.search(r"GNU_STACK +(?:0x\w+ +){5}([RWE ]+?) +0x", text)
    assert elf.executable_stack == ("E" in stack[1] if stack else None)
    sections = re.findall(r"\] (\S+) +(?:PROGBITS|STRTAB) +\w+ (\w+) (\w+)", text)
    assert ".dynstr" in {name for name, _, _ in sections}
    for name, offset, size in sections[:40]:
        if [other for other, _, _ in sections].count(name) == 1:
            assert find_section(path, name) == (int(offset, 16), int(size, 16)), name


def test_the_tiny_library(tiny: Path) -> None:
    elf = read_library(tiny)
    assert elf.problem is None
    assert elf.soname == "libtiny.so.3"
    assert elf.needed[0] == "libm.so.6"
    assert elf.search_path == ("/one", "$ORIGIN/two")
    assert elf.executable_stack is False


def test_a_section_that_is_not_there(tiny: Path) -> None:
    assert find_section(tiny, ".dynstr") is not None
    assert find_section(tiny, ".nv_fatbin") is None
    assert find_section(tiny, "") in (None, (0, 0))  # the first section has no name


def test_path_objects_and_names_that_are_not_utf8(tiny: Path, tmp_path: Path) -> None:
    strange = os.path.join(tmp_path, os.fsdecode(b"lib\xff\xfe.so"))
    shutil.copy(tiny, strange)
    elf = read_library(strange)
    assert elf.problem is None
    assert elf.path == strange


# What is no library


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty file"),
        (b"\x7f", "not an ELF file"),
        (b"INPUT(libcublas.so.13)\n", "not an ELF file"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 9, "not an ELF file"),
        (b"\x7fELF", "truncated: the header is cut"),
        (b"\x7fELF\x02\x01" + bytes(57), "truncated: the header is cut"),
        (b"\x7fELF" + bytes(60), "not a 64-bit little-endian ELF file"),
        (b"\x7fELF\x02\x01" + bytes(58), "not a shared library"),
        (b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<HH", 3, 62) + bytes(44), "no program headers"),
    ],
    ids=["empty", "one byte", "linker script", "git lfs", "magic", "63 bytes", "class 0", "type 0", "no programs"],
)
def test_no_library(scratch: Path, data: bytes, problem: str) -> None:
    found = read_bytes(scratch, data).problem
    assert found is not None
    assert problem in found
    assert find_section(scratch, ".text") is None


def test_absent_folder_and_impossible_names(tmp_path: Path) -> None:
    loop = tmp_path / "loop.so"
    loop.symlink_to(loop)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    for path, words in (
        (tmp_path / "absent.so", "no such file"),
        (tmp_path, "is a directory"),
        (loop, "symbolic links"),
        (file / "below.so", "not a directory"),
        (tmp_path / ("n" * 300), "name too long"),
    ):
        problem = read_library(path).problem
        assert problem is not None
        assert words in problem
        assert find_section(path, ".text") is None
    assert read_library("nul\0byte").problem
    assert find_section("nul\0byte", ".text") is None


def test_an_executable_is_no_library(tiny: Path, scratch: Path) -> None:
    data = patched(tiny.read_bytes(), TYPE_OFFSET, struct.pack("<H", 2))
    assert read_bytes(scratch, data).problem == "not a shared library"


@pytest.mark.parametrize(
    ("offset", "value"), [(CLASS_OFFSET, b"\1"), (DATA_OFFSET, b"\2")], ids=["32 bits", "big-endian"]
)
def test_another_class(tiny: Path, scratch: Path, offset: int, value: bytes) -> None:
    problem = read_bytes(scratch, patched(tiny.read_bytes(), offset, value)).problem
    assert problem == "not a 64-bit little-endian ELF file"


@pytest.mark.parametrize(("number", "name"), [(62, "x86_64"), (183, "aarch64"), (21, "ppc64"), (999, "machine 999")])
def test_another_machine(tiny: Path, scratch: Path, number: int, name: str) -> None:
    elf = read_bytes(scratch, patched(tiny.read_bytes(), MACHINE_OFFSET, struct.pack("<H", number)))
    assert elf.problem is None
    assert (elf.machine, elf.soname) == (name, "libtiny.so.3")


# Damage


def test_truncated_anywhere(tiny: Path, scratch: Path) -> None:
    """Every length below the whole is seen: the section table is the last thing in the file."""
    data = tiny.read_bytes()
    assert read_bytes(scratch, data).problem is None
    for size in {*range(0, len(data), 61), *range(130), len(data) - 1, len(data) - 2}:
        assert read_bytes(scratch, data[:size]).problem is not None, size


@EACH_REAL
@pytest.mark.parametrize("part", [0.001, 0.5, 0.999])
def test_a_real_library_cut_off(path: Path, part: float, tmp_path: Path) -> None:
    size = int(path.stat().st_size * part)
    cut = sparse_copy(path, tmp_path / path.name)
    os.truncate(cut, size)
    problem = read_library(cut).problem
    assert problem is not None
    assert problem.startswith("truncated")
    section = find_section(cut, ".rodata")
    assert section is None or sum(section) <= size


def sparse_copy(path: Path, copy: Path) -> Path:
    """A file of the same size that holds the start of the original: as much as the readers need, without its bulk."""
    with path.open("rb") as source, copy.open("wb") as target:
        target.write(source.read(1 << 20))
        target.truncate(path.stat().st_size)
    return copy


def test_a_stripped_library_is_whole(tiny: Path, scratch: Path) -> None:
    """Without a section table a file can be loaded; it cannot be seen to be cut within its last padding."""
    data = patched(tiny.read_bytes(), SECTION_TABLE, bytes(8))
    data = patched(data, 60, bytes(4))  # e_shnum, e_shstrndx
    elf = read_bytes(scratch, data)
    assert (elf.problem, elf.soname) == (None, "libtiny.so.3")
    assert find_section(scratch, ".dynstr") is None


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(scratch: Path, data: bytes) -> None:
    assert read_bytes(scratch, data).problem is not None


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=60, max_size=600))
def test_random_bytes_behind_an_elf_header(scratch: Path, data: bytes) -> None:
    start = b"\x7fELF\x02\x01" + data[:10] + struct.pack("<H", 3)
    assert read_bytes(scratch, start + data[10:]).problem is not None


@settings(max_examples=250, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 2047), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_in_the_headers(tiny: Path, scratch: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(tiny.read_bytes())
    for offset, value in flips:
        data[offset % (64 + 56 * 12)] = value
    read_bytes(scratch, bytes(data))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 1 << 14), value=st.binary(min_size=1, max_size=16))
def test_overwritten_bytes_anywhere(tiny: Path, scratch: Path, at: int, value: bytes) -> None:
    data = tiny.read_bytes()
    read_bytes(scratch, patched(data, at % len(data), value))


@settings(max_examples=100, deadline=None)
@given(field=st.sampled_from([PROGRAM_TABLE, SECTION_TABLE]), value=st.integers(0, 2**64 - 1))
def test_tables_anywhere(tiny: Path, scratch: Path, field: int, value: int) -> None:
    data = tiny.read_bytes()
    (true,) = struct.unpack_from("<Q", data, field)
    if value != true and value > len(data):
        assert read_bytes(scratch, patched(data, field, struct.pack("<Q", value))).problem is not None
        assert find_section(scratch, ".dynstr") is None or field == PROGRAM_TABLE


def dynamic_section(data: bytes) -> int:
    table, count = struct.unpack_from("<Q", data, PROGRAM_TABLE)[0], struct.unpack_from("<H", data, PROGRAM_COUNT)[0]
    for at in range(table, table + 56 * count, 56):
        if struct.unpack_from("<I", data, at)[0] == 2:
            return int(struct.unpack_from("<Q", data, at + 8)[0])
    raise AssertionError("no dynamic section")


@pytest.mark.parametrize("value", [0, 1, 1 << 16, 1 << 40, 2**64 - 1])
@pytest.mark.parametrize("tag", [1, 5, 10, 14], ids=["NEEDED", "STRTAB", "STRSZ", "SONAME"])
def test_dynamic_entries_that_point_anywhere(tiny: Path, scratch: Path, tag: int, value: int) -> None:
    data = tiny.read_bytes()
    at = dynamic_section(data)
    while struct.unpack_from("<Q", data, at)[0] != tag:
        at += 16
    elf = read_bytes(scratch, patched(data, at + 8, struct.pack("<Q", value)))
    if value >= 1 << 16:
        assert elf.problem is not None


def test_a_table_of_absurd_size_is_not_read(tiny: Path, scratch: Path) -> None:
    """A damaged length must not make the reader allocate gigabytes: the file is sparse and large enough for it."""
    data = tiny.read_bytes()
    at = dynamic_section(data)
    while struct.unpack_from("<Q", data, at)[0] != 10:
        at += 16
    scratch.write_bytes(patched(data, at + 8, struct.pack("<Q", 1 << 32)))
    os.truncate(scratch, 1 << 33)
    problem = read_library(scratch).problem
    scratch.unlink()
    assert problem == "damaged: absurd table size"


def test_sections_of_the_provider_can_be_read() -> None:
    path = next(path for path in REAL if path.name == "libonnxruntime_providers_cuda.so")
    found = find_section(path, ".rodata")
    assert found is not None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(b"arena_extend_strategy\0", found[0], sum(found)) > 0
