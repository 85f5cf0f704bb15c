"""Which GPU a session names, and that it is the one it runs on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import child_environment
from tests.support.this_machine import GPUs

from .budgets import WAYS
from .children import Report, run_program

pytestmark = pytest.mark.ortgpu

CUDA = "CUDAExecutionProvider"
NOBODY = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def report(mlp: Path, gpus: GPUs) -> Report:
    """Every request of this file that needs no environment of its own, in one process."""
    first = gpus.visible[0]
    requests: dict[str, dict[str, Any]] = {
        "nothing": {},
        "index": {"device": 0},
        "cuda:0": {"device": "cuda:0"},
        "cuda": {"device": "cuda"},
        "uuid": {"device": first.uuid},
        "auto": {"device": "auto"},
        "device_id": {"providers": [[CUDA, {"device_id": "0"}]]},
        "both alike": {"device": "cuda:0", "providers": [[CUDA, {"device_id": "0"}]]},
        "contradiction": {"device": first.uuid, "providers": [[CUDA, {"device_id": "1"}]]},
        "index too large": {"device": 99},
        "cuda:99": {"device": "cuda:99"},
        "negative index": {"device": -1},
        "device_id too large": {"providers": [[CUDA, {"device_id": "99"}]]},
        "unknown uuid": {"device": NOBODY},
        "no device at all": {"device": "the fast one"},
    }
    return run_program("choose_devices", {"model": mlp, "requests": requests})


@pytest.mark.parametrize("request_name", ["nothing", "index", "cuda:0", "cuda", "uuid", "device_id", "both alike"])
def test_first_gpu(report: Report, gpus: GPUs, request_name: str) -> None:
    device = report.returned(request_name)
    if request_name == "nothing" or request_name == "cuda":
        expected = next(gpu for gpu in gpus.visible if gpu.uuid == device["uuid"])  # the choice is the library's
    else:
        expected = gpus.visible[0]
    assert (device["ordinal"], device["uuid"], device["name"]) == (expected.ordinal, expected.uuid, expected.name)
    assert device["providers"][0] == CUDA
    assert device["options"]["device_id"] == str(expected.ordinal)


def test_auto_is_one_of_them(report: Report, gpus: GPUs) -> None:
    device = report.returned("auto")
    assert device["uuid"] in {gpu.uuid for gpu in gpus.visible}
    assert device["options"]["device_id"] == str(device["ordinal"])


def test_facts_of_the_device(report: Report) -> None:
    device = report.returned("index")
    major, minor = device["compute_capability"]
    assert 3 <= major < 100
    assert 0 <= minor < 10
    assert device["total_memory"] > 2**30
    assert device["driver_version"][0].isdigit()
    assert device["is_gpu"] is True


@pytest.mark.parametrize("request_name", ["index too large", "cuda:99", "unknown uuid", "device_id too large"])
def test_a_gpu_that_is_not_there(report: Report, gpus: GPUs, request_name: str) -> None:
    error = report.error(request_name)
    assert error.type == "DeviceNotFoundError"
    assert error.is_a("LookupError")
    assert error.fields["requested"] is not None
    available = error.fields["available"]
    assert len(available) == len(gpus.visible)
    assert all(entry in error.text for entry in available)
    assert gpus.visible[0].uuid in error.text or gpus.visible[0].name in error.text


@pytest.mark.parametrize(("request_name", "quoted"), [("no device at all", "the fast one"), ("negative index", "-1")])
def test_what_names_no_device_anywhere(report: Report, request_name: str, quoted: str) -> None:
    error = report.error(request_name)
    assert error.is_a("GPUError")
    assert error.is_a("LookupError") or error.is_a("ValueError")
    assert quoted in error.text


def test_device_and_device_id_contradict_each_other(report: Report) -> None:
    error = report.error("contradiction")
    assert error.is_a("ProviderError") or error.is_a("DeviceError")


@pytest.mark.parametrize("value", ["", "-1", NOBODY])
def test_no_gpu_is_shown(mlp: Path, value: str) -> None:
    requests = {"any": {}, "first": {"device": 0}}
    env = child_environment({"CUDA_VISIBLE_DEVICES": value})
    report = run_program("choose_devices", {"model": mlp, "requests": requests}, env=env)
    error = report.error("any")
    assert error.type == "NoDeviceError"
    assert "CUDA_VISIBLE_DEVICES" in error.text
    assert report.error("first").type in ("NoDeviceError", "DeviceNotFoundError")


# With a second GPU


@pytest.fixture
def second(gpus: GPUs) -> str:
    """UUID of the second GPU."""
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    return gpus.visible[1].uuid


@pytest.mark.parametrize("device", [1, "cuda:1", None])
def test_second_gpu(mlp: Path, second: str, device: int | str | None) -> None:
    request = {"device": second if device is None else device}
    report = run_program("choose_devices", {"model": mlp, "requests": {"second": request}})
    facts = report.returned("second")
    assert (facts["ordinal"], facts["uuid"], facts["options"]["device_id"]) == (1, second, "1")


def test_visible_devices_renumber_the_second_gpu(mlp: Path, second: str) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": second})
    requests = {"index": {"device": 0}, "next": {"device": 1}}
    report = run_program("choose_devices", {"model": mlp, "requests": requests}, env=env)
    facts = report.returned("index")
    assert (facts["ordinal"], facts["uuid"], facts["options"]["device_id"]) == (0, second, "0")
    assert report.error("next").type == "DeviceNotFoundError"


@pytest.mark.usefixtures("second")
def test_visible_devices_in_another_order(mlp: Path, gpus: GPUs) -> None:
    swapped = [gpus.visible[1].uuid, gpus.visible[0].uuid]
    env = child_environment({"CUDA_VISIBLE_DEVICES": ",".join(swapped)})
    requests = {"0": {"device": 0}, "1": {"device": 1}}
    report = run_program("choose_devices", {"model": mlp, "requests": requests}, env=env)
    assert [report.returned(name)["uuid"] for name in requests] == swapped


def test_two_gpus_in_one_process(mlp: Path, gpus: GPUs, second: str) -> None:
    report = run_program("two_devices", {"model": mlp})
    assert report["first"]["uuid"] == gpus.visible[0].uuid
    assert report["second"]["uuid"] == second
    assert report["difference"] <= 1e-5


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(("current", "expected"), [(None, [0, 1]), (0, [0, 1]), (1, [1, 0])])
def test_a_rank_that_names_no_device(mlp: Path, current: int | None, expected: list[int]) -> None:
    """The ordinal, and how many warnings there were: one if the ranks of this host share the first GPU."""
    if current is not None and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed here")
    env = child_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    report = run_program("open_in_a_rank", {"model": mlp, "current": current}, env=env)
    assert report["found"] == {"nothing": expected, "device": [0, 0]}


@pytest.mark.usefixtures("second")
def test_the_second_gpu_logs_what_plain_onnxruntime_logs(mlp: Path) -> None:
    logged = []
    for is_plain in (True, False):
        report = run_program("open_on", {"model": mlp, "ordinal": 1, "is_plain": is_plain})
        assert report["providers"][0] == CUDA
        lines = re.findall(r"\[[WEF]:onnxruntime.*", report.child.stdout + report.child.stderr)
        logged.append(sorted(re.sub(r"\d+", "", line) for line in lines))
    assert logged[1] == logged[0]


@pytest.fixture(scope="module")
def in_one_thread(gpus: GPUs) -> Report:
    if len(gpus.visible) < 2:
        pytest.skip(f"needs two GPUs: the CUDA driver shows {len(gpus.visible)}")
    return run_program("two_gpus_in_one_thread", deadline=180)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["budget", "option"])
def test_one_thread_runs_sessions_of_two_gpus_that_have_one_stream_each(
    in_one_thread: Report, kind: str, way: str
) -> None:
    """ONNX Runtime up to 1.31 leaves the other GPU the current device of the thread, and convolutions fail."""
    assert in_one_thread[f"{kind}, {way}"] == ["right"]
