"""The search on Windows, over prepared trees. It runs on any system: it depends on files and what it is given alone."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ortgpu.environment.libraries import places as library_places
from ortgpu.environment.libraries.search import find_roots, resolve
from tests.library_search.trees import Place, chosen, reasons
from tests.support.made_dlls import ARM64, I386, dll, put
from tests.windows.trees import (
    ALL,
    CUDNN,
    LAZY,
    NEEDED,
    NEEDED_12,
    ORDER,
    TOOLKIT,
    TOOLKITS,
    folders_chosen,
    places,
    prepare,
    search,
)

# The documented order


@pytest.mark.parametrize("place", ORDER, ids=lambda place: place.folder)
def test_each_place_alone(place: Place, tmp_path: Path) -> None:
    found = search(prepare(tmp_path, place))
    for name in ALL:
        candidate = found[name].chosen
        assert candidate is not None, name
        assert (candidate.source, candidate.path) == (place.source, str(tmp_path / place.folder / name))
        assert candidate.problem is None
    assert {name for name, one in found.items() if one.required} == set(TOOLKIT)


@pytest.mark.parametrize("number", range(len(ORDER) - 1), ids=lambda n: ORDER[n].folder)
def test_each_place_before_the_next(number: int, tmp_path: Path) -> None:
    earlier, later = ORDER[number : number + 2]
    assert folders_chosen(search(prepare(tmp_path, later, earlier)), ALL) == {str(tmp_path / earlier.folder)}


def test_the_whole_order(tmp_path: Path) -> None:
    candidates = search(prepare(tmp_path, *ORDER, names=CUDNN[:1]))["cudnn64_9.dll"].candidates
    assert [c.path for c in candidates] == [str(tmp_path / place.folder / "cudnn64_9.dll") for place in ORDER]


def test_the_order_is_the_documented_one() -> None:
    documented = re.findall(r"^\d\. (.*)", (library_places.__doc__ or "").partition("On Windows")[2], re.MULTILINE)
    keywords = (
        *("already loaded", "caller's directory", "torch", "``nvidia``", "conda", "CUDA_HOME", "system loader"),
        "has loaded from elsewhere",
    )
    assert [key in line for key, line in zip(keywords, documented, strict=True)] == [True] * len(keywords)


def test_nothing_anywhere(tmp_path: Path) -> None:
    where = places(tmp_path)
    assert list(find_roots(where, 13)) == []
    assert all(one.chosen is None and one.rejected == () for one in search(where).values())


def test_what_no_provider_for_windows_opens_is_not_looked_for(tmp_path: Path) -> None:
    assert "curand64_10.dll" not in search(places(tmp_path))
    assert "curand64_10.dll" in search(places(tmp_path), (*NEEDED, "curand64_10.dll"))


# Layouts


def test_wheels_for_cuda_12(tmp_path: Path) -> None:
    layout = {
        "cublas": ("cublas64_12.dll", "cublasLt64_12.dll"), "cuda_runtime": ("cudart64_12.dll",),
        "cufft": ("cufft64_11.dll",), "cuda_nvrtc": ("nvrtc64_120_0.dll", "nvrtc64_120_0.alt.dll"),
        "nvjitlink": ("nvJitLink_120_0.dll",), "cudnn": CUDNN,
    }  # fmt: skip
    for component, names in layout.items():
        put(tmp_path / "site/nvidia" / component / "bin", *names)
    found = search(places(tmp_path, sys_path=(str(tmp_path / "site"),)), NEEDED_12, 12)
    for component, names in layout.items():
        for name in names:
            if ".alt." not in name:
                assert chosen(found, name) == str(tmp_path / "site/nvidia" / component / "bin" / name)
    assert [c.path for c in found["nvrtc64_120_0.dll"].candidates] == [
        str(tmp_path / "site/nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll")
    ]


def test_wheels_for_cuda_13_and_cudnn_beside_them(tmp_path: Path) -> None:
    put(tmp_path / "site/nvidia/cu13/bin/x86_64", *TOOLKIT, *LAZY)
    put(tmp_path / "site/nvidia/cudnn/bin", *CUDNN)
    found = search(places(tmp_path, sys_path=(str(tmp_path / "site"),)))
    assert folders_chosen(found, (*TOOLKIT, *LAZY)) == {str(tmp_path / "site/nvidia/cu13/bin/x86_64")}
    assert folders_chosen(found, CUDNN) == {str(tmp_path / "site/nvidia/cudnn/bin")}
    assert {c.root for one in found.values() for c in one.candidates} == {str(tmp_path / "site/nvidia")}


@pytest.mark.parametrize("given", ["site/nvidia", "site/nvidia/cudnn", "site/nvidia/cudnn/bin"])
def test_a_folder_of_wheels_as_the_directory(given: str, tmp_path: Path) -> None:
    put(tmp_path / "site/nvidia/cudnn/bin", *CUDNN)
    found = search(places(tmp_path, directory=str(tmp_path / given)))
    assert folders_chosen(found, CUDNN) == {str(tmp_path / "site/nvidia/cudnn/bin")}


def test_a_cudnn_for_another_cuda_is_told_and_not_taken(tmp_path: Path) -> None:
    """NVIDIA's installer puts one for each CUDA into one folder, all by the same names."""
    cudnn = tmp_path / "Program Files/NVIDIA/CUDNN/v9.14/bin"
    put(cudnn / "12.9", *CUDNN)
    found = search(places(tmp_path))["cudnn64_9.dll"]
    assert found.chosen is None
    assert reasons(found) == {str(cudnn / "12.9/cudnn64_9.dll"): "is for CUDA 12.9, CUDA 13 is needed"}
    put(cudnn / "13.0", *CUDNN)
    for major, folder in ((13, "13.0"), (12, "12.9")):
        assert folders_chosen(search(places(tmp_path), cuda_major=major), CUDNN) == {str(cudnn / folder)}
    where = places(tmp_path, variables={"CUDNN_PATH": str(cudnn.parent), "PATH": str(cudnn / "13.0")})
    assert folders_chosen(search(where), CUDNN) == {str(cudnn / "13.0")}


