"""How wheels, toolkits and variables lay libraries out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.library_search.trees import (
    CUDNN,
    LAZY,
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
    found = search(replace(where, variables=variables))
    assert folders_chosen(found) == {str(tmp_path / "site/nvidia/cu13/lib")}


def test_an_interpreter_that_is_not_condas(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "python/lib", *TOOLKIT)
    assert search(places(tmp_path))["libcublas.so.13"].chosen is None
