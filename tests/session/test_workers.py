"""Which devices and options a pool takes, and what its further sessions get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import (
    DeviceNotFoundError,
    GPUError,
    LibraryNotFoundError,
    NoDeviceError,
    PoisonedContextError,
    ProviderFailureError,
    ProviderRequestError,
)
from ortgpu.provider import devices as choosing
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device, check_devices, choose_devices
from ortgpu.session.pool import workers
from ortgpu.session.pool.workers import check, is_lost, options_of_others, wait_for_all

GPUS = tuple(CudaDevice(number, f"GPU-{number}a", "NVIDIA H200", (9, 0), 1 << 30, 0) for number in range(3))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> list[CudaState]:
    states = [CudaState(0, GPUS, 1)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(choosing, "initialise", lambda: states[0])
    return states


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ("all", [0, 1, 2]),
        ([2, 0], [2, 0]),
        (["cuda:1", "GPU-2a"], [1, 2]),
        ((0,), [0]),
        ([Device("cuda", 5, "GPU-1a", None, None, None, None)], [1]),
    ],
)
def test_devices_become_ordinals(devices: Any, chosen: list[int]) -> None:
    assert choose_devices(check_devices(devices)) == chosen


@pytest.mark.parametrize("devices", [[0, 0], [1, "cuda:1"], ["GPU-2a", 2], [0, "gpu"]])
def test_a_gpu_that_is_named_twice_is_refused(devices: Any, driver: list[CudaState]) -> None:
    with pytest.raises(ProviderRequestError, match="one GPU twice"):
        choose_devices(check_devices(devices))
    driver[0] = CudaState(0, None, 1)
    if "GPU-2a" not in devices:
        with pytest.raises(ProviderRequestError, match="one GPU twice"):
            choose_devices(check_devices(devices))


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        ("cuda:0", TypeError),
        ("0", TypeError),
        (b"01", TypeError),
        (0, TypeError),
        ([], ProviderRequestError),
        ([3], DeviceNotFoundError),
        ([-1], DeviceNotFoundError),
        ([True], TypeError),
    ],
)
def test_what_names_no_gpus_is_refused(devices: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        choose_devices(check_devices(devices))


def test_where_the_driver_lists_none_the_session_says_why(driver: list[CudaState]) -> None:
    for devices in (None, ()):
        driver[0] = CudaState(None, devices, 1)
        assert choose_devices(None) == [None]
        assert choose_devices([1, "GPU-7"]) == [1, "GPU-7"]


@pytest.mark.parametrize(
    ("sessions", "options", "error"),
    [
        (0, {}, ValueError),
        (-1, {}, ValueError),
        (1, {"cuda_graph": True}, ProviderRequestError),
        (1, {"tuned": "with a graph"}, ProviderRequestError),
    ],
)
def test_what_no_pool_can_do_is_refused(
    sessions: int, options: dict[str, Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"with a graph": {"graph": "captured"}, "without": {"graph": "none"}}
    record = lambda path: SimpleNamespace(named=SimpleNamespace(settings=settings[path]))  # noqa: E731 - one expression
    monkeypatch.setattr(workers, "read_record", record)
    with pytest.raises(error):
        check(sessions, options)
    for fine in ({}, {"cuda_graph": False}, {"tuned": "without"}, {"tuned": "now"}, {"tuned": True}):
        check(1, fine)


def test_further_sessions_neither_go_to_the_cpu_nor_warn_again() -> None:
    assert options_of_others({"allow_cpu": True}) == {"allow_cpu": False, "cpu_nodes": "allow"}
    assert options_of_others({"cpu_nodes": "warn"}) == {"allow_cpu": False, "cpu_nodes": "allow"}
    assert options_of_others({"cpu_nodes": "forbid", "tuned": False}) == {
        "allow_cpu": False,
        "cpu_nodes": "forbid",
        "tuned": False,
    }


LOST = ProviderFailureError("ECC", library="CUDA", status="CUDA_ERROR_ECC_UNCORRECTABLE")


@pytest.mark.parametrize(
    ("error", "works", "expected"),
    [
        (PoisonedContextError("sticky"), True, True),
        (LOST, False, True),
        (LOST, True, False),
        (ProviderFailureError("cuDNN", library="CUDNN", status="CUDA_ERROR_ECC_UNCORRECTABLE"), False, False),
        (ProviderFailureError("CUDA", library="CUDA", status="cudaErrorInvalidValue"), False, False),
        (ValueError("wrong input"), False, False),
    ],
)
def test_a_gpu_is_lost_if_the_error_says_so_and_the_driver_does_not_deny_it(
    error: BaseException, works: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "gpu_works", lambda ordinal: works)
    session: Any = SimpleNamespace(device=Device("cuda", 1, "GPU-1a", None, None, None, None), _sess=object())
    assert is_lost(session, error) is expected
    session._sess = lifetime.UnusableSession(LOST)
    assert is_lost(session, LOST), "a session that refuses has lost it"


def raising(error: BaseException) -> Any:
    def wait() -> None:
        raise error

    return wait


def test_all_are_waited_for_and_the_first_error_has_the_others() -> None:
    waited: list[int] = []
    errors: list[GPUError] = [NoDeviceError("first"), LibraryNotFoundError("second")]
    with pytest.raises(NoDeviceError) as raised:
        wait_for_all([raising(errors[0]), lambda: waited.append(1), raising(errors[1]), lambda: waited.append(2)])
    assert waited == [1, 2]
    assert [each.summary for each in raised.value.others] == ["second"]
    with pytest.raises(KeyboardInterrupt):
        wait_for_all([raising(errors[0]), raising(KeyboardInterrupt())])
    wait_for_all([])