def test_the_newest_toolkit_of_the_right_major_whatever_cuda_path_says(tmp_path: Path) -> None:
    """Several toolkits, of which the one that was installed last has CUDA_PATH: row W06 of the corpus."""
    for name, major in (("v12.9", 12), ("v13.0", 13), ("v13.2", 13), ("v13.10", 13)):
        put(tmp_path / TOOLKITS / name / "bin", f"cublas64_{major}.dll", f"cublasLt64_{major}.dll")
    twelve = tmp_path / TOOLKITS / "v12.9"
    where = places(tmp_path, variables={"CUDA_PATH": str(twelve), "PATH": f"{twelve / 'bin'};C:\\Tools"})
    found = search(where)
    assert folders_chosen(found) == {str(tmp_path / TOOLKITS / "v13.10/bin")}
    assert reasons(found["cublas64_13.dll"]) == {
        str(twelve / "bin/cublas64_12.dll"): "is cublas64_12.dll, cublas64_13.dll is needed"
    }
    assert folders_chosen(search(where, NEEDED_12, 12), ("cublas64_12.dll",)) == {str(twelve / "bin")}


def test_names_differ_in_case_only(tmp_path: Path) -> None:
    put(tmp_path / "given", "CUBLAS64_13.DLL", "cublaslt64_13.dll", "nvjitlink_130_0.dll")
    found = search(places(tmp_path, directory=str(tmp_path / "given")), ("CUBLAS64_13.dll", "CUBLASLT64_13.DLL"))
    assert chosen(found, "cublas64_13.dll") == str(tmp_path / "given/CUBLAS64_13.DLL")
    assert chosen(found, "cublasLt64_13.dll") == str(tmp_path / "given/cublaslt64_13.dll")
    assert chosen(found, "nvJitLink_130_0.dll") == str(tmp_path / "given/nvjitlink_130_0.dll")


# What is passed over


def test_another_major(tmp_path: Path) -> None:
    folder = put(tmp_path / "given", "cublas64_12.dll", "cublas64_11.dll", "cudart64_110.dll", "cudart32_110.dll")
    found = search(places(tmp_path, directory=str(folder)))
    assert reasons(found["cublas64_13.dll"]) == {
        str(folder / f"cublas64_{n}.dll"): f"is cublas64_{n}.dll, cublas64_13.dll is needed" for n in (11, 12)
    }
    assert reasons(found["cudart64_13.dll"]) == {
        str(folder / "cudart64_110.dll"): "is cudart64_110.dll, cudart64_13.dll is needed"
    }


