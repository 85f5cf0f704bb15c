"""The loader's cache: /etc/ld.so.cache, written by ldconfig or by somebody else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.libraries.places import parse_loader_cache, read_loader_cache
from tests.library_search.trees import loader_cache

ENTRIES = {"libcublas.so.13": "/opt/lib/libcublas.so.13", "libc.so.6": "/lib/libc.so.6"}


def test_a_loader_cache() -> None:
    assert parse_loader_cache(loader_cache(ENTRIES)) == ENTRIES
    assert parse_loader_cache(loader_cache({})) == {}


def test_a_loader_cache_behind_one_of_the_old_format() -> None:
    assert parse_loader_cache(loader_cache(ENTRIES, before=b"ld.so-1.7.0\0" + bytes(60))) == ENTRIES


@pytest.mark.parametrize(
    ("flags", "read"), [(0x0303, True), (0x0A03, True), (0x0003, False), (0x0803, False)],
    ids=["x86-64", "aarch64", "i386", "x32"],
)  # fmt: skip
def test_libraries_of_other_architectures_in_the_cache(flags: int, read: bool) -> None:
    assert parse_loader_cache(loader_cache(ENTRIES, flags=flags)) == (ENTRIES if read else {})


def test_the_first_of_several_entries_counts() -> None:
    one, two = loader_cache({"libc.so.6": "/1"}), {"libc.so.6": "/1", "libc.so.7": "/2"}
    assert parse_loader_cache(one) == {"libc.so.6": "/1"}
    same_name = loader_cache(two).replace(b"libc.so.7", b"libc.so.6")
    assert parse_loader_cache(same_name) == {"libc.so.6": "/1"}


def test_names_in_the_cache_that_are_not_utf8() -> None:
    path = os.fsdecode(b"/opt/caf\xe9/libc.so.6")
    assert parse_loader_cache(loader_cache({"libc.so.6": path})) == {"libc.so.6": path}


@pytest.mark.parametrize(
    "data",
    [b"", b"glibc-ld.so.cache1.1", b"ld.so-1.7.0\0" + bytes(40), b"\0" * 4096],
    ids=["empty", "cut", "old", "zeros"],
)
def test_no_loader_cache(data: bytes) -> None:
    assert parse_loader_cache(data) == {}


def test_a_cache_that_promises_more_than_it_holds() -> None:
    assert ENTRIES.items() <= parse_loader_cache(loader_cache(ENTRIES, count=2**32 - 1)).items()


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 200), value=st.binary(min_size=1, max_size=8), size=st.integers(0, 200))
def test_damaged_caches(at: int, value: bytes, size: int) -> None:
    data = loader_cache(ENTRIES)
    for damaged in (data[:at] + value + data[at + len(value) :], data[:size], value + data[at:]):
        found = parse_loader_cache(damaged)
        assert all(text for item in found.items() for text in item)


def test_no_cache_file(tmp_path: Path) -> None:
    assert read_loader_cache(tmp_path / "absent") == {}
    assert read_loader_cache(tmp_path) == {}


def test_the_cache_of_this_machine() -> None:
    ldconfig = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    if ldconfig is None or not os.path.isfile("/etc/ld.so.cache"):
        pytest.skip("this system has no ldconfig, or no /etc/ld.so.cache")
    text = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=30, check=True).stdout
    printed: dict[str, str] = {}
    for name, path in re.findall(r"^\t(\S+) \(libc6,(?:x86-64|AArch64).*\) => (\S+)$", text, re.MULTILINE):
        printed.setdefault(name, path)
    assert printed
    assert read_loader_cache(Path("/etc/ld.so.cache")) == printed
