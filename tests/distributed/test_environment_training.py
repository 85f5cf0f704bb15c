"""Facts about distributed training: NCCL, packages, Horovod, variables of a build; stub libraries and made files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from ortgpu.distributed.environment.nccl import find_nccl, parse_compiled_cuda, parse_version_number, read_nccl
from ortgpu.distributed.environment.training import (
    Horovod,
    TrainingPackages,
    read_build_variables,
    read_horovod,
    read_training_packages,
)
from ortgpu.environment.libraries.places import SearchPlaces
from ortgpu.environment.libraries.places_linux import LINUX
from tests.lab import Stubs
from tests.support.made_files import package, program, write

# NCCL


def places(
    folder: Path, *, sys_path: Iterable[Path] = (), mapped: Iterable[Path] = (), conda: Path | None = None
) -> SearchPlaces:
    return SearchPlaces(
        sys_path=tuple(map(str, sys_path)),
        variables={"CONDA_PREFIX": str(conda)} if conda else {},
        start_library_path=str(folder / "ld"),
        python_prefix=str(folder / "python"),
        machine="x86_64",
        mapped=tuple(map(str, mapped)),
        system=LINUX,
        filesystem=folder / "root",
    )


def test_copies_are_found_in_the_order_in_which_they_are_loaded(tmp_path: Path) -> None:
    wanted = {
        "already loaded": tmp_path / "loaded/libnccl.so.2",
        "nvidia wheels": tmp_path / "site/nvidia/nccl/lib/libnccl.so.2",
        "conda": tmp_path / "conda/lib/libnccl.so.2",
        "system loader": tmp_path / "ld/libnccl.so.2",
        "system": tmp_path / "root/usr/lib/libnccl.so.2",
    }
    for path in wanted.values():
        write(path.parent, {path.name: ""})
    again = tmp_path / "root/lib/libnccl.so.2"
    again.parent.mkdir()
    again.symlink_to(wanted["system"])
    found = find_nccl(
        places(
            tmp_path,
            sys_path=[tmp_path / "other", tmp_path / "site"],
            mapped=[wanted["already loaded"], tmp_path / "loaded/libnccl-net.so"],
            conda=tmp_path / "conda",
        )
    )
    sources = ["already loaded", "nvidia wheels", "conda", "system loader", "system loader"]
    assert [source for source, _ in found] == sources
    assert [Path(path).resolve() for _, path in found] == list(wanted.values())


def test_no_nccl(tmp_path: Path) -> None:
    assert read_nccl(places(tmp_path)).chosen is None


@pytest.mark.parametrize(
    ("number", "version"), [(22809, (2, 28, 9)), (20903, (2, 9, 3)), (2708, (2, 7, 8)), (2400, (2, 4, 0))]
)
def test_version_number(number: int, version: tuple[int, int, int]) -> None:
    assert parse_version_number(number) == version


def test_cuda_that_nccl_was_compiled_with() -> None:
    data = b"\0NCCL version %s, but\0NCCL version 2.28.9 compiled with CUDA 13.0\0NCCL version 2.28.9+cuda13.0\0more"
    assert parse_compiled_cuda(data) == (13, 0)
    assert parse_compiled_cuda(data[:60]) is None
    assert parse_compiled_cuda(b"") is None


def library(stubs: Stubs, folder: Path, body: str) -> Path:
    """A site-packages with a libnccl.so.2 of this C code."""
    target = folder / "nvidia/nccl/lib/libnccl.so.2"
    target.parent.mkdir(parents=True)
    shutil.copy(stubs.compile(f"{folder.name}-libnccl.so.2", body), target)
    return folder


def test_library_is_asked_in_a_child(stubs: Stubs, tmp_path: Path) -> None:
    body = 'const char text[] = "NCCL version 2.21.5+cuda12.4"; int ncclGetVersion(int *v) { *v = 22105; return 0; }'
    site = library(stubs, tmp_path / "works", body)
    chosen = read_nccl(places(tmp_path, sys_path=[site])).chosen
    assert chosen is not None
    assert (chosen.version, chosen.cuda_version, chosen.error) == ((2, 21, 5), (12, 4), None)
    assert chosen.path not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("refuses", "int ncclGetVersion(int *v) { (void)v; return 3; }", "ncclGetVersion: 3"),
        ("crashes", "int ncclGetVersion(int *v) { (void)v; __builtin_trap(); }", "ended with -"),
        ("another", "int other(void) { return 0; }", "undefined symbol: ncclGetVersion"),
    ],
)
def test_library_that_does_not_answer(name: str, body: str, says: str, stubs: Stubs, tmp_path: Path) -> None:
    chosen = read_nccl(places(tmp_path, sys_path=[library(stubs, tmp_path / name, body)])).chosen
    assert chosen is not None
    assert chosen.version is None
    assert says in (chosen.error or "")


def test_library_that_is_no_library(tmp_path: Path) -> None:
    write(tmp_path, {"nvidia/nccl/lib/libnccl.so.2": "text"})
    chosen = read_nccl(places(tmp_path, sys_path=[tmp_path])).chosen
    assert chosen is not None
    assert (chosen.version, chosen.cuda_version) == (None, None)
    assert "libnccl.so.2" in (chosen.error or "")


# Packages, Horovod, variables of a build


def test_first_of_a_name_counts(tmp_path: Path) -> None:
    package(tmp_path / "a", "onnx", version="1.17.0")
    package(tmp_path / "b", "onnx", version="1.23.2")
    package(tmp_path / "b", "h5py")
    package(tmp_path / "b", "unrelated")
    found = read_training_packages(None, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert [(one.name, one.version) for one in found.installed] == [("h5py", "9.9"), ("onnx", "1.17.0")]
    assert found.get("torch") is None
    assert found.api_folder is None


def test_training_api_is_a_package_in_the_folder_of_the_import(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime/training").mkdir(parents=True)
    assert read_training_packages(str(tmp_path / "onnxruntime"), []).api_folder is None
    write(tmp_path, {"onnxruntime/training/__init__.py": ""})
    assert read_training_packages(str(tmp_path / "onnxruntime"), []).api_folder == str(
        tmp_path / "onnxruntime/training"
    )


def horovod(folder: Path, util: str, monkeypatch: pytest.MonkeyPatch) -> Horovod | None:
    write(folder, {"horovod/__init__.py": "", "horovod/common/__init__.py": "", "horovod/common/util.py": util})
    package(folder, "horovod", version="0.28.1")
    monkeypatch.syspath_prepend(str(folder))
    return read_horovod(read_training_packages(None))


def test_horovod_says_what_it_was_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    util = "def nccl_built(verbose=False): return True\ndef mpi_built(verbose=False): return False\n"
    assert horovod(tmp_path, util, monkeypatch) == Horovod("0.28.1", True, False)


def test_horovod_that_cannot_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    util = "def nccl_built(verbose=False): raise RuntimeError('Failed to determine')\nmpi_built = nccl_built\n"
    assert horovod(tmp_path, util, monkeypatch) == Horovod("0.28.1", None, None, "RuntimeError: Failed to determine")


def test_no_horovod() -> None:
    assert read_horovod(TrainingPackages((), None)) is None


def test_variables_of_a_build_lead_somewhere_or_not(tmp_path: Path) -> None:
    nvcc = program(tmp_path / "cuda/bin/nvcc", "exit 0")
    write(tmp_path, {"cudnn/include/cudnn.h": "", "nccl/readme": ""})
    found = {
        variable.name: (variable.value, variable.leads_there)
        for variable in read_build_variables(
            {
                "CUDA_HOME": str(tmp_path / "cuda"),
                "CUDNN_HOME": str(tmp_path / "cudnn"),
                "CUDACXX": str(nvcc),
                "nccl_home": str(tmp_path / "nccl"),
                "ORT_CUDA_UNAVAILABLE": "1",
            }
        )
    }
    assert found == {
        "CUDA_HOME": (str(tmp_path / "cuda"), True),
        "CUDNN_HOME": (str(tmp_path / "cudnn"), True),
        "CUDACXX": (str(nvcc), True),
        "nccl_home": (str(tmp_path / "nccl"), False),
        "ORT_DISABLE_PYTHON_PACKAGE_LOCAL_VERSION": (None, None),
        "ORT_CUDA_UNAVAILABLE": ("1", None),
    }
    assert {one.leads_there for one in read_build_variables({"CUDA_HOME": "/nowhere", "CUDACXX": "\0"})} == {
        False,
        None,
    }
