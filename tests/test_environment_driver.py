"""The driver, read from texts, prepared trees, and libraries that answer what a test tells them to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortgpu.environment.driver import (
    parse_cuda_number,
    parse_kernel_version,
    parse_library_version,
    parse_mapped_file,
)

LAB = Path(__file__).parent / "lab"
COMPILER = shutil.which("cc")
needs_stubs = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"),
    reason="needs Linux and a C compiler for the stub libraries",
)
# Prints what a probe returns as JSON; dataclasses become dictionaries and tuples lists.
PROLOGUE = """
import dataclasses, json, sys
from pathlib import Path
from ortgpu.environment import driver
def show(value):
    print(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value))
"""


def child(
    code: str, *, library: Path | None = None, module: Path | None = None, environ: Mapping[str, str] | None = None
) -> Any:
    """Run ``code`` in a process of its own, with stub libraries and modules in front; return the JSON it printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*([str(module)] if module else []), *sys.path]),
            "LD_LIBRARY_PATH": str(library or ""),
            **(environ or {}),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def build(folder: Path, name: str, source: Path | str) -> Path:
    assert COMPILER is not None
    file = source if isinstance(source, Path) else folder / f"{name}.c"
    if isinstance(source, str):
        file.write_text(source)
    target = folder / name
    subprocess.run([COMPILER, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", target, file], timeout=60, check=True)
    return target


# Texts


@pytest.mark.parametrize(
    ("text", "version"),
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
            "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n",
            "535.104.05",
            id="proprietary",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)"
            "\nGCC version:  gcc version 13.3.0\n",
            "580.65.06",
            id="open",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@mobile)",
            "540.4.0",
            id="jetson",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12\n", "390.157", id="two-parts"
        ),
        pytest.param("NVRM version: NVIDIA UNIX x86_64 Kernel Module\nGCC version:  gcc 11.4.0\n", None, id="absent"),
        pytest.param("", None, id="empty"),
    ],
)
def test_parse_kernel_version(text: str, version: str | None) -> None:
    assert parse_kernel_version(text) == version


@pytest.mark.parametrize(
    ("number", "version"),
    [(13000, (13, 0)), (12080, (12, 8)), (11040, (11, 4)), (0, None), (-1, None), (None, None), ("13000", None)],
)
def test_parse_cuda_number(number: object, version: tuple[int, int] | None) -> None:
    assert parse_cuda_number(number) == version


MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 100    /usr/bin/python3.11
7f0000000000-7f0000100000 r--p 00000000 fe:00 200    /usr/lib/wsl/drivers/nv.inf_amd64 1/libcuda.so.1.1
7f0000200000-7f0000300000 r-xp 00000000 fe:00 201    /usr/lib/wsl/lib/libcuda.so.1 (deleted)
7f0000400000-7f0000500000 r-xp 00000000 fe:00 202    /usr/lib/libcudart.so.13
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0      [stack]
7ffd00031000-7ffd00032000 rw-p 00000000 00:00 0
"""


@pytest.mark.parametrize(
    ("address", "path"),
    [
        pytest.param(0x7F0000200000, "/usr/lib/wsl/lib/libcuda.so.1", id="first-byte"),
        pytest.param(0x7F00002FFFFF, "/usr/lib/wsl/lib/libcuda.so.1", id="last-byte"),
        pytest.param(0x7F0000300000, "/usr/lib/wsl/drivers/nv.inf_amd64 1/libcuda.so.1.1", id="outside: by name"),
        pytest.param(None, "/usr/lib/wsl/drivers/nv.inf_amd64 1/libcuda.so.1.1", id="unknown: by name"),
    ],
)
def test_parse_mapped_file(address: int | None, path: str) -> None:
    assert parse_mapped_file(MAPS, "libcuda.so", address) == path


def test_parse_mapped_file_that_is_not_there() -> None:
    assert parse_mapped_file(MAPS, "libnvidia-ml.so") is None


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06", "580.65.06"),
        ("/usr/lib/libcuda.so.590.44", "590.44"),
        ("/usr/lib/wsl/lib/libcuda.so.1.1", None),
        ("/usr/lib/libcuda.so.1", None),
        ("libcuda.so.1", None),
        ("", None),
    ],
)
def test_parse_library_version(path: str, version: str | None) -> None:
    assert parse_library_version(path) == version


@given(st.text(max_size=200), st.integers(0, 1 << 64))
def test_any_text_is_parsed(text: str, address: int) -> None:
    parse_kernel_version(text)
    parse_kernel_version("NVRM version:" + text)
    parse_mapped_file(text, "libcuda.so", address)
    parse_mapped_file("0-ffffffffffffffffff r--p 0 0:0 1 /" + text, "libcuda.so", address)


# Files


def test_files_below_a_root(tmp_path: Path) -> None:
    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "dxg", "nvmap", "null", "nvme0"):
        (tmp_path / "dev" / name).touch()
    found = child(f"show(driver.read_driver(Path({str(tmp_path)!r})))")
    assert found["kernel_version"] == "550.54.14"
    assert found["device_nodes"] == ["/dev/dxg", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap"]
    found = child(f"show(driver.read_driver(Path({str(tmp_path / 'absent')!r})))")
    assert (found["kernel_version"], found["device_nodes"]) == (None, [])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="folders of Linux")
def test_a_driver_where_the_loader_does_not_look(tmp_path: Path) -> None:
    """Only where there is none that it finds: here one that cannot be loaded comes first."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    folder = tmp_path / "usr/local/nvidia/lib64"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").touch()
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").mkdir(parents=True)
    found = child(f"show(driver.read_driver(Path({str(tmp_path)!r})))", library=tmp_path)
    assert found["libcuda_elsewhere"] == ["/usr/local/nvidia/lib64/libcuda.so.1"]


