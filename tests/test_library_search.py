"""Where libraries are looked for, on prepared trees of small libraries that really have the names they need."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.catalogue import LIBRARIES, spec_for
from ortgpu.environment.libraries import (
    Resolution,
    SearchPlaces,
    find_roots,
    folders_of,
    judge_file,
    mapped_libraries,
    places_for,
    read_mapped_libraries,
    resolve,
)
from ortgpu.environment.loader_cache import parse_loader_cache, read_loader_cache
from ortgpu.environment.packages import Torch
from ortgpu.environment.wheel import ProviderLibrary, read_provider
from tests.lab.stubs import Stubs

MACHINE = os.uname().machine
TOOLKIT = ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13")
LAZY = ("libcufft.so.12", "libnvrtc.so.13", "libnvJitLink.so.13")
CUDNN = tuple(f"libcudnn{part}.so.9" for part in ("", "_graph", "_ops", "_cnn", "_adv"))
NEEDED = (*TOOLKIT, "libcuda.so.1", "libc.so.6")  # of 1.28 and newer
ALL = (*TOOLKIT, *LAZY, *CUDNN)

Put = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(stubs: Stubs) -> Callable[[str], Path]:
    """A library of a few kilobytes with this SONAME; each is compiled once."""
    made: dict[str, Path] = {}

    def library(soname: str) -> Path:
        if soname not in made:
            made[soname] = stubs.library(soname)
        return made[soname]

    return library


@pytest.fixture
def put(compiled: Callable[[str], Path]) -> Put:
    """``put(folder, *sonames)``: these libraries in this folder, which is returned."""

    def into(folder: Path, *sonames: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for soname in sonames:
            shutil.copy(compiled(soname), folder / soname)
        return folder

    return into


def places(tmp_path: Path, **changes: Any) -> SearchPlaces:
    """Nothing anywhere, but for the changes."""
    nothing: dict[str, Any] = {
        "sys_path": (),
        "variables": {},
        "start_library_path": "",
        "python_prefix": str(tmp_path / "python"),
        "machine": MACHINE,
        "mapped": (),
        "filesystem": tmp_path / "filesystem",
    }
    return SearchPlaces(**{**nothing, **changes})


def search(where: SearchPlaces, needed: Sequence[str] = NEEDED, cuda_major: int = 13) -> dict[str, Resolution]:
    return {found.soname: found for found in resolve(where, needed, cuda_major)}


def chosen(found: Mapping[str, Resolution], soname: str) -> str:
    candidate = found[soname].chosen
    assert candidate is not None, found[soname]
    return candidate.path


def folders_chosen(found: Mapping[str, Resolution], sonames: Sequence[str] = TOOLKIT) -> set[str]:
    return {os.path.dirname(chosen(found, soname)) for soname in sonames}


def reasons(found: Resolution) -> dict[str, str | None]:
    return {candidate.path: candidate.problem for candidate in found.rejected}


# The documented order


@dataclass(frozen=True)
class Place:
    """One place of the documented order: its folder, and what makes the search look there."""

    source: str
    folder: str
    changes: Callable[[Path], dict[str, Any]]


def cache_naming(tmp_path: Path, folder: str) -> dict[str, Any]:
    cache = tmp_path / "filesystem/etc/ld.so.cache"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(loader_cache({name: str(tmp_path / folder / name) for name in ALL}))
    return {}


def variable(name: str, folder: str) -> Callable[[Path], dict[str, Any]]:
    return lambda tmp: {"variables": {name: str(tmp / folder)}}


def conda_environment(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "python/conda-meta").mkdir(parents=True)
    return {}


ORDER = (
    Place("already loaded", "loaded", lambda tmp: {"mapped": tuple(str(tmp / "loaded" / name) for name in ALL)}),
    Place("directory", "given", lambda tmp: {"directory": str(tmp / "given")}),
    Place("nvidia wheels", "site/nvidia/cu13/lib", lambda tmp: {"sys_path": (str(tmp / "site"),)}),
    Place("torch", "torch/lib", lambda tmp: {"torch_folder": str(tmp / "torch")}),
    Place("conda", "conda/lib", variable("CONDA_PREFIX", "conda")),
    Place("conda", "python/lib", conda_environment),
    Place("environment variable", "home/lib64", variable("CUDA_HOME", "home")),
    Place("environment variable", "path/targets/x86_64-linux/lib", variable("CUDA_PATH", "path")),
    Place("environment variable", "cudnn/lib", variable("CUDNN_HOME", "cudnn")),
    Place("environment variable", "cudnn_path", variable("CUDNN_PATH", "cudnn_path")),
    Place("toolkit", "filesystem/usr/local/cuda/lib64", lambda tmp: {}),
    Place("toolkit", "filesystem/usr/local/cuda-13.1/lib64", lambda tmp: {}),
    Place("toolkit", "filesystem/usr/local/cuda-13/targets/x86_64-linux/lib", lambda tmp: {}),
    Place("system loader", "rpath", lambda tmp: {"provider_search_path": (str(tmp / "rpath"),)}),
    Place("system loader", "start", lambda tmp: {"start_library_path": f"/absent::{tmp / 'start'}"}),
    Place("system loader", "cached", lambda tmp: cache_naming(tmp, "cached")),
    Place("system loader", "filesystem/lib64", lambda tmp: {}),
    Place("system loader", "filesystem/usr/lib64", lambda tmp: {}),
    Place("system loader", "filesystem/lib", lambda tmp: {}),
    Place("system loader", "filesystem/usr/lib", lambda tmp: {}),
)


def prepare(tmp_path: Path, put: Put, *chosen_places: Place, sonames: Sequence[str] = ALL) -> SearchPlaces:
    changes: dict[str, Any] = {}
    for place in chosen_places:
        put(tmp_path / place.folder, *sonames)
        new = place.changes(tmp_path)
        if "variables" in new:
            new["variables"] = {**changes.get("variables", {}), **new["variables"]}
        changes |= new
    return places(tmp_path, **changes)


@pytest.mark.parametrize("place", ORDER, ids=lambda place: place.folder)
def test_each_place_alone(place: Place, tmp_path: Path, put: Put) -> None:
    found = search(prepare(tmp_path, put, place))
    for soname in ALL:
        candidate = found[soname].chosen
        assert candidate is not None, soname
        assert (candidate.source, candidate.path) == (place.source, str(tmp_path / place.folder / soname))
        assert candidate.problem is None
    assert {soname for soname, one in found.items() if one.required} == set(TOOLKIT)


@pytest.mark.parametrize("number", range(len(ORDER) - 1), ids=lambda n: ORDER[n].folder)
def test_each_place_before_the_next(number: int, tmp_path: Path, put: Put) -> None:
    earlier, later = ORDER[number : number + 2]
    found = search(prepare(tmp_path, put, later, earlier))
    assert folders_chosen(found, ALL) == {str(tmp_path / earlier.folder)}


def test_the_whole_order(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, *ORDER, sonames=("libcudnn.so.9",))
    candidates = search(where)["libcudnn.so.9"].candidates
    assert [c.path for c in candidates] == [str(tmp_path / place.folder / "libcudnn.so.9") for place in ORDER]


def test_the_order_is_the_documented_one() -> None:
    from ortgpu.environment import libraries

    documented = re.findall(r"^\d\. (.*)", libraries.__doc__ or "", re.MULTILINE)
    keywords = (
        "already loaded",
        "caller gave",
        "``nvidia``",
        "torch",
        "conda",
        "CUDA_HOME",
        "system loader",
        "has loaded",
    )
    assert [key in line for key, line in zip(keywords, documented, strict=True)] == [True] * len(keywords)


def test_nothing_anywhere(tmp_path: Path) -> None:
    where = places(tmp_path)
    assert find_roots(where, 13) == ()
    found = search(where)
    assert set(ALL) <= set(found)
    assert all(one.chosen is None and one.rejected == () for one in found.values())


def test_dependencies_come_first(tmp_path: Path) -> None:
    order = [one.spec.stem for one in resolve(places(tmp_path), NEEDED, 13)]
    assert order == [spec.stem for spec in LIBRARIES if 13 in spec.sonames]


# One root for the toolkit


def test_one_root_with_everything_before_an_earlier_one_with_a_part(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[6], sonames=TOOLKIT)
    put(tmp_path / "given", "libcublas.so.13", "libcublasLt.so.13")
    found = search(SearchPlaces(**{**vars_of(where), "directory": str(tmp_path / "given")}))
    assert folders_chosen(found) == {str(tmp_path / "home/lib64")}
    assert [c.source for c in found["libcublas.so.13"].candidates] == ["environment variable", "directory"]


def vars_of(where: SearchPlaces) -> dict[str, Any]:
    return {name: getattr(where, name) for name in SearchPlaces.__slots__}


def test_a_root_with_a_damaged_library_is_not_one_with_everything(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[2], ORDER[6], sonames=TOOLKIT)
    os.truncate(tmp_path / ORDER[2].folder / "libcurand.so.10", 300)
    found = search(where)
    assert folders_chosen(found) == {str(tmp_path / "home/lib64")}
    assert "truncated" in str(reasons(found["libcurand.so.10"]))


def test_no_root_with_everything_takes_each_from_the_first(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", "libcublas.so.13", "libcublasLt.so.13")
    put(tmp_path / "site/nvidia/cu13/lib", "libcublas.so.13", "libcurand.so.10", "libcudart.so.13")
    found = search(places(tmp_path, directory=str(tmp_path / "given"), sys_path=(str(tmp_path / "site"),)))
    assert chosen(found, "libcublas.so.13") == str(tmp_path / "given/libcublas.so.13")
    assert chosen(found, "libcurand.so.10") == str(tmp_path / "site/nvidia/cu13/lib/libcurand.so.10")


@pytest.mark.parametrize("beside", [(), CUDNN], ids=["no cuDNN there", "another cuDNN there"])
def test_a_cudnn_that_the_caller_gave_is_taken(beside: tuple[str, ...], tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", *CUDNN)
    where = prepare(tmp_path, put, ORDER[2], sonames=(*TOOLKIT, *beside))
    found = search(SearchPlaces(**{**vars_of(where), "directory": str(tmp_path / "given")}))
    assert folders_chosen(found, CUDNN) == {str(tmp_path / "given")}
    assert folders_chosen(found) == {str(tmp_path / "site/nvidia/cu13/lib")}


def test_cudnn_is_taken_from_the_root_of_the_toolkit(tmp_path: Path, put: Put) -> None:
    """A cuDNN in an earlier root may be another package's, built for another CUDA under the same name."""
    put(tmp_path / "user/nvidia/cudnn/lib", *CUDNN)
    put(tmp_path / "home/lib64", *TOOLKIT, *CUDNN)
    where = places(tmp_path, sys_path=(str(tmp_path / "user"),), variables={"CUDA_HOME": str(tmp_path / "home")})
    assert folders_chosen(search(where), CUDNN) == {str(tmp_path / "home/lib64")}


