"""The lab's driver and NVML answer what a test tells them to."""

from __future__ import annotations

import pytest

from tests.lab import GPU, NVML, Cuda
from tests.lab.fixtures import Lab

H200 = GPU(uuid="GPU-11111111-2222-3333-4444-555555555555", name="NVIDIA H200", capability=(9, 0))
PASCAL = GPU(uuid="GPU-aaaaaaaa-2222-3333-4444-555555555555", name="Tesla P4", capability=(6, 1), total=8 << 30)


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
    seen = machine.run_program("report(devices())", behind="machines lab.driver").ok().json
    assert (seen if isinstance(seen, int) else [device[0] for device in seen]) == names
    if visible == "GPU-aaaa":
        assert seen == [["Tesla P4", PASCAL.uuid[4:].replace("-", ""), 6, 1, 8 << 30]]


def test_the_stub_driver_fails_as_it_is_told(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(init=803, version=12080))
    code = "version = c_int(); cu.cuDriverGetVersion(byref(version)); report([devices(), version.value])"
    assert machine.run_program(code, behind="machines lab.driver").ok().json == [803, 12080]


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
    seen = machine.run_program(
        "report([look(), pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2(),"
        f"pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID({busy.uuid!r}))])",
        behind="machines lab.nvml",
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
    seen = lab.machine(nvml=nvml).run_program(
        "try:\n    look()\nexcept pynvml.NVMLError as error:\n    report(error.value)", behind="machines lab.nvml"
    )
    assert seen.ok().json == code
