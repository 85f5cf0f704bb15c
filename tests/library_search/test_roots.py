"""Libraries that belong together come from one place: the toolkit's from one root, cuDNN's parts from one folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.library_search.trees import (
    CUDNN,
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

# One root for the toolkit


def test_one_root_with_everything_before_an_earlier_one_with_a_part(tmp_path: Path, put: Put) -> None:
    where = prepare(tmp_path, put, ORDER[6], sonames=TOOLKIT)
    put(tmp_path / "given", "libcublas.so.13", "libcublasLt.so.13")
    found = search(replace(where, directory=str(tmp_path / "given")))
    assert folders_chosen(found) == {str(tmp_path / "home/lib64")}
    assert [c.source for c in found["libcublas.so.13"].candidates] == ["environment variable", "directory"]


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
    found = search(replace(where, directory=str(tmp_path / "given")))
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
    found = search(replace(where, mapped=(loaded,)))
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
    found = search(replace(where, mapped=(str(loaded),)))["libcublas.so.13"]
    assert found.chosen is not None
    assert found.chosen.source == "nvidia wheels"
    assert reasons(found) == {str(loaded): "is libcublas.so.12, libcublas.so.13 is needed"}


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
