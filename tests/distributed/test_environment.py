"""Facts about distributed training: MPI, NCCL, network, packages; from stub programs, made files and real text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from ortgpu.cli import findings
from ortgpu.distributed.environment import (
    InfinibandPort,
    Interface,
    MpiVersion,
    Network,
    find_mpirun,
    parse_launcher_version,
    parse_rate,
    read_build_variables,
    read_mpi,
    read_nccl,
    read_network,
    read_training_packages,
)
from ortgpu.environment.libraries.places import LINUX, SearchPlaces
from tests.lab import Stubs
from tests.support.made_files import package, program, write

# MPI


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI 4.1.8"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI 5.0.11"),
        (
            "HYDRA build details:\n    Version:                                 4.0.3\n"
            "    Release Date:                            Tue Nov  8 09:51:06 CST 2022\n",
            "MPICH 4.0.3",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121\n", "Intel MPI 2021.14"),
        ("mpirun 1.0\n", "None"),
        ("", "None"),
    ],
)
def test_what_a_launcher_says_of_itself(text: str, expected: str) -> None:
    assert str(parse_launcher_version(text)) == expected


def test_launcher_of_path_comes_before_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment/python"))
    assert find_mpirun() is None
    beside = program(tmp_path / "environment/mpiexec", "exit 0")
    assert find_mpirun() == str(beside)
    first = program(tmp_path / "path/mpirun", "exit 0")
    assert find_mpirun() == str(first)


MPI4PY = "__version__ = '9.9'\nclass rc:\n    initialize = True\n"


def stub_mpi4py(folder: Path, mpi: str) -> None:
    write(folder, {"mpi4py/__init__.py": MPI4PY, "mpi4py/MPI.py": mpi})
    package(folder, "mpi4py")


def test_library_of_mpi4py_is_asked_without_starting_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(
        tmp_path, "import mpi4py\nassert not mpi4py.rc.initialize\ndef get_vendor(): return 'MPICH', (5, 0, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/mpirun", "echo 'mpirun (Open MPI) 4.1.8'").parent))
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    found = read_mpi()
    assert (found.launcher, found.library) == (MpiVersion("Open MPI", (4, 1, 8)), MpiVersion("MPICH", (5, 0, 2)))
    assert (found.mpi4py, found.error) == ("9.9", None)
    assert found.settings["OMPI_MCA_pml"] == "ob1"


def test_mpi4py_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cannot load MPI library\\nlibmpi.so.40: cannot open shared object file"
    stub_mpi4py(tmp_path, f"raise RuntimeError('{text}')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_mpi()
    assert (found.mpi4py, found.library) == ("9.9", None)
    assert (found.error or "").splitlines() == [
        "RuntimeError: " + line if n == 0 else line for n, line in enumerate(text.split("\\n"))
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import a_missing_module", "ModuleNotFoundError: No module named 'a_missing_module'"),
        ("", "AttributeError: module 'mpi4py' has no attribute '__version__'"),
        ("import os; os._exit(1)", "no answer"),
        ("raise ModuleNotFoundError(name='mpi4py')", None),
    ],
)
def test_a_damaged_mpi4py_is_not_absent(
    text: str, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To install it would change nothing, and its error says what is wrong."""
    write(tmp_path, {"mpi4py/__init__.py": text + "\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_mpi()
    assert (found.mpi4py, found.library, found.error) == (None, None, error)
    assert (findings._mpi(found)[1] == "no mpi4py") is (error is None)


def test_library_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(tmp_path, "import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_mpi(timeout=2.0).error == "no answer within 2 s"


def test_mpi4py_that_ends_its_process_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_mpi4py(tmp_path, "import os\nos._exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_mpi()
    assert (found.mpi4py, found.library, found.error) == ("9.9", None, "no answer")


def test_launcher_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin/mpirun", "exit 1").parent))
    found = read_mpi()
    assert found.mpirun == str(tmp_path / "bin/mpirun")
    assert found.launcher is None


# The network

CARD = {"type": "1\n", "operstate": "up\n", "device/vendor": "0x15b3\n"}


def machine(root: Path, **interfaces: Mapping[str, str]) -> Path:
    for name, files in interfaces.items():
        write(root / "sys/class/net" / name, files)
    return root


def test_interfaces_and_their_speed(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        lo={"type": "772\n", "operstate": "unknown\n"},
        eth0={**CARD, "speed": "100000\n"},
        eth1={**CARD, "operstate": "down\n", "speed": "-1\n"},
        docker0={"type": "1\n", "operstate": "unknown\n", "speed": "10000\n"},
        wlan0={**CARD},
    )
    assert read_network(root) == Network(
        (
            Interface("docker0", None, 10_000, virtual=True),
            Interface("eth0", True, 100_000, virtual=False),
            Interface("eth1", False, None, virtual=False),
            Interface("wlan0", True, None, virtual=False),
        ),
        (),
    )


@pytest.mark.parametrize("text", ["", "fast\n", "-1\n", "0\n", "99999999999999\n", "\udcff"], ids=repr)
def test_speed_that_says_nothing_is_unknown(text: str, tmp_path: Path) -> None:
    root = machine(tmp_path, eth0=CARD)
    (root / "sys/class/net/eth0/speed").write_bytes(text.encode("utf-8", "surrogateescape"))
    interfaces = read_network(root).interfaces
    assert interfaces is not None
    assert [card.speed for card in interfaces] == [None]


def test_infiniband_ports(tmp_path: Path) -> None:
    port = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n", "link_layer": "InfiniBand\n"}
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1", port)
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/10", {**port, "state": "1: DOWN\n"})
    write(
        tmp_path / "sys/class/infiniband/mlx5_1/ports/1", {"rate": "25 Gb/sec (1X EDR)\n", "link_layer": "Ethernet\n"}
    )
    machine(tmp_path, eth0=CARD)
    assert read_network(tmp_path).infiniband == (
        InfinibandPort("mlx5_0", 1, True, 200.0, "InfiniBand"),
        InfinibandPort("mlx5_0", 10, False, 200.0, "InfiniBand"),
        InfinibandPort("mlx5_1", 1, None, 25.0, "Ethernet"),
    )


def test_without_sysfs_nothing_is_known(tmp_path: Path) -> None:
    assert read_network(tmp_path) == Network(None, None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400 Gb/sec (4X NDR)\n", 400.0), ("2.5 Gb/sec (1X SDR)", 2.5), ("", None), (None, None), ("fast", None)],
)
def test_rate(text: str | None, rate: float | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.skipif(not Path("/sys/class/net").is_dir(), reason="sysfs tells which interfaces there are")
def test_this_machine_has_the_interfaces_that_the_kernel_lists() -> None:
    interfaces = read_network().interfaces
    assert interfaces is not None
    assert {card.name for card in interfaces} == set(os.listdir("/sys/class/net")) - {"lo", "bonding_masters"}


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
    found = read_nccl(
        places(
            tmp_path,
            sys_path=[tmp_path / "other", tmp_path / "site"],
            mapped=[wanted["already loaded"], tmp_path / "loaded/libnccl-net.so"],
            conda=tmp_path / "conda",
        )
    ).libraries
    sources = ["already loaded", "nvidia wheels", "conda", "system loader", "system loader"]
    assert [library.source for library in found] == sources
    assert [Path(library.path).resolve() for library in found] == list(wanted.values())


def test_no_nccl(tmp_path: Path) -> None:
    assert read_nccl(places(tmp_path)).chosen is None


def library(stubs: Stubs, folder: Path, body: str) -> Path:
    """A site-packages with a libnccl.so.2 of this C code."""
    target = folder / "nvidia/nccl/lib/libnccl.so.2"
    target.parent.mkdir(parents=True)
    shutil.copy(stubs.compile(f"{folder.name}-libnccl.so.2", body), target)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "version", "cuda"),
    [
        ("says", "NCCL version 2.21.5+cuda12.4", (2, 21, 5), (12, 4)),
        ("differs", "NCCL version 2.28.9 compiled with CUDA 13.0", None, None),
    ],
)
def test_library_is_read_and_not_loaded(
    name: str, text: str, version: tuple[int, ...] | None, cuda: tuple[int, ...] | None, stubs: Stubs, tmp_path: Path
) -> None:
    site = library(stubs, tmp_path / name, f'const char text[] = "NCCL version %s, but"; const char own[] = "{text}";')
    chosen = read_nccl(places(tmp_path, sys_path=[site])).chosen
    assert chosen is not None
    assert (chosen.version, chosen.cuda_version) == (version, cuda)
    assert chosen.path not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_library_that_is_no_library(tmp_path: Path) -> None:
    write(tmp_path, {"nvidia/nccl/lib/libnccl.so.2": "text"})
    chosen = read_nccl(places(tmp_path, sys_path=[tmp_path])).chosen
    assert chosen is not None
    assert (chosen.version, chosen.cuda_version) == (None, None)


# Packages, variables of a build


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
    lost = {one.leads_there for one in read_build_variables({"CUDA_HOME": "/nowhere", "CUDACXX": "/nowhere/nvcc"})}
    assert lost == {False, None}
