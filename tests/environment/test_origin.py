"""The command for an extra of ortgpu names where this copy came from, since no package index has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortgpu.environment.packages.origin import words_for_extra

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = "Requires-Dist: rich>=13\nRequires-Dist: ray[data,serve]<3,>=2.51; extra == 'ray'\n"


def installed_from(folder: Path, **origin: object) -> None:
    info = folder / "ortgpu-9.dist-info"
    info.mkdir(parents=True)
    said = f"Metadata-Version: 2.1\nName: ortgpu\nVersion: 9\n{REQUIREMENTS}"
    (info / "METADATA").write_text(said, encoding="utf-8")
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")


def test_a_clone_a_wheel_and_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, wheel = tmp_path / "a clone", tmp_path / "ortgpu-9-py3-none-any.whl"
    clone.mkdir()
    wheel.touch()
    commit = "0123456789abcdef0123456789abcdef01234567"
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"url": clone.as_uri(), "dir_info": {"editable": True}}, ["-e", f"{clone}[ray]"]),
        ({"url": clone.as_uri(), "dir_info": {}}, [f"ortgpu[ray] @ {clone.as_uri()}"]),
        ({"url": wheel.as_uri(), "archive_info": {}}, [f"ortgpu[ray] @ {wheel.as_uri()}"]),
        (
            {"url": "https://host.example/a.git", "vcs_info": {"vcs": "git", "commit_id": commit}},
            [f"ortgpu[ray] @ git+https://host.example/a.git@{commit}"],
        ),
        ({"url": "https://host.example/ortgpu-9.whl"}, ["ortgpu[ray] @ https://host.example/ortgpu-9.whl"]),
    ]
    for number, (origin, expected) in enumerate(cases):
        installed_from(tmp_path / str(number), **origin)
        monkeypatch.syspath_prepend(tmp_path / str(number))
        assert words_for_extra("ray") == expected


def test_an_origin_that_is_gone_leaves_the_clone_or_the_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(tmp_path / "site", url=(tmp_path / "gone").as_uri(), dir_info={})
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert words_for_extra("ray") == [f"{ROOT}[ray]"], "this test runs in a clone"
    elsewhere = tmp_path / "site" / "ortgpu" / "environment" / "packages" / "origin.py"
    monkeypatch.setattr("ortgpu.environment.packages.origin.__file__", str(elsewhere))
    assert words_for_extra("ray") == ["ray[data,serve]<3,>=2.51"]
