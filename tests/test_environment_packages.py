"""Installed distributions, read from prepared site-packages folders and from the real one."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.metadata import (
    RecordEntry,
    parse_assignments,
    parse_cuda_version,
    parse_editable_project,
    parse_local_cuda_version,
    parse_metadata_name,
    parse_metadata_version,
    parse_record,
)
from ortgpu.environment.packages import Distribution, OnnxRuntime, Packages, locate_packages, read_packages

BUILD_INFO = "package_name = 'onnxruntime-gpu'\n__version__ = '1.31.1'\ncuda_version = '13.0'\n"
ENGINE = {
    "onnxruntime/__init__.py": "__version__ = '1.31.1'\n",
    "onnxruntime/capi/__init__.py": "",
    "onnxruntime/capi/build_and_package_info.py": BUILD_INFO,
    "onnxruntime/capi/onnxruntime_pybind11_state.so": "ELF",
    "onnxruntime/capi/libonnxruntime_providers_cuda.so": "ELF, and longer",
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so": "ELF",
}


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content)}\n"


def install(site: Path, name: str, version: str, files: Mapping[str, str], *, record: str | None = "") -> Path:
    """What an installer does: files, METADATA, and a RECORD unless ``record`` is None. Returns the dist-info."""
    info = site / f"{name}-{version}.dist-info"
    contents = {path: text.encode() for path, text in files.items()}
    contents[f"{info.name}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    lines = record or ""
    for path, content in contents.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        lines += record_line(path, content)
    if record is not None:
        (info / "RECORD").write_text(lines + f"{info.name}/RECORD,,\n")
    return info


def read(*places: Path | str, compare_files: bool = True) -> Packages:
    return read_packages([str(place) for place in places], compare_files=compare_files)


def engine(*places: Path | str) -> OnnxRuntime:
    return read(*places).onnxruntime


def names(distributions: tuple[Distribution, ...]) -> list[str]:
    return [one.name for one in distributions]


# What is there


def test_one_healthy_install(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    capi = tmp_path / "onnxruntime" / "capi"
    assert engine(tmp_path) == OnnxRuntime(
        folder=str(tmp_path / "onnxruntime"),
        importable=True,
        owners=(Distribution("onnxruntime-gpu", "1.31.1", str(tmp_path), folder="onnxruntime_gpu-1.31.1.dist-info"),),
        elsewhere=(),
        build_name="onnxruntime-gpu",
        build_version="1.31.1",
        cuda_version=(13, 0),
        provider_library=str(capi / "libonnxruntime_providers_cuda.so"),
        extension=str(capi / "onnxruntime_pybind11_state.so"),
        tensorrt_library=str(capi / "libonnxruntime_providers_tensorrt.so"),
    )


def test_nothing_installed(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found == Packages(
        OnnxRuntime(None, False, (), (), None, None, None, None, None, None), torch=None, nvidia=(), others=()
    )


def test_no_build_information_is_unknown(tmp_path: Path) -> None:
    files = dict(ENGINE)
    del files["onnxruntime/capi/build_and_package_info.py"]  # as in 1.18.1
    install(tmp_path, "onnxruntime_gpu", "1.18.1", files)
    found = engine(tmp_path)
    assert (found.build_name, found.build_version, found.cuda_version) == (None, None, None)
    assert found.importable


def test_a_cpu_build(tmp_path: Path) -> None:
    info = "package_name = 'onnxruntime'\n__version__ = '1.31.1'\n"
    install(
        tmp_path,
        "onnxruntime",
        "1.31.1",
        {"onnxruntime/__init__.py": "", "onnxruntime/capi/build_and_package_info.py": info},
    )
    found = engine(tmp_path)
    assert names(found.owners) == ["onnxruntime"]
    assert (found.build_name, found.cuda_version, found.provider_library) == ("onnxruntime", None, None)


def test_windows_names(tmp_path: Path) -> None:
    capi = tmp_path / "onnxruntime" / "capi"
    files = ("onnxruntime_providers_cuda.dll", "onnxruntime_providers_tensorrt.dll", "onnxruntime_pybind11_state.pyd")
    install(
        tmp_path,
        "onnxruntime_gpu",
        "1.31.1",
        {"onnxruntime/__init__.py": "", **{f"onnxruntime/capi/{name}": "MZ" for name in files}},
    )
    found = engine(tmp_path)
    assert (found.provider_library, found.tensorrt_library, found.extension) == tuple(str(capi / one) for one in files)


def test_the_extension_of_this_python_comes_first(tmp_path: Path) -> None:
    ours = "onnxruntime_pybind11_state" + importlib.machinery.EXTENSION_SUFFIXES[0]
    foreign = "onnxruntime_pybind11_state.cpython-30-other.so"
    install(tmp_path, "onnxruntime_gpu", "1", {"onnxruntime/__init__.py": "", f"onnxruntime/capi/{foreign}": ""})
    # One that does not fit is a fact too: the wheel of another Python was copied here.
    assert engine(tmp_path).extension == str(tmp_path / "onnxruntime" / "capi" / foreign)
    (tmp_path / "onnxruntime" / "capi" / ours).touch()
    assert engine(tmp_path).extension == str(tmp_path / "onnxruntime" / "capi" / ours)


def test_a_library_that_is_a_link_to_nothing_is_not_there(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    library = tmp_path / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
    library.unlink()
    library.symlink_to("gone.so")
    found = engine(tmp_path)
    assert found.provider_library is None
    assert found.owners[0].missing_files == ("onnxruntime/capi/libonnxruntime_providers_cuda.so",)


# Who owns it


def test_twins_in_one_folder_are_each_compared(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    cpu = dict(ENGINE)
    del cpu["onnxruntime/capi/libonnxruntime_providers_cuda.so"]
    cpu["onnxruntime/capi/build_and_package_info.py"] = BUILD_INFO.replace("-gpu", "")
    cpu["onnxruntime/capi/onnxruntime_pybind11_state.so"] = "another ELF"
    install(tmp_path, "onnxruntime", "1.30.0", cpu)  # the last writer wins
    found = engine(tmp_path)
    by_name = {one.name: one for one in found.owners}
    assert set(by_name) == {"onnxruntime", "onnxruntime-gpu"}
    assert by_name["onnxruntime"].altered_files == ()
    assert set(by_name["onnxruntime-gpu"].altered_files) == {
        "onnxruntime/capi/build_and_package_info.py",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
    }
    assert by_name["onnxruntime-gpu"].missing_files == ()
    assert found.build_name == "onnxruntime"


def test_one_twin_uninstalled_leaves_holes(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "onnxruntime" / "__init__.py").unlink()
    (tmp_path / "onnxruntime" / "capi" / "build_and_package_info.py").unlink()
    found = engine(tmp_path)
    assert (found.folder, found.importable) == (str(tmp_path / "onnxruntime"), False)
    assert found.owners[0].missing_files == ("onnxruntime/__init__.py", "onnxruntime/capi/build_and_package_info.py")


def test_a_leftover_folder_without_owner(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        (place / "onnxruntime" / "capi").mkdir(parents=True)
    found = engine(first, second)
    assert (found.folder, found.importable, found.owners) == (str(first / "onnxruntime"), False, ())


def test_the_first_on_the_path_wins_and_the_other_is_elsewhere(tmp_path: Path) -> None:
    user, system = tmp_path / "user", tmp_path / "system"
    install(user, "onnxruntime", "1.20.0", {"onnxruntime/__init__.py": ""})
    install(system, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(user, system)
    assert found.folder == str(user / "onnxruntime")
    assert (names(found.owners), names(found.elsewhere)) == (["onnxruntime"], ["onnxruntime-gpu"])
    found = engine(system, user)
    assert (names(found.owners), names(found.elsewhere)) == (["onnxruntime-gpu"], ["onnxruntime"])


def test_a_source_tree_in_front_has_no_owner(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "onnxruntime").mkdir(parents=True)
    (source / "onnxruntime" / "__init__.py").touch()
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(source, site)
    assert (found.folder, found.owners) == (str(source / "onnxruntime"), ())
    assert names(found.elsewhere) == ["onnxruntime-gpu"]
    assert found.elsewhere[0].missing_files == ()  # complete where it lies


def test_a_bare_folder_in_front_does_not_hide_a_package(tmp_path: Path) -> None:
    bare, site = tmp_path / "bare", tmp_path / "site"
    (bare / "onnxruntime").mkdir(parents=True)
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    found = engine(bare, site)
    assert (found.folder, found.importable) == (str(site / "onnxruntime"), True)


def test_a_module_file_shadows_the_package(tmp_path: Path) -> None:
    scripts, site = tmp_path / "scripts", tmp_path / "site"
    scripts.mkdir()
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    (scripts / "onnxruntime.py").touch()
    assert engine(scripts, site).shadowed_by == str(scripts / "onnxruntime.py")
    assert engine(scripts, site).folder == str(site / "onnxruntime")
    assert engine(site, scripts).shadowed_by is None
    (site / "onnxruntime.py").touch()  # beside it, the package is taken
    assert engine(site, scripts).shadowed_by is None


def test_where_import_really_goes(tmp_path: Path) -> None:
    """The walk is the import system's: compare it with a real import for every order of four kinds of places."""
    package, bare, module, empty = (tmp_path / name for name in ("package", "bare", "module", "empty"))
    for place in (package / "onnxruntime", bare / "onnxruntime", module, empty):
        place.mkdir(parents=True)
    (package / "onnxruntime" / "__init__.py").touch()
    (module / "onnxruntime.py").touch()
    for order in ([package, bare, module], [bare, package, module], [module, package], [bare, module], [empty, bare]):
        path = [str(place) for place in order]
        spec = importlib.machinery.PathFinder.find_spec("onnxruntime", path)
        assert spec is not None
        found = engine(*path)
        if spec.origin is None:
            assert (found.importable, found.shadowed_by) == (False, None)
            assert found.folder == next(iter(spec.submodule_search_locations or ()))
        elif spec.origin.endswith("onnxruntime.py"):
            assert found.shadowed_by == spec.origin
        else:
            assert (found.folder, found.importable) == (os.path.dirname(spec.origin), True)
            assert found.shadowed_by is None


