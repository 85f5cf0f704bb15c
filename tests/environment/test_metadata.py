"""Parsers of what installers write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpu.environment.packages.metadata import (
    RecordEntry,
    list_places,
    parse_assignments,
    parse_cuda_version,
    parse_metadata_name,
    parse_metadata_version,
    parse_record,
)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("onnxruntime_gpu-1.31.1.dist-info", ("onnxruntime-gpu", "1.31.1")),
        ("Foo.Bar__baz-1.0+cu12.1.dist-info", ("foo-bar-baz", "1.0+cu12.1")),
        ("onnx-1.2-py3.10.egg-info", ("onnx", "1.2")),
        ("onnx-1.2-py3.10-linux-x86_64.egg-info", ("onnx", "1.2")),
        ("onnx.egg-info", ("onnx", None)),
        ("~nnx-1.0.dist-info", None),
        (".dist-info", None),
        ("-1.0.dist-info", None),
        ("onnx", None),
        ("onnx-1.0.dist-info.bak", None),
    ],
)
def test_parse_metadata_name(folder: str, expected: tuple[str, str | None] | None) -> None:
    assert parse_metadata_name(folder) == expected


def test_parse_metadata_version() -> None:
    assert parse_metadata_version(b"Name: x\r\nVersion: 1.2+cu12\r\n\r\nVersion: 9\r\n") == "1.2+cu12"
    assert parse_metadata_version(b"Name: x\n\nVersion: 9\n") is None
    assert parse_metadata_version(b"Metadata-Version: 2.1\n") is None


def test_parse_record() -> None:
    data = b'a/b.py,sha256=xyz,12\r\n\r\n"a,b",,\r\nc\\d.py,,3\r\n\xff.py,,\r\n'
    assert parse_record(data) == (
        RecordEntry("a/b.py", "sha256=xyz", 12),
        RecordEntry("a,b", "", None),
        RecordEntry("c/d.py", "", 3),
        RecordEntry("\udcff.py", "", None),
    )
    assert parse_record(b"a,,1\n<html>") is None
    assert parse_record(b"a,," + b"9" * 5000) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("13.0", (13, 0)), ("12.8.1", (12, 8)), ("12", None), ("", None), (None, None), ("None", None), ("12.x", None)],
)
def test_parse_cuda_version(text: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_cuda_version(text) == expected


def test_parse_assignments() -> None:
    text = "a = 'x'\nb: Optional[str] = \"y\"\nc = None\nif True:\n    d = 'inner'\ne == 'z'\n# f = 'g'\n"
    assert parse_assignments(text) == {"a": "x", "b": "y"}


def test_a_folder_and_a_link_to_it_are_one_place(tmp_path: Path) -> None:
    """lib64 is a link to lib in many environments. A package there has one owner."""
    for folder in ("lib", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "a.dist-info").mkdir()
    try:
        (tmp_path / "lib64").symlink_to(tmp_path / "lib", target_is_directory=True)
    except OSError:
        pytest.skip("this user may make no links")
    names = ("lib64", "lib", "none", "other", "lib")
    places = list_places([*(str(tmp_path / name) for name in names), 7])
    assert [Path(place.folder).name for place in places] == ["lib64", "other"]
    assert places[0].names == {"a.dist-info"}