# What is loaded already


def test_the_rest_comes_from_where_the_loaded_one_is(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[2], ORDER[3], sonames=TOOLKIT)
    loaded = str(tmp_path / "torch/lib/libcudart.so.13")
    found = search(SearchPlaces(**{**vars_of(where), "mapped": (loaded,)}))
    assert found["libcudart.so.13"].chosen is not None
    assert found["libcudart.so.13"].chosen.source == "already loaded"
    assert folders_chosen(found) == {str(tmp_path / "torch/lib")}
    assert found["libcublas.so.13"].chosen is not None
    assert found["libcublas.so.13"].chosen.source == "torch"


def test_a_loaded_library_is_known_by_its_soname(tmp_path: Path, put: Put) -> None:
    """The kernel names the file behind the link."""
    real = put(tmp_path / "opt", "libcublas.so.13") / "libcublas.so.13.1.0.3"
    (tmp_path / "opt/libcublas.so.13").rename(real)
    found = search(places(tmp_path, mapped=(str(real), "/usr/lib/libc.so.6", "/opt/libcudnn_made_up.so.9")))
    assert chosen(found, "libcublas.so.13") == str(real)


def test_a_loaded_library_of_another_major_is_passed_over(tmp_path: Path, put: Put) -> None:
    loaded = put(tmp_path / "torch12", "libcublas.so.12") / "libcublas.so.12"
    where = prepare(tmp_path, put, ORDER[2])
    found = search(SearchPlaces(**{**vars_of(where), "mapped": (str(loaded),)}))["libcublas.so.13"]
    assert found.chosen is not None
    assert found.chosen.source == "nvidia wheels"
    assert reasons(found) == {str(loaded): "is libcublas.so.12, libcublas.so.13 is needed"}


MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f00a0000000-7f00a0100000 r--p 00000000 08:01 132 /opt/with space/libcublas.so.13.1.0.3
7f00a0100000-7f00a0200000 r-xp 00100000 08:01 132 /opt/with space/libcublas.so.13.1.0.3
7f00a0300000-7f00a0400000 r--p 00000000 00:2a 133 /tmp/libcurand.so.10 (deleted)
7f00a0500000-7f00a0600000 rw-p 00000000 00:00 0
7f00a0700000-7f00a0800000 rw-p 00000000 00:00 0 [heap]
7f00a0900000-7f00a0a00000 r-xp 00000000 00:00 0 [vdso]
"""


def test_maps_of_a_process() -> None:
    assert mapped_libraries(MAPS) == ("/opt/with space/libcublas.so.13.1.0.3", "/tmp/libcurand.so.10")
    assert mapped_libraries("") == ()


def test_maps_of_this_process() -> None:
    mapped = read_mapped_libraries()
    assert any(re.search(r"/libc[.-]", path) for path in mapped)
    assert all(os.path.isabs(path) for path in mapped)


# Wheels


@pytest.mark.parametrize(
    "layout",
    [
        dict.fromkeys((*TOOLKIT, *LAZY), "cu13") | dict.fromkeys(CUDNN, "cudnn"),
        {
            "libcublas.so.13": "cublas", "libcublasLt.so.13": "cublas", "libcurand.so.10": "curand",
            "libcudart.so.13": "cuda_runtime", "libcufft.so.12": "cufft", "libnvrtc.so.13": "cuda_nvrtc",
            "libnvJitLink.so.13": "nvjitlink", **dict.fromkeys(CUDNN, "cudnn"),
        },
    ],
    ids=["CUDA 13", "CUDA 12"],
)  # fmt: skip
@pytest.mark.parametrize("regular", [False, True], ids=["namespace", "regular package"])
def test_layouts_of_wheels(layout: dict[str, str], regular: bool, tmp_path: Path, put: Put) -> None:
    for soname, component in layout.items():
        put(tmp_path / "site/nvidia" / component / "lib", soname)
    if regular:
        (tmp_path / "site/nvidia/__init__.py").touch()
        (tmp_path / "site/nvidia/cudnn/__init__.py").touch()
    found = search(places(tmp_path, sys_path=(str(tmp_path / "site"),)))
    for soname, component in layout.items():
        assert chosen(found, soname) == str(tmp_path / "site/nvidia" / component / "lib" / soname)
    assert {c.root for one in found.values() for c in one.candidates} == {str(tmp_path / "site/nvidia")}


def test_several_nvidia_folders_along_the_path(tmp_path: Path, put: Put) -> None:
    """User site, --target and layered images: the folders of one namespace package."""
    put(tmp_path / "user/nvidia/cudnn/lib", *CUDNN)
    put(tmp_path / "image/nvidia/cu13/lib", *TOOLKIT)
    (tmp_path / "archive.zip").write_bytes(b"PK")
    path = ["absent", "archive.zip", "user", "image", "user", "link"]
    (tmp_path / "link").symlink_to("image")
    found = search(places(tmp_path, sys_path=tuple(str(tmp_path / entry) for entry in path)))
    assert folders_chosen(found) == {str(tmp_path / "image/nvidia/cu13/lib")}
    assert folders_chosen(found, CUDNN) == {str(tmp_path / "user/nvidia/cudnn/lib")}


def test_the_working_directory_on_the_path(tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are absolute even so: what is found now is opened later."""
    put(tmp_path / "work/nvidia/cu13/lib", *TOOLKIT)
    monkeypatch.chdir(tmp_path / "work")
    found = search(places(tmp_path, sys_path=("",)))
    assert folders_chosen(found) == {str(tmp_path / "work/nvidia/cu13/lib")}


