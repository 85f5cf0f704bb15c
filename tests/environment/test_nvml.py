"""NVML: through a library that answers what a test tells it to, and modules that are not what they should be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.driver_child import build, child, needs_stubs

LAB = Path(__file__).parents[1] / "lab"

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