def test_another_major_under_a_false_name(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/cublas64_13.dll").write_bytes(dll("cublas64_12.dll"))
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["cublas64_13.dll"]
    assert list(reasons(found).values()) == ["its own name is cublas64_12.dll, cublas64_13.dll is needed"]


@pytest.mark.parametrize(("machine", "name"), [(I386, "i386"), (ARM64, "aarch64")])
def test_a_dll_for_another_machine(machine: int, name: str, tmp_path: Path) -> None:
    put(tmp_path / "given", "cublas64_13.dll", machine=machine)
    found = search(places(tmp_path, directory=str(tmp_path / "given")))["cublas64_13.dll"]
    assert list(reasons(found).values()) == [f"built for {name}, this is x86_64"]
    assert search(places(tmp_path, directory=str(tmp_path / "given"), machine={"i386": "x86"}.get(name, "ARM64")))[
        "cublas64_13.dll"
    ].chosen


def test_a_damaged_dll_gives_way_to_a_whole_one(tmp_path: Path) -> None:
    where = prepare(tmp_path, ORDER[1], ORDER[6])
    os.truncate(tmp_path / "given/cublas64_13.dll", 1500)
    found = search(where)["cublas64_13.dll"]
    assert found.chosen is not None
    assert found.chosen.source == "environment variable"
    assert str(reasons(found)[str(tmp_path / "given/cublas64_13.dll")]).startswith("truncated")
    assert [file.path for file in found.damaged] == [str(tmp_path / "given/cublas64_13.dll")]


def test_what_is_no_dll_at_all(tmp_path: Path) -> None:
    given = put(tmp_path / "given", "cublas64_13.dll")
    (given / "cublasLt64_13.dll").mkdir()
    (given / "cufft64_12.dll").write_text("version https://git-lfs.github.com/spec/v1")
    (given / "cudnn64_9.dll").touch()
    found = search(places(tmp_path, directory=str(given)))
    assert [*reasons(found["cublasLt64_13.dll"]).values(), *reasons(found["cufft64_12.dll"]).values()] == [
        "is a directory", "not a DLL"
    ]  # fmt: skip
    assert list(reasons(found["cudnn64_9.dll"]).values()) == ["empty file"]


# What belongs together


def test_the_rest_comes_from_where_the_loaded_one_is(tmp_path: Path) -> None:
    where = prepare(tmp_path, ORDER[2], ORDER[3])
    loaded = str(tmp_path / "torch/lib/cublasLt64_13.dll")
    found = search(replace(where, mapped=(loaded, str(tmp_path / "Windows/System32/ntdll.dll"))))
    assert found["cublasLt64_13.dll"].chosen is not None
    assert found["cublasLt64_13.dll"].chosen.source == "already loaded"
    assert folders_chosen(found) == {str(tmp_path / "torch/lib")}


def test_parts_of_cudnn_come_from_the_folder_of_the_whole_only(tmp_path: Path) -> None:
    put(tmp_path / "given", *CUDNN[:3])
    put(tmp_path / "site/nvidia/cudnn/bin", *CUDNN)
    found = search(places(tmp_path, directory=str(tmp_path / "given"), sys_path=(str(tmp_path / "site"),)))
    assert folders_chosen(found, CUDNN[:3]) == {str(tmp_path / "given")}
    assert found["cudnn_cnn64_9.dll"].candidates == ()


def test_dependencies_come_first(tmp_path: Path) -> None:
    order = [one.soname for one in resolve(places(tmp_path), NEEDED, 13)]
    assert order.index("cublasLt64_13.dll") < order.index("cublas64_13.dll")
    assert order.index("cudnn64_9.dll") < order.index("cudnn_graph64_9.dll") < order.index("cudnn_ops64_9.dll")


def test_a_cuda_that_came_later(tmp_path: Path) -> None:
    """The versions of what is opened on demand are those that are there."""
    put(tmp_path / "given", "cublas64_14.dll", "cublasLt64_14.dll", "cufft64_13.dll", "nvrtc64_140_0.dll", *CUDNN)
    found = search(places(tmp_path, directory=str(tmp_path / "given")), ("cublas64_14.dll", "cublasLt64_14.dll"), 14)
    assert {"cublas64_14.dll", "cufft64_13.dll", "nvrtc64_140_0.dll", "cudnn64_9.dll"} <= {
        name for name, one in found.items() if one.chosen
    }


def test_folders_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "given").symlink_to("given")
    (tmp_path / "file").write_bytes(b"")
    where = places(
        tmp_path,
        directory=str(tmp_path / "given"),
        sys_path=(str(tmp_path / "file"), "nul\0byte", ""),
        variables={"CUDA_PATH": "", "CUDA_HOME": str(tmp_path / "file"), "PATH": f";;{tmp_path / 'file'};"},
    )
    assert all(one.chosen is None for one in search(where).values())
