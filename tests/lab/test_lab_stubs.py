"""The lab's driver and NVML answer what a test tells them to."""

from __future__ import annotations

import pytest

from tests.lab import GPU, NVML, Cuda
from tests.lab.fixtures import Lab

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))
PASCAL = GPU(uuid="GPU-aaaaaaaa-2222-3333-4444-555555555555", name="Tesla P4", capability=(6, 1), total=8 << 30)


CU = """
import ctypes
from ctypes import byref, c_int, c_size_t
cu = ctypes.CDLL("libcuda.so.1")
def devices():
    count = c_int()
    state = cu.cuInit(0) or cu.cuDeviceGetCount(byref(count))
    if state:
        return state
    found = []
    for ordinal in range(count.value):
        name, uuid = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)()
        major, minor, size = c_int(), c_int(), c_size_t()
        assert not cu.cuDeviceGetName(name, 96, ordinal)
        assert not cu.cuDeviceGetUuid_v2(uuid, ordinal)
        assert not cu.cuDeviceComputeCapability(byref(major), byref(minor), ordinal)
        assert not cu.cuDeviceTotalMem_v2(byref(size), ordinal)
        found.append([name.value.decode(), bytes(uuid).hex(), major.value, minor.value, size.value])
    return found
"""


@pytest.mark.parametrize(
    ("visible", "order", "names"),
    [
        (None, None, ["NVIDIA H200", "Tesla P4"]),
        (None, "PCI_BUS_ID", ["Tesla P4", "NVIDIA H200"]),
        ("1", "PCI_BUS_ID", ["NVIDIA H200"]),
        ("1,0", None, ["Tesla P4", "NVIDIA H200"]),
        ("GPU-aaaa", None, ["Tesla P4"]),
        ("0,7,1", None, ["NVIDIA H200"]),
        ("", None, 100),
        ("-1", None, 100),
    ],
)
def test_the_stub_driver_shows_its_devices(
    lab: Lab, visible: str | None, order: str | None, names: list[str] | int
) -> None:
    machine = lab.machine(
        cuda=Cuda(devices=(PASCAL, H200)), env={"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    )
    seen = machine.run(f"{CU}report(devices())").ok().json
    assert (seen if isinstance(seen, int) else [device[0] for device in seen]) == names
    if visible == "GPU-aaaa":
        assert seen == [["Tesla P4", PASCAL.uuid[4:].replace("-", ""), 6, 1, 8 << 30]]


def test_the_stub_driver_fails_as_it_is_told(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(init=803, version=12080))
    code = f"{CU}version = c_int(); cu.cuDriverGetVersion(byref(version)); report([devices(), version.value])"
    assert machine.run(code).ok().json == [803, 12080]


NVML_LOOK = """
import pynvml
def look():
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            mig = pynvml.nvmlDeviceGetMigMode(handle)[0]
        except pynvml.NVMLError_NotSupported:
            mig = None
        found.append({
            "uuid": pynvml.nvmlDeviceGetUUID(handle), "name": pynvml.nvmlDeviceGetName(handle),
            "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
            "memory": [memory.total, memory.free, memory.used],
            "mode": pynvml.nvmlDeviceGetComputeMode(handle), "mig": mig,
            "bus": pynvml.nvmlDeviceGetPciInfo(handle).busId,
            "processes": [[p.pid, p.usedGpuMemory] for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
            "migs": [
                pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))
                for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if i < 2 and mig
            ],
        })
    return found
"""


def test_the_real_nvml_binding_reads_the_stub(lab: Lab) -> None:
    busy = GPU(
        uuid="GPU-22222222-2222-3333-4444-555555555555",
        name="NVIDIA A100",
        capability=(8, 0),
        total=100,
        free=40,
        compute_mode=3,
        mig=True,
        mig_uuids=("MIG-1", "MIG-2"),
        processes=((7, 20), (8, 30)),
    )
    machine = lab.machine(nvml=NVML(gpus=(H200, busy), driver="575.1", cuda=12090))
    seen = machine.run(
        f"{NVML_LOOK}report([look(), pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2(),"
        f"pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID({busy.uuid!r}))])"
    ).ok()
    gpus, driver, cuda, name = seen.json
    assert (driver, cuda, name) == ("575.1", 12090, "NVIDIA A100")
    assert gpus[0]["uuid"] == H200.uuid
    assert gpus[0]["mig"] is None
    assert gpus[1] == {
        "uuid": busy.uuid,
        "name": "NVIDIA A100",
        "capability": [8, 0],
        "memory": [100, 40, 60],
        "mode": 3,
        "mig": 1,
        "bus": "00000000:02:00.0",
        "processes": [[7, 20], [8, 30]],
        "migs": ["MIG-1", "MIG-2"],
    }


@pytest.mark.parametrize(
    ("nvml", "code"),
    [(NVML(init=9), 9), (NVML(init=18), 18), (NVML(error=999), 999), (None, 12)],
    ids=["driver-not-loaded", "version-mismatch", "unknown", "absent"],
)
def test_the_stub_nvml_fails_as_it_is_told(lab: Lab, nvml: NVML | None, code: int) -> None:
    seen = lab.machine(nvml=nvml).run(
        f"{NVML_LOOK}\ntry:\n    look()\nexcept pynvml.NVMLError as error:\n    report(error.value)"
    )
    assert seen.ok().json == code
