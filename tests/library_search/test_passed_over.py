"""Which files are passed over, and why."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from ortgpu.environment.libraries.places import judge
from ortgpu.environment.libraries.search import folders_of
from tests.library_search.trees import (
    ALL,
    MACHINE,
    ORDER,
    TOOLKIT,
    Put,
    chosen,
    folders_chosen,
    places,
    prepare,
    reasons,
    search,
)


def test_another_major(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", "libcublas.so.12", "libcublas.so.11")
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["libcublas.so.13"]
    assert found.chosen is None
    assert reasons(found) == {
        str(tmp_path / f"given/libcublas.so.{n}"): f"is libcublas.so.{n}, libcublas.so.13 is needed" for n in (11, 12)
    }


def test_another_major_with_a_longer_name(tmp_path: Path, put: Put) -> None:
    """That of CUDA 11's runtime has two numbers."""
    put(tmp_path / "given", "libcudart.so.11.0", "libcudart.so.12", "libcudart.so.12.9.79")
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["libcudart.so.13"]
    assert reasons(found) == {
        str(tmp_path / f"given/libcudart.so.{n}"): f"is libcudart.so.{n}, libcudart.so.13 is needed"
        for n in ("11.0", "12")
    }


def test_another_major_under_a_false_name(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "given", "libcublas.so.12")
    (folder / "libcublas.so.13").symlink_to("libcublas.so.12")
    found = search(places(tmp_path, directory=str(folder)))["libcublas.so.13"]
    assert found.chosen is None
    assert reasons(found)[str(folder / "libcublas.so.13")] == "its SONAME is libcublas.so.12, libcublas.so.13 is needed"


def test_a_longer_version_is_the_same_library(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "given", "libcublas.so.13")
    (folder / "libcublas.so.13").rename(folder / "libcublas.so.13.1.0.3")
    (folder / "libcublas.so").symlink_to("libcublas.so.13.1.0.3")
    found = search(places(tmp_path, directory=str(folder)))["libcublas.so.13"]
    assert [c.path for c in found.candidates] == [str(folder / "libcublas.so.13.1.0.3")]
    assert found.rejected == ()


def test_13_is_not_130(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", "libcublas.so.130")
    assert search(places(tmp_path, directory=str(tmp_path / "given")))["libcublas.so.13"].chosen is None


def test_a_truncated_library_gives_way_to_a_whole_one(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[1], ORDER[6])
    damaged = tmp_path / "given/libcublas.so.13"
    os.truncate(damaged, 5000)
    found = search(where)["libcublas.so.13"]
    assert found.chosen is not None
    assert found.chosen.source == "environment variable"
    assert str(reasons(found)[str(damaged)]).startswith("truncated")


def test_a_library_for_another_machine(tmp_path: Path, put: Put) -> None:
    path = put(tmp_path / "given", "libcublas.so.13") / "libcublas.so.13"
    data = bytearray(path.read_bytes())
    data[18:20] = struct.pack("<H", 183 if MACHINE == "x86_64" else 62)
    path.write_bytes(data)
    other = "aarch64" if MACHINE == "x86_64" else "x86_64"
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["libcublas.so.13"]
    assert reasons(found) == {str(path): f"built for {other}, this is {MACHINE}"}
    alias = {"x86_64": "arm64", "aarch64": "AMD64"}[MACHINE]
    assert judge(str(path), "libcublas.so.13", alias) is None
    assert judge(str(path), "libcublas.so.13", "a machine that is not known") is None


def test_what_is_no_library_at_all(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "given", "libcurand.so.10")
    (folder / "libcublas.so.13").symlink_to("libcublas.so.13")
    (folder / "libcublasLt.so.13").mkdir()
    (folder / "libcudart.so.13").symlink_to("nowhere")
    (folder / "libcufft.so.12").write_text("INPUT(libcufft.so.12.0.0)")
    (folder / "libnvrtc.so.13").touch()
    found = search(places(tmp_path, directory=str(folder)))
    problems = {soname: next(iter(reasons(found[soname]).values())) for soname in ALL if found[soname].rejected}
    assert {soname: str(problem) for soname, problem in problems.items()} == {
        "libcublas.so.13": "too many levels of symbolic links",
        "libcublasLt.so.13": "is a directory",
        "libcudart.so.13": "no such file or directory",
        "libcufft.so.12": "not an ELF file",
        "libnvrtc.so.13": "empty file",
    }
    assert chosen(found, "libcurand.so.10")


def test_folders_that_cannot_be_listed(tmp_path: Path, put: Put) -> None:
    (tmp_path / "given").symlink_to("given")
    (tmp_path / "site/nvidia").mkdir(parents=True)
    (tmp_path / "site/nvidia/cu13").write_bytes(b"a file where a folder is expected")
    (tmp_path / "site/nvidia/loop").symlink_to(".")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/nvidia").write_bytes(b"")
    (tmp_path / "filesystem/etc/ld.so.cache").mkdir(parents=True)
    home = put(tmp_path / "home/lib64", *TOOLKIT)
    where = places(
        tmp_path,
        directory=str(tmp_path / "given"),
        sys_path=(str(tmp_path / "site"), str(tmp_path / "other"), "nul\0byte"),
        variables={"CUDA_HOME": str(home.parent)},
        start_library_path=str(tmp_path / "other/nvidia"),
    )
    assert folders_chosen(search(where)) == {str(home)}


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root, whom no permission stops")
def test_a_folder_that_may_not_be_read(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[1], ORDER[6])
    (tmp_path / "given").chmod(0)
    try:
        assert folders_chosen(search(where)) == {str(tmp_path / "home/lib64")}
    finally:
        (tmp_path / "given").chmod(0o700)


def test_names_that_are_not_utf8(tmp_path: Path, put: Put) -> None:
    strange = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9"))
    put(Path(strange), *TOOLKIT)
    Path(strange, os.fsdecode(b"libcu\xff.so.1")).touch()
    Path(strange, os.fsdecode(b"libcublas.so.\xff")).touch()
    found = search(places(tmp_path, directory=strange))
    assert folders_chosen(found) == {strange}


def test_folders_of_a_file_behind_links(tmp_path: Path, put: Put) -> None:
    real = put(tmp_path / "real", "libcudnn.so.9")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/libcudnn.so.9").symlink_to(real / "libcudnn.so.9")
    assert folders_of(str(tmp_path / "folder/libcudnn.so.9")) == {str(real)}
    assert folders_of(str(tmp_path / "here/libcudnn.so.9")) == {str(real), str(tmp_path / "here")}