NOBODY = 65534


def test_files_that_this_process_may_not_open(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name, mode in {"nvidia0": 0o600, "nvidia1": 0o000, "nvidiactl": 0o000, "nvidia-uvm": 0o666}.items():
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(mode)
    code = f"found = driver.read_driver(Path({str(tmp_path)!r}))"
    if os.getuid() == 0:  # whom no mode stops
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(0o755)
        os.chown(tmp_path / "dev" / "nvidia0", NOBODY, NOBODY)
        # Modules first: their files may be the user's alone.
        code = f"import grp, os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); {code}"
    refused = child(f"{code}\nshow([dataclasses.asdict(node) for node in found.refused_nodes])")
    group = (tmp_path / "dev" / "nvidia1").group()
    assert refused == [
        {"path": "/dev/nvidia1", "error": "EACCES", "group": group},
        {"path": "/dev/nvidiactl", "error": "EACCES", "group": group},
    ]


# libcuda

CUDA_SOURCE = """
#include <stdlib.h>
int cuInit(unsigned flags) { abort(); }
int cuDriverGetVersion(int *version) { *version = VERSION; return STATUS; }
"""


@needs_stubs
@pytest.mark.parametrize(
    ("version", "status", "expected"),
    [
        pytest.param(13000, 0, [13, 0], id="13.0"),
        pytest.param(12080, 0, [12, 8], id="12.8"),
        pytest.param(13000, 34, None, id="stub-of-the-toolkit"),
        pytest.param(0, 0, None, id="no-driver-behind-it"),
    ],
)
def test_libcuda_is_asked_and_not_initialised(
    tmp_path: Path, version: int, status: int, expected: list[int] | None
) -> None:
    source = CUDA_SOURCE.replace("VERSION", str(version)).replace("STATUS", str(status))
    library = build(tmp_path, "libcuda.so.1", source)
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["libcuda_error"]) == (os.path.realpath(library), None)
    assert found["cuda_version"] == expected


@needs_stubs
def test_the_driver_that_a_libcuda_belongs_to_and_how_it_was_found(tmp_path: Path) -> None:
    """The path is that of the file behind all links; what can be taken out of LD_LIBRARY_PATH is what is in there."""
    (tmp_path / "cuda-12.4").mkdir()
    (tmp_path / "cuda").symlink_to("cuda-12.4")
    build(
        tmp_path / "cuda-12.4", "libcuda.so.550.54.14", CUDA_SOURCE.replace("VERSION", "12040").replace("STATUS", "0")
    )
    (tmp_path / "cuda-12.4" / "libcuda.so.1").symlink_to("libcuda.so.550.54.14")
    code = "found = driver.read_driver(); show([found.libcuda, found.libcuda_version, found.libcuda_entry])"
    real = os.path.realpath(tmp_path / "cuda-12.4" / "libcuda.so.550.54.14")
    assert child(code, library=tmp_path / "cuda") == [real, "550.54.14", str(tmp_path / "cuda")]


@needs_stubs
def test_libcuda_without_the_function(tmp_path: Path) -> None:
    library = build(tmp_path, "libcuda.so.1", "int something_else;")
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["libcuda_error"], found["cuda_version"]) == (os.path.realpath(library), None, None)