def test_relative_folders_of_every_kind(tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "work/cuda/lib64", *TOOLKIT)
    monkeypatch.chdir(tmp_path / "work")
    for changes in ({"variables": {"CUDA_HOME": "cuda"}}, {"start_library_path": "cuda/lib64"}):
        assert folders_chosen(search(places(tmp_path, **changes))) == {str(tmp_path / "work/cuda/lib64")}


# Toolkits


def test_the_newest_toolkit_of_the_right_major(tmp_path: Path, put: Put) -> None:
    local = tmp_path / "filesystem/usr/local"
    for name in ("cuda-12.8", "cuda-13.9", "cuda-13.10", "cuda-13", "cuda-130", "cuda-13.0-old"):
        put(local / name / "lib64", *TOOLKIT)
    found = search(places(tmp_path))
    roots = [os.path.basename(c.root) for c in found["libcublas.so.13"].candidates]
    assert roots == ["cuda-13.10", "cuda-13.9", "cuda-13"]


def test_the_default_toolkit_is_of_another_major(tmp_path: Path, put: Put) -> None:
    local = tmp_path / "filesystem/usr/local"
    put(local / "cuda-12.8/lib64", "libcublas.so.12")
    (local / "cuda").symlink_to("cuda-12.8")
    put(local / "cuda-13.0/targets/x86_64-linux/lib", *TOOLKIT)
    found = search(places(tmp_path))
    assert folders_chosen(found) == {str(local / "cuda-13.0/targets/x86_64-linux/lib")}
    assert "is libcublas.so.12, libcublas.so.13 is needed" in reasons(found["libcublas.so.13"]).values()


