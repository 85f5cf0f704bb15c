"""What RECORD says of an installation: files that are missing or altered, and records that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.environment.packages.installed import read_packages
from tests.support.made_packages import ENGINE, engine, install, names

# Installs whose RECORD says nothing


def test_an_owner_without_record(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE, record=None)  # as distributions' packages are
    (owner,) = engine(tmp_path).owners
    assert (owner.name, owner.version, owner.record_readable) == ("onnxruntime-gpu", "1.31.1", False)


@pytest.mark.parametrize("garbage", [b"", b"\x7fELF\x00\x01", b"\xff\xfe\xfd", b"one,two\n", b'"open', b"a,b,c\n"])
def test_an_owner_with_a_broken_record(tmp_path: Path, garbage: bytes) -> None:
    info = install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (info / "RECORD").write_bytes(garbage)
    (owner,) = engine(tmp_path).owners
    assert (owner.record_readable, owner.missing_files, owner.altered_files) == (False, (), ())


def test_a_metadata_folder_with_nothing_in_it_owns_nothing(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "onnxruntime-1.20.0.dist-info").mkdir()
    (tmp_path / "~nnxruntime-1.19.0.dist-info").mkdir()
    assert names(engine(tmp_path).owners) == ["onnxruntime-gpu"]


def test_a_develop_install(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").touch()
    info = tmp_path / "onnxruntime_gpu.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.32.0\n\nVersion: 9\n")
    (info / "top_level.txt").write_text("onnxruntime\n")
    (owner,) = engine(tmp_path).owners
    assert (owner.name, owner.version, owner.folder) == ("onnxruntime-gpu", "1.32.0", info.name)
    assert not owner.record_readable


# Comparison with the disk


def test_small_python_files_are_hashed_and_others_only_measured(tmp_path: Path) -> None:
    files = {**ENGINE, "onnxruntime/tools/convert.py": "a = 1\n"}
    install(tmp_path, "onnxruntime_gpu", "1.31.1", files)
    for path in files:
        content = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(b"#" * len(content))
    (owner,) = engine(tmp_path).owners
    assert owner.altered_files == ("onnxruntime/__init__.py", "onnxruntime/capi/build_and_package_info.py")


def test_another_size_is_seen_in_every_file(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    library = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    (tmp_path / library).write_bytes(b"ELF")  # cut short
    assert engine(tmp_path).owners[0].altered_files == (library,)


@pytest.mark.parametrize(("installer", "seen"), [("pip", True), ("conda", False)])
def test_after_a_crash_libraries_are_hashed(tmp_path: Path, installer: str, seen: bool) -> None:
    """Not those of conda, which edits them after it has written RECORD."""
    library = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    info = install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (info / "INSTALLER").write_text(f"{installer}\n")
    other = install(tmp_path, "numpy", "2.4.6", {"numpy/__init__.py": "", "numpy/_core/_umath.so": "ELF"})
    (other / "INSTALLER").write_text(f"{installer}\n")
    for path in (library, "numpy/_core/_umath.so"):
        content = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(b"#" * len(content))
    before, after = (read_packages([str(tmp_path)], compare_contents=contents) for contents in (False, True))
    assert [one.altered_files for one in (*before.onnxruntime.owners, *before.others)] == [(), ()]
    found = [(library,), ("numpy/_core/_umath.so",)] if seen else [(), ()]
    assert [one.altered_files for one in (*after.onnxruntime.owners, *after.others)] == found


def test_what_is_not_compared(tmp_path: Path) -> None:
    absent = "../../bin/onnxruntime_test,,1\n/opt/x,,1\nonnxruntime/__pycache__/a.pyc,,\nonnxruntime/b.pyc,,5\n"
    info = install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE, record=absent)
    (info / "METADATA").write_text("changed by a repackager")
    (owner,) = engine(tmp_path).owners
    assert (owner.missing_files, owner.altered_files) == ((), ())


def test_a_link_to_itself_is_missing(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    init = tmp_path / "onnxruntime" / "capi" / "__init__.py"
    init.unlink()
    init.symlink_to(init)
    assert engine(tmp_path).owners[0].missing_files == ("onnxruntime/capi/__init__.py",)


def test_a_quoted_path_with_a_comma(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE, record='"onnxruntime/a,b.txt",,3\n')
    assert engine(tmp_path).owners[0].missing_files == ("onnxruntime/a,b.txt",)