def test_an_owner_under_a_name_of_its_own(tmp_path: Path) -> None:
    install(tmp_path, "acme_inference", "3.0", ENGINE)  # seen in RECORD only
    assert names(engine(tmp_path).owners) == ["acme-inference"]
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "acme_inference-3.0.dist-info" / "top_level.txt").write_text("onnxruntime\n")
    assert names(engine(tmp_path).owners) == ["acme-inference", "onnxruntime-gpu"]


def test_relatives_that_own_other_folders_are_no_owners(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    install(tmp_path, "onnxruntime_extensions", "0.14.0", {"onnxruntime_extensions/__init__.py": ""})
    install(tmp_path, "onnxruntime_genai", "0.9.0", {"onnxruntime_genai/__init__.py": ""}, record=None)
    found = read(tmp_path)
    assert names(found.onnxruntime.owners) == ["onnxruntime-gpu"]
    assert found.onnxruntime.elsewhere == ()
    assert names(found.others) == ["onnxruntime-extensions", "onnxruntime-genai"]


def test_one_place_by_two_names_is_one_place(tmp_path: Path) -> None:
    install(tmp_path / "lib", "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "lib64").symlink_to("lib")
    found = engine(tmp_path / "lib64", tmp_path / "lib", tmp_path / "lib")
    assert names(found.owners) == ["onnxruntime-gpu"]
    assert found.elsewhere == ()


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


def test_an_editable_install_owns_its_project(tmp_path: Path) -> None:
    site, project = tmp_path / "site", tmp_path / "my project"
    (project / "onnxruntime").mkdir(parents=True)
    (project / "onnxruntime" / "__init__.py").touch()
    info = install(site, "onnxruntime_gpu", "1.32.0", {"__editable__.onnxruntime_gpu-1.32.0.pth": str(project)})
    (info / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    found = engine(site, project)
    assert found.folder == str(project / "onnxruntime")
    (owner,) = found.owners
    assert (owner.name, owner.version, owner.location) == ("onnxruntime-gpu", "1.32.0", str(site))
    assert not owner.record_readable
    assert names(engine(site).elsewhere) == ["onnxruntime-gpu"]  # its .pth was not followed
    link = tmp_path / "link"
    link.symlink_to(project)
    assert names(engine(site, link).owners) == ["onnxruntime-gpu"]


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
    assert read(tmp_path, compare_files=False).onnxruntime.owners[0].altered_files == ()


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


# Other distributions


def test_which_others_are_reported(tmp_path: Path) -> None:
    for name, version in (
        ("nvidia_cublas_cu12", "12.4.5.8"),
        ("NVIDIA_cuFFT", "12.0.0"),
        ("nvidia_ml_py", "13.0"),
        ("cupy_cuda12x", "13.3.0"),
        ("numpy", "2.1.0"),
        ("tensorrt_cu13", "10.1"),
        ("requests", "2.0"),
    ):
        install(tmp_path, name, version, {})
    found = read(tmp_path)
    assert [(one.name, one.version) for one in found.nvidia] == [
        ("nvidia-cufft", "12.0.0"),
        ("nvidia-cublas-cu12", "12.4.5.8"),
    ]
    assert names(found.others) == ["cupy-cuda12x", "numpy", "nvidia-ml-py", "tensorrt-cu13"]


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        pytest.param(
            "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '2.8.0+cu129'\n"
            "debug = False\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n",
            "2.8.0+cu129",
            (12, 9),
            id="cuda",
        ),
        pytest.param("__version__ = '2.8.0+cpu'\ncuda: Optional[str] = None\n", "2.8.0+cpu", None, id="cpu"),
        pytest.param("__version__ = '1.13.1+cu117'\n", "1.13.1+cu117", (11, 7), id="local-version-only"),
        pytest.param("\x00\x01", "2.9.0+cu130", (13, 0), id="garbage: the metadata's version"),
    ],
)
def test_torch(tmp_path: Path, text: str, version: str, cuda: tuple[int, int] | None) -> None:
    install(tmp_path, "torch", "2.9.0+cu130", {"torch/version.py": text})
    torch = read(tmp_path).torch
    assert torch is not None
    assert (torch.version, torch.cuda_version, torch.folder) == (version, cuda, str(tmp_path / "torch"))


def test_torch_known_by_its_metadata_only(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.9.0+cu130", {})
    torch = read(tmp_path).torch
    assert torch is not None
    assert (torch.version, torch.cuda_version) == ("2.9.0+cu130", (13, 0))


# Parsers


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


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.4+cu121", (12, 1)),
        ("1.8+cu92", (9, 2)),
        ("2.9+cu130", (13, 0)),
        ("2.4+cpu", None),
        ("2.4", None),
        (None, None),
    ],
)
def test_parse_local_cuda_version(version: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_local_cuda_version(version) == expected


def test_parse_assignments() -> None:
    text = "a = 'x'\nb: Optional[str] = \"y\"\nc = None\nif True:\n    d = 'inner'\ne == 'z'\n# f = 'g'\n"
    assert parse_assignments(text) == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("data", "project"),
    [
        (b'{"url": "file:///a%20b", "dir_info": {"editable": true}}', "/a b"),
        (b'{"url": "file:///C:/a", "dir_info": {"editable": true}}', "C:/a"),
        (b'{"url": "file:///a", "dir_info": {}}', None),
        (b'{"url": "https://x/y.whl", "archive_info": {}}', None),
        (b'{"url": 3, "dir_info": {"editable": true}}', None),
        (b'{"url": "file://[", "dir_info": {"editable": true}}', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_parse_editable_project(data: bytes, project: str | None) -> None:
    assert parse_editable_project(data) == project


# Whatever lies there, nothing raises


def test_search_path_entries_that_are_no_folders(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
    (tmp_path / "file").touch()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("onnxruntime/__init__.py", "")
    odd: list[object] = ["", "\0", str(tmp_path / "absent"), tmp_path / "file", loop, None, b"/bytes", site / "\udcff"]
    path = [str(one) if isinstance(one, Path) else one for one in odd]
    found = read_packages([*path, str(archive), str(archive / "inner"), str(site)])  # type: ignore[list-item]
    assert found.onnxruntime.folder == str(site / "onnxruntime")
    assert names(found.onnxruntime.owners) == ["onnxruntime-gpu"]


def test_wrong_kinds_of_files_and_odd_names(tmp_path: Path) -> None:
    info = install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    for name in ("top_level.txt", "direct_url.json"):
        (info / name).mkdir()  # folders where files are expected
    (tmp_path / "numpy-1.0.dist-info").write_text("a file where a folder is expected")
    (tmp_path / "onnx.egg-info").symlink_to(tmp_path / "onnx.egg-info")
    if sys.platform.startswith("linux"):
        os.mkdir(os.fsencode(tmp_path) + b"/\xff\xfe-1.0.dist-info")
    found = read(tmp_path)
    assert names(found.onnxruntime.owners) == ["onnxruntime-gpu"]
    assert [(one.name, one.version) for one in found.others] == [("numpy", "1.0"), ("onnx", None)]


@settings(max_examples=60, deadline=None)
@given(
    record=st.one_of(
        st.binary(max_size=300),
        st.text('abc/\\.,"=\n\r\0é\udcff0123456789', max_size=200).map(lambda text: text.encode("utf-8", "replace")),
        st.lists(
            st.tuples(st.text(max_size=20), st.sampled_from(["", "sha256=x", "md5=", "?"]), st.text(max_size=4))
        ).map(
            lambda rows: "".join(f"{path},{digest},{size}\n" for path, digest, size in rows).encode("utf-8", "replace")
        ),
    ),
    other=st.binary(max_size=200),
)
def test_any_bytes_in_the_metadata(tmp_path_factory: pytest.TempPathFactory, record: bytes, other: bytes) -> None:
    site = tmp_path_factory.mktemp("site")
    info = site / "onnxruntime_gpu.egg-info"
    for folder in (info, site / "onnxruntime" / "capi", site / "torch"):
        folder.mkdir(parents=True)
    (info / "RECORD").write_bytes(record)
    for file in (
        info / "PKG-INFO",
        info / "top_level.txt",
        info / "direct_url.json",
        site / "onnxruntime" / "capi" / "build_and_package_info.py",
        site / "torch" / "version.py",
    ):
        file.write_bytes(other)
    found = read(site)
    assert found.onnxruntime.folder == str(site / "onnxruntime")
    assert found.torch is not None
    for one in found.onnxruntime.owners:
        assert one.record_readable == (parse_record(record) is not None)


# In a process of its own


def child(code: str, *path: Path) -> str:
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_imported(tmp_path: Path) -> None:
    files = {**ENGINE, "onnxruntime/__init__.py": "raise SystemExit('imported')\n"}
    install(tmp_path, "onnxruntime_gpu", "1.31.1", {**files, "torch/version.py": "raise SystemExit('imported')\n"})
    code = """
import sys
from ortgpu.environment.packages import read_packages
print(read_packages().onnxruntime.folder)
assert not {"onnxruntime", "torch", "onnx", "numpy", "rich"} & set(sys.modules)
"""
    assert child(code, tmp_path).strip() == str(tmp_path / "onnxruntime")


def test_what_is_loaded_counts_not_what_would_be(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    install(old, "onnxruntime", "1.20.0", {"onnxruntime/__init__.py": ""})
    install(new, "onnxruntime_gpu", "1.31.1", ENGINE)
    code = f"""
import sys
from ortgpu.environment.packages import read_packages
import onnxruntime
sys.path.remove({str(old)!r})
found = read_packages().onnxruntime
print(found.folder, *[one.name for one in found.owners])
"""
    assert child(code, old, new).split() == [str(old / "onnxruntime"), "onnxruntime"]


def test_an_import_hook_is_asked_where_the_path_has_nothing(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    code = f"""
import sys
from importlib.machinery import PathFinder
from ortgpu.environment.packages import read_packages

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(tmp_path)!r}]) if name == "onnxruntime" else None

class Broken:
    @staticmethod
    def find_spec(name, path=None, target=None):
        raise RuntimeError("a hook of somebody else's")

sys.path[:] = []
sys.meta_path[:] = [Editable]
found = read_packages().onnxruntime
print(found.folder, found.importable)
sys.meta_path[:] = [Broken]
print(read_packages().onnxruntime.folder)
"""
    assert child(code).split() == [str(tmp_path / "onnxruntime"), "True", "None"]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has other permissions")
def test_folders_that_may_not_be_read() -> None:
    code = """
import os, sys
from ortgpu.environment.packages import read_packages
if os.geteuid() == 0:
    os.seteuid(65534)  # root may read everything
found = read_packages([sys.path[0]]).onnxruntime
print(found.folder, found.build_name, found.provider_library, len(found.owners), found.owners[0].missing_files)
"""
    with tempfile.TemporaryDirectory() as name:  # tmp_path lies in a folder that only its owner may enter
        site = Path(name)
        site.chmod(0o755)
        install(site, "onnxruntime_gpu", "1.31.1", ENGINE)
        (site / "onnxruntime" / "capi").chmod(0)
        try:
            output = child(code.replace("sys.path[0]", repr(name)))
        finally:
            (site / "onnxruntime" / "capi").chmod(0o755)
    # What may not be looked at is unknown, not missing.
    assert output.split() == [str(site / "onnxruntime"), "None", "None", "1", "()"]


# The real environment


def installed_engine() -> importlib.metadata.Distribution | None:
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


needs_engine = pytest.mark.skipif(installed_engine() is None, reason="no onnxruntime is installed here")


@needs_engine
def test_the_real_install() -> None:
    real = installed_engine()
    assert real is not None
    found = read_packages().onnxruntime
    assert found.folder is not None
    assert Path(found.folder).samefile(Path(str(real.locate_file("onnxruntime"))))
    assert found.importable
    assert found.elsewhere == ()
    (owner,) = found.owners
    assert (owner.name, owner.version) == (real.metadata["Name"], real.version)
    assert (owner.missing_files, owner.altered_files, owner.record_readable) == ((), (), True)
    assert found.build_version == real.version
    assert found.extension is not None
    if real.metadata["Name"] == "onnxruntime-gpu":
        assert found.cuda_version is not None
        assert found.provider_library is not None


@needs_engine
def test_all_that_importlib_finds_is_found() -> None:
    found = read_packages()
    expected = {
        (one.metadata["Name"].lower().replace("_", "-"), one.version)
        for one in importlib.metadata.distributions()
        if one.metadata["Name"].lower().startswith(("nvidia", "numpy", "protobuf", "flatbuffers"))
    }
    assert {(one.name, one.version) for one in (*found.nvidia, *found.others)} >= expected
    assert expected


@needs_engine
def test_reading_is_fast() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        read_packages()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.03


def test_locating_finds_the_same_files_and_no_distributions() -> None:
    located, read = locate_packages(), read_packages()
    assert located.onnxruntime.provider_library == read.onnxruntime.provider_library is not None
    assert located.onnxruntime.extension == read.onnxruntime.extension
    assert (located.onnxruntime.owners, located.nvidia, located.others) == ((), (), ())