def test_a_link_to_a_toolkit_is_the_same_toolkit(tmp_path: Path, put: Put) -> None:
    local = tmp_path / "filesystem/usr/local"
    put(local / "cuda-13.0/lib64", *TOOLKIT)
    (local / "cuda").symlink_to("cuda-13.0")
    variables = {"CUDA_HOME": str(local / "cuda"), "CUDA_PATH": str(local / "cuda-13.0")}
    found = search(places(tmp_path, variables=variables))["libcublas.so.13"]
    assert [c.path for c in found.candidates] == [str(local / "cuda/lib64/libcublas.so.13")]


def test_variables_that_name_nothing(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[2])
    variables = {"CUDA_HOME": "", "CUDA_PATH": str(tmp_path / "absent"), "CONDA_PREFIX": "", "CUDNN_HOME": "/dev/null"}
    found = search(SearchPlaces(**{**vars_of(where), "variables": variables}))
    assert folders_chosen(found) == {str(tmp_path / "site/nvidia/cu13/lib")}


def test_an_interpreter_that_is_not_condas(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "python/lib", *TOOLKIT)
    assert search(places(tmp_path))["libcublas.so.13"].chosen is None


# cuDNN


def test_parts_come_from_the_folder_of_the_whole_only(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", "libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9")
    put(tmp_path / "site/nvidia/cudnn/lib", *CUDNN)
    found = search(places(tmp_path, directory=str(tmp_path / "given"), sys_path=(str(tmp_path / "site"),)))
    assert folders_chosen(found, CUDNN[:3]) == {str(tmp_path / "given")}
    assert found["libcudnn_cnn.so.9"].candidates == ()
    assert [c.path for c in found["libcudnn.so.9"].candidates] == [
        str(tmp_path / "given/libcudnn.so.9"),
        str(tmp_path / "site/nvidia/cudnn/lib/libcudnn.so.9"),
    ]


def test_parts_behind_a_link_to_the_whole(tmp_path: Path, put: Put) -> None:
    real = put(tmp_path / "opt/cudnn", *CUDNN)
    (tmp_path / "given").mkdir()
    (tmp_path / "given/libcudnn.so.9").symlink_to(real / "libcudnn.so.9")
    found = search(places(tmp_path, directory=str(tmp_path / "given"), start_library_path=str(real)))
    assert chosen(found, "libcudnn.so.9") == str(tmp_path / "given/libcudnn.so.9")
    assert folders_chosen(found, CUDNN[1:]) == {str(real)}


def test_the_major_of_cudnn_is_the_one_that_is_linked(tmp_path: Path, put: Put) -> None:
    needed = ("libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.8", "libcudart.so.12")  # 1.18.0
    put(tmp_path / "given", "libcudnn.so.9", "libcudnn.so.8", "libcudnn_ops_infer.so.8", "libcudnn_ops.so.9")
    found = search(places(tmp_path, directory=str(tmp_path / "given")), needed, 12)
    assert found["libcudnn.so.8"].required
    assert chosen(found, "libcudnn.so.8") == str(tmp_path / "given/libcudnn.so.8")
    assert chosen(found, "libcudnn_ops_infer.so.8")
    assert "libcudnn.so.9" not in found
    assert reasons(found["libcudnn.so.8"]) == {
        str(tmp_path / "given/libcudnn.so.9"): "is libcudnn.so.9, libcudnn.so.8 is needed"
    }


# What is passed over, and why


def test_another_major(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "given", "libcublas.so.12", "libcublas.so.11")
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["libcublas.so.13"]
    assert found.chosen is None
    assert reasons(found) == {
        str(tmp_path / f"given/libcublas.so.{n}"): f"is libcublas.so.{n}, libcublas.so.13 is needed" for n in (11, 12)
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
    assert judge_file(str(path), "libcublas.so.13", alias) is None
    assert judge_file(str(path), "libcublas.so.13", "a machine that is not known") is None


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


# The places of a process

CHILD = """
import json, os, sys
from ortgpu.environment.libraries import places_for, resolve
from ortgpu.environment.wheel import ProviderLibrary
provider = ProviderLibrary("p.so", None, tuple(json.loads(sys.argv[1])), ("/rpath",), None)
{code}
places = places_for(provider, None)
found = {{one.soname: one.chosen.path for one in resolve(places, provider.needed, 13) if one.chosen}}
print(json.dumps([places.start_library_path, found]))
"""


def child(code: str, *, needed: Sequence[str] = NEEDED, **environment: str | None) -> tuple[str, dict[str, str]]:
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(code=code), json.dumps(needed)],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, found = json.loads(done.stdout)
    return path, found


def test_the_library_path_is_the_one_at_start(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "libraries", "libcublas.so.4")
    needed = ["libcublas.so.4"]
    at_start, found = child("del os.environ['LD_LIBRARY_PATH']", needed=needed, LD_LIBRARY_PATH=str(folder))
    assert at_start == str(folder)
    assert found["libcublas.so.4"] == str(folder / "libcublas.so.4")
    at_start, found = child(f"os.environ['LD_LIBRARY_PATH'] = {str(folder)!r}", needed=needed, LD_LIBRARY_PATH=None)
    assert at_start == ""
    assert "libcublas.so.4" not in found


def test_a_library_that_python_has_opened_is_loaded_already(tmp_path: Path, put: Put) -> None:
    folder = put(tmp_path / "libraries", "libcublas.so.4")
    code = f"import ctypes; ctypes.CDLL({str(folder / 'libcublas.so.4')!r})"
    _, found = child(code, needed=["libcublas.so.4"])
    assert found["libcublas.so.4"] == str(folder / "libcublas.so.4")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """As in a service whose release folder was replaced: relative places are nowhere, and that is all."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"sys.path.insert(0, ''); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.environ['CUDA_HOME'] = 'cuda'"
    at_start, _ = child(code, LD_LIBRARY_PATH="lib:./other")
    assert at_start == "lib:./other"


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (Torch("2.9.0+cu130", (13, 0), "/torch"), "/torch"),
        (Torch("2.9.0+cu128", (12, 8), "/torch"), None),
        (Torch("2.9.0+cpu", None, "/torch"), None),
        (None, None),
    ],
    ids=["same major", "another major", "CPU", "no torch"],
)
def test_only_a_torch_of_the_same_major(torch: Torch | None, expected: str | None) -> None:
    provider = ProviderLibrary("p.so", None, NEEDED, ("/rpath",), None)
    found = places_for(provider, torch, "/given")
    assert (found.torch_folder, found.directory) == (expected, "/given")
    assert found.provider_search_path == ("/rpath",)
    assert (found.sys_path, found.machine, found.filesystem) == (tuple(sys.path), MACHINE, Path("/"))


def test_what_is_installed_here_is_found() -> None:
    files = importlib.metadata.files("onnxruntime-gpu") or []
    (path,) = [str(file.locate()) for file in files if file.name == "libonnxruntime_providers_cuda.so"]
    provider = read_provider(path)
    assert provider.cuda_major is not None
    found = resolve(places_for(provider, None), provider.needed, provider.cuda_major)
    required = [one for one in found if one.required]
    assert {one.soname for one in required} == {soname for soname in provider.needed if spec_for(soname)}
    assert [one.soname for one in required if one.chosen is None] == []
    assert len({one.chosen.root for one in required if one.chosen}) == 1
    assert next(one for one in found if one.spec.stem == "libcudnn_cnn").chosen is not None


# The loader's cache


def loader_cache(
    entries: Mapping[str, str], *, flags: int = 0x0303, before: bytes = b"", count: int | None = None
) -> bytes:
    """What ldconfig writes: dl-cache.h, struct cache_file_new."""
    strings, table = b"", b""
    start = 48 + 24 * len(entries)
    for name, path in entries.items():
        key = start + len(strings)
        strings += os.fsencode(name) + b"\0"
        table += struct.pack("<IIIIQ", flags, key, start + len(strings), 0, 0)
        strings += os.fsencode(path) + b"\0"
    number = len(entries) if count is None else count
    header = b"glibc-ld.so.cache1.1" + struct.pack("<II", number, len(strings)).ljust(28, b"\0")
    return before + header + table + strings


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