@needs_stubs
def test_libcuda_is_told_from_another_of_its_name(tmp_path: Path) -> None:
    """As on WSL, where the library that the loader gives opens a second one from the driver store."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "store").mkdir()
    library = build(tmp_path / "lib", "libcuda.so.1", CUDA_SOURCE.replace("VERSION", "13000").replace("STATUS", "0"))
    other = build(tmp_path / "store", "libcuda.so.1.1", "int something_else;")
    for first, second in ((library, other), (other, library)):
        code = f"import ctypes; ctypes.CDLL({str(first)!r}); ctypes.CDLL({str(second)!r}); show(driver.read_driver())"
        assert child(code, library=library.parent)["libcuda"] == os.path.realpath(library)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader's words are those of Linux")
def test_libcuda_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    found = child("show(driver.read_driver())", library=tmp_path)
    assert (found["libcuda"], found["cuda_version"]) == (None, None)
    assert "libcuda.so.1" in found["libcuda_error"]


# As PyInstaller 6 does it in the programs that it makes (pyimod03_ctypes.py).
FROZEN = """
import ctypes

class Guessing(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        try:
            super().__init__(name, *args, **kwargs)
        except Exception as error:
            raise OSError(f"Failed to load dynlib/dll {name!r}. Most likely it was not found at freezing") from error

ctypes.CDLL = Guessing
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader's words are those of Linux")
def test_the_loaders_own_words_in_a_frozen_program(tmp_path: Path) -> None:
    """The driver is never bundled, and what judges the words looks for the loader's."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    plain = child("show(driver.read_driver())", library=tmp_path)["libcuda_error"]
    assert child(FROZEN + "show(driver.read_driver())", library=tmp_path)["libcuda_error"] == plain


# NVML through the real nvidia-ml-py


@dataclass(frozen=True)
class Nvml:
    folder: Path

    def show(self, code: str, **environ: str) -> Any:
        return child(code, library=self.folder, environ=environ)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Nvml:
    folder = tmp_path_factory.mktemp("nvml")
    build(folder, "libnvidia-ml.so.1", LAB / "libnvidia_ml_stub.c")
    return Nvml(folder)


GPUS = (
    "uuid=GPU-a|name=NVIDIA H200|capability=9.0|total=1000|free=400|mode=3|mig=0|processes=11:70,12:80;"
    "uuid=GPU-b|name=NVIDIA A100|capability=8.0|total=2000|free=2000|mig=1|migs=MIG-x,MIG-y"
)


@needs_stubs
def test_every_gpu(nvml: Nvml) -> None:
    found = nvml.show("show(driver.read_nvml())", STUB_NVML_GPUS=GPUS, STUB_NVML_CUDA="12080", CUDA_VISIBLE_DEVICES="1")
    gpus = found.pop("gpus")
    assert found == {
        "available": True,
        "error": None,
        "code": None,
        "driver_version": "580.65.06",
        "cuda_version": [12, 8],
    }
    assert gpus[0] == {
        "index": 0,
        "uuid": "GPU-a",
        "name": "NVIDIA H200",
        "compute_capability": [9, 0],
        "memory_total": 1000,
        "memory_free": 400,
        "compute_mode": "exclusive-process",
        "mig_enabled": False,
        "mig_uuids": [],
        "pci_bus_id": "00000000:01:00.0",
    }
    assert (gpus[1]["uuid"], gpus[1]["mig_enabled"], gpus[1]["mig_uuids"]) == ("GPU-b", True, ["MIG-x", "MIG-y"])
    assert gpus[1]["compute_mode"] == "default"


@needs_stubs
def test_no_gpu_is_not_unavailable(nvml: Nvml) -> None:
    found = nvml.show("show(driver.read_nvml())", STUB_NVML_GPUS="")
    assert (found["available"], found["error"], found["gpus"]) == (True, None, [])


@needs_stubs
@pytest.mark.parametrize(("code", "words"), [("9", "Driver Not Loaded"), ("18", "NVML/RM version mismatch")])
def test_nvml_that_does_not_start(nvml: Nvml, code: str, words: str) -> None:
    found = nvml.show("show(driver.read_nvml())", STUB_NVML_INIT=code)
    assert words in found.pop("error")
    assert found == {"available": False, "code": int(code), "driver_version": None, "cuda_version": None, "gpus": []}


@needs_stubs
def test_a_gpu_that_is_lost_is_there_all_the_same(nvml: Nvml) -> None:
    found = nvml.show("show(driver.read_nvml())", STUB_NVML_GPUS="uuid=GPU-a;uuid=GPU-b|handle=15")
    assert (found["available"], found["error"], found["code"]) == (True, "GPU is lost", 15)
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-a", None]


@needs_stubs
def test_nvml_that_answers_nothing(nvml: Nvml) -> None:
    found = nvml.show("show(driver.read_nvml())", STUB_NVML_GPUS=GPUS, STUB_NVML_ERROR="999")
    assert (found["available"], found["driver_version"], found["gpus"]) == (False, None, [])
    assert found["error"]


@needs_stubs
def test_memory_and_processes(nvml: Nvml) -> None:
    ask = "show([driver.read_gpu_memory(sys.argv[1]), sorted(driver.processes_on(sys.argv[1]).items())])"
    for uuid, expected in (
        ("GPU-a", [[400, 1000], [[11, 70], [12, 80]]]),
        ("GPU-b", [[2000, 2000], []]),
        ("MIG-x", [[1000, 1000], []]),
        ("GPU-none", [None, []]),
    ):
        assert nvml.show(f"sys.argv = ['', {uuid!r}];" + ask, STUB_NVML_GPUS=GPUS) == expected
    assert nvml.show("sys.argv = ['', 'GPU-a'];" + ask, STUB_NVML_INIT="9") == [None, []]


@needs_stubs
def test_nvml_is_shut_down_again_and_can_be_asked_again(nvml: Nvml) -> None:
    code = """
import pynvml
first = driver.read_nvml()
assert driver.read_nvml() == first
driver.read_gpu_memory("GPU-none")
try:
    pynvml.nvmlDeviceGetCount()
except pynvml.NVMLError_Uninitialized:
    show("shut down")
"""
    assert nvml.show(code, STUB_NVML_GPUS=GPUS) == "shut down"


@needs_stubs
def test_somebody_elses_use_of_nvml_goes_on(nvml: Nvml) -> None:
    code = "import pynvml; pynvml.nvmlInit(); driver.read_nvml(); show(pynvml.nvmlDeviceGetCount())"
    assert nvml.show(code, STUB_NVML_GPUS=GPUS) == 2


# NVML through modules that are not what they should be


@pytest.mark.parametrize(
    ("source", "error"),
    [
        pytest.param("raise ImportError('broken')", "broken", id="import-fails"),
        pytest.param("raise ValueError", "ValueError", id="import-raises-anything"),
        pytest.param("", "nvmlInit", id="another-module-of-that-name"),
        pytest.param("def nvmlInit(): raise KeyError('x')", "'x'", id="init-raises-anything"),
        pytest.param("def nvmlInit(): pass", "nvmlDeviceGetCount", id="half-of-it"),
    ],
)
def test_a_broken_pynvml(tmp_path: Path, source: str, error: str) -> None:
    (tmp_path / "pynvml.py").write_text(source)
    code = """
nvml = driver.read_nvml()
show([nvml.available, nvml.error, driver.read_gpu_memory("GPU"), driver.processes_on("GPU")])
"""
    available, words, memory, processes = child(code, module=tmp_path)
    assert (available, memory, processes) == (False, None, {})
    assert error in words


OLD_PYNVML = """
class NVMLError(Exception): pass
class Memory: free, total = 3, 4
class Pci: busId = b"0000:01:00.0"
class Process:
    def __init__(self, pid, used): self.pid, self.usedGpuMemory = pid, used
def nvmlInit(): pass
def nvmlShutdown(): raise NVMLError("at the very end")
def nvmlSystemGetDriverVersion(): return b"470.1"
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetHandleByUUID(uuid): return 0
def nvmlDeviceGetUUID(handle): return b"GPU-%d" % handle
def nvmlDeviceGetName(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetPciInfo(handle): return Pci
def nvmlDeviceGetComputeMode(handle): return 77
def nvmlDeviceGetComputeRunningProcesses(handle): return [Process(5, 10), Process(5, 20), Process(6, None)]
"""


def test_each_field_is_unknown_on_its_own(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(OLD_PYNVML)
    found = child("show(driver.read_nvml())", module=tmp_path)
    assert (found["available"], found["driver_version"], found["cuda_version"]) == (True, "470.1", None)
    good, lost, last = found["gpus"]
    assert (good["uuid"], good["name"], good["pci_bus_id"], good["memory_free"]) == ("GPU-0", None, "0000:01:00.0", 3)
    assert (good["compute_mode"], good["compute_capability"], good["mig_enabled"]) == (None, None, None)
    assert (lost["index"], lost["uuid"]) == (1, None)
    assert last["uuid"] == "GPU-2"
    assert child("show(driver.processes_on('GPU-0'))", module=tmp_path) == {"5": 30, "6": None}


def test_nothing_heavy_is_imported() -> None:
    code = """
driver.read_driver()
show(sorted({"onnxruntime", "torch", "onnx", "numpy", "rich"} & set(sys.modules)))
"""
    assert child(code) == []
