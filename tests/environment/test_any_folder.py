"""Whatever lies along the search path, and whoever reads it: nothing raises, and nothing is imported."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.packages.installed import read_packages
from ortgpu.environment.packages.metadata import parse_record
from tests.support.children import run_python
from tests.support.made_packages import ENGINE, install, names, read

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
    odd: list[Any] = ["", "\0", str(tmp_path / "absent"), tmp_path / "file", loop, None, b"/bytes", site / "\udcff"]
    path = [str(one) if isinstance(one, Path) else one for one in odd]
    found = read_packages([*path, str(archive), str(archive / "inner"), str(site)])
    assert found.onnxruntime.folder == str(site / "onnxruntime")
    assert names(found.onnxruntime.owners) == ["onnxruntime-gpu"]


def test_wrong_kinds_of_files_and_odd_names(tmp_path: Path) -> None:
    info = install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    (info / "top_level.txt").mkdir()  # a folder where a file is expected
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
    return run_python(code, env=environ).ok().stdout


def test_nothing_is_imported(tmp_path: Path) -> None:
    files = {**ENGINE, "onnxruntime/__init__.py": "raise SystemExit('imported')\n"}
    install(tmp_path, "onnxruntime_gpu", "1.31.1", {**files, "torch/version.py": "raise SystemExit('imported')\n"})
    code = """
import sys
from ortgpu.environment.packages.installed import read_packages
print(read_packages().onnxruntime.folder)
assert not {"onnxruntime", "torch", "onnx", "numpy", "rich"} & set(sys.modules)
"""
    assert child(code, tmp_path).strip() == str(tmp_path / "onnxruntime")


def test_no_library_is_opened(tmp_path: Path) -> None:
    """They have gigabytes, and a session waits meanwhile: of a library its size alone is compared."""
    install(tmp_path, "onnxruntime_gpu", "1.31.1", ENGINE)
    code = f"""
import sys
from ortgpu.environment.packages.installed import read_packages
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
read_packages()
print(*[path.rpartition("/")[2] for path in opened if path.startswith({str(tmp_path)!r})])
"""
    opened = child(code, tmp_path).split()
    assert "RECORD" in opened
    assert not [name for name in opened if name.endswith(".so")]


def test_what_is_loaded_counts_not_what_would_be(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    install(old, "onnxruntime", "1.20.0", {"onnxruntime/__init__.py": ""})
    install(new, "onnxruntime_gpu", "1.31.1", ENGINE)
    code = f"""
import sys
from ortgpu.environment.packages.installed import read_packages
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
from ortgpu.environment.packages.installed import read_packages

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
from ortgpu.environment.packages.installed import read_packages
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
