"""What the driver is asked in this process, over a driver that is made up: which device, which context, which error."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest

from ortgpu.environment.gpu import cuda
from ortgpu.environment.gpu.cuda import (
    CudaState,
    context_error,
    context_id,
    context_is_active,
    count_multiprocessors,
    initialise,
    initialised_in,
    initialising,
    is_older_than,
)

CAPABILITY_MAJOR, CAPABILITY_MINOR, COMPUTE_MODE, MULTIPROCESSORS = 75, 76, 20, 16  # CUdevice_attribute of cuda.h
RELAXED, GLOBAL = 2, 0  # CUstreamCaptureMode


class Driver:
    """Two devices; the second one has a context. What is not there raises AttributeError, as ctypes does."""

    def __init__(self, **results: Any) -> None:
        self.results = results
        self.calls: list[str] = []
        self.modes: list[int] = []
        self.active = {1}
        self.retained = 0
        self.pushed = 0
        self.supported = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu") or self.results.get(name) == "absent":
            raise AttributeError(name)
        self.calls.append(name)
        failure = self.results.get(name, 0)
        return lambda *given: failure or getattr(self, f"_{name}", lambda *_: 0)(*given)

    def _cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - names of the driver, here and below
        count._obj.value = 2
        return 0

    def _cuDeviceGet(self, handle: Any, ordinal: int) -> int:  # noqa: N802
        handle._obj.value = 100 + ordinal
        return 0 if ordinal < 2 else 101

    def _cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.supported
        return 0

    def _cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        name.value = f"GPU {handle.value}".encode()
        return 0

    def _cuDeviceTotalMem_v2(self, size: Any, handle: Any) -> int:  # noqa: N802
        size._obj.value = handle.value << 30
        return 0

    def _cuDeviceGetUuid_v2(self, raw: Any, handle: Any) -> int:  # noqa: N802
        raw.raw = bytes([handle.value] * 16)
        return 0

    _cuDeviceGetUuid = _cuDeviceGetUuid_v2  # noqa: N815

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        value._obj.value = {
            CAPABILITY_MAJOR: 9, CAPABILITY_MINOR: handle.value % 10, COMPUTE_MODE: 3, MULTIPROCESSORS: 132,
        }[attribute]  # fmt: skip
        return 0

    def _cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = device.value - 100 in self.active
        return 0

    def _cuDevicePrimaryCtxRetain(self, handle: Any, device: Any) -> int:  # noqa: N802
        handle._obj.value = 5000 + device.value
        self.retained += 1
        return 0

    def _cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained -= 1
        return 0

    def _cuCtxGetId(self, handle: Any, number: Any) -> int:  # noqa: N802
        number._obj.value = handle.value + 1
        return 0

    def _cuCtxPushCurrent_v2(self, handle: Any) -> int:  # noqa: N802
        self.pushed += 1
        return 0

    def _cuCtxPopCurrent_v2(self, handle: Any) -> int:  # noqa: N802
        self.pushed -= 1
        return 0

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.modes.append(mode._obj.value)
        mode._obj.value = 1
        return 0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Make a driver that of this process, which has not asked it yet."""
    monkeypatch.setattr(cuda, "_state", None)
    monkeypatch.setattr(cuda, "_has_failed", False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(driver: Any) -> Any:
        monkeypatch.setattr(cuda, "_driver", driver if callable(driver) else lambda: driver)
        return driver

    return put


def absent() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


# The devices


def test_each_device_has_its_own_facts(use: Any) -> None:
    use(Driver())
    state = initialise()
    assert (state.code, state.pid, state.hidden_by, state.has_crashed) == (0, os.getpid(), None, False)
    assert state.devices is not None
    first, second = state.devices
    assert (first.ordinal, first.name, first.compute_capability) == (0, "GPU 100", (9, 0))
    assert (second.ordinal, second.name, second.compute_capability) == (1, "GPU 101", (9, 1))
    assert first.uuid == "GPU-64646464-6464-6464-6464-646464646464"
    assert second.uuid == "GPU-65656565-6565-6565-6565-656565656565"
    assert (first.total_memory, first.compute_mode) == (100 << 30, 3)


def test_what_the_driver_does_not_tell_is_not_known(use: Any) -> None:
    use(Driver(cuDeviceGetName=1, cuDeviceTotalMem_v2=1, cuDeviceGetUuid_v2="absent", cuDeviceGetUuid=1,
               cuDeviceGetAttribute=1))  # fmt: skip
    state = initialise()
    assert state.devices is not None
    device = state.devices[1]
    facts = (device.uuid, device.name, device.compute_capability, device.total_memory, device.compute_mode)
    assert facts == (None,) * 5
    assert device.ordinal == 1


def test_an_older_driver_has_another_function_for_the_uuid(use: Any) -> None:
    use(Driver(cuDeviceGetUuid_v2="absent"))
    assert (initialise().devices or ())[0].uuid is not None


def test_a_device_without_a_handle_is_listed(use: Any) -> None:
    use(Driver(cuDeviceGet=101))
    assert [each.name for each in initialise().devices or ()] == [None, None]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetCount"])
def test_a_driver_that_refuses(use: Any, failing: str) -> None:
    use(Driver(**{failing: 100}))
    state = initialise()
    assert (state.code, state.devices) == (100 if failing == "cuInit" else 0, None)


def test_no_driver(use: Any) -> None:
    use(absent)
    assert initialise() == CudaState(None, None, os.getpid())


def test_a_success_is_remembered_and_a_failure_asked_again(use: Any) -> None:
    use(Driver(cuInit=999))
    assert initialise().code == 999
    assert initialising() is None, "what failed once is not tried beside other work"
    driver = use(Driver())
    state = initialise()
    assert state.code == 0
    assert initialise() is state
    assert driver.calls.count("cuInit") == 1
    assert initialised_in() == os.getpid()


def test_a_forked_child_asks_for_itself(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = use(Driver())
    assert initialised_in() is None
    parent = initialise()
    monkeypatch.setattr(os, "getpid", lambda: parent.pid + 1)
    assert initialised_in() == parent.pid
    assert initialise().pid == parent.pid + 1
    assert driver.calls.count("cuInit") == 2


def test_in_a_thread_beside_other_work(use: Any) -> None:
    use(Driver())
    task = initialising()
    assert task is not None
    assert task.result().code == 0
    assert initialising() is None


def test_variables_that_hid_devices_are_those_of_the_call(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert initialise().hidden_by == "1,0"
    assert CudaState.seen_by_child(100, None).hidden_by == "1,0"


def test_multiprocessors(use: Any) -> None:
    use(Driver())
    assert count_multiprocessors(1) == 132
    assert count_multiprocessors(7) is None


@pytest.mark.parametrize(
    ("supported", "cuda_major", "is_older"),
    [(12090, 13, True), (13000, 13, False), (13010, 12, False), (12090, None, False), (0, 13, False)],
)
def test_a_driver_for_an_older_cuda(use: Any, supported: int, cuda_major: int | None, is_older: bool) -> None:
    use(Driver()).supported = supported
    assert is_older_than(cuda_major) is is_older


def test_a_driver_that_does_not_tell_its_version_is_not_older(use: Any) -> None:
    use(Driver(cuDriverGetVersion=999))
    assert not is_older_than(13)
    use(absent)
    assert not is_older_than(13)


# Contexts


def test_a_context_is_that_of_one_device(use: Any) -> None:
    driver = use(Driver())
    assert [context_is_active(ordinal) for ordinal in (0, 1, 7)] == [False, True, None]
    assert [context_id(ordinal) for ordinal in (0, 1, 7)] == [0, 5102, None]
    assert driver.retained == 0, "what was taken was given back"


def test_a_driver_that_tells_no_number_of_a_context(use: Any) -> None:
    driver = use(Driver(cuCtxGetId="absent"))
    assert context_id(1) is None
    assert driver.retained == 0
    use(Driver(cuDevicePrimaryCtxRetain=3))
    assert context_id(1) is None
    use(absent)
    assert (context_id(1), context_is_active(1)) == (None, None)


def test_a_context_that_works_has_no_error(use: Any) -> None:
    driver = use(Driver())
    assert context_error(1) == 0
    assert (driver.retained, driver.pushed) == (0, 0)
    assert driver.modes == [RELAXED, 1], "relaxed, and back: another thread may capture a graph"


def test_without_a_context_there_is_none_to_have_an_error(use: Any) -> None:
    driver = use(Driver())
    assert context_error(0) is None
    assert context_error(7) is None
    assert "cuDevicePrimaryCtxRetain" not in driver.calls


@pytest.mark.parametrize("failing", ["cuMemGetInfo_v2", "cuStreamCreate", "cuStreamQuery", "cuCtxPushCurrent_v2"])
def test_a_sticky_error_comes_out_of_any_call(use: Any, failing: str) -> None:
    driver = use(Driver(**{failing: 700}))
    assert context_error(1) == 700
    assert (driver.retained, driver.pushed) == (0, 0)


def test_a_context_that_cannot_be_had_is_its_error(use: Any) -> None:
    driver = use(Driver(cuDevicePrimaryCtxRetain=2))
    assert context_error(1) == 2
    assert driver.retained == 0


def test_an_opening_makes_the_context_and_keeps_it_where_it_works(use: Any) -> None:
    driver = use(Driver())
    assert context_error(0, is_opening=True) == 0
    assert driver.retained == 1
    assert driver.modes == [GLOBAL, 1]
    failing = use(Driver(cuMemGetInfo_v2=2))
    assert context_error(0, is_opening=True) == 2
    assert failing.retained == 0
    existing = use(Driver())
    assert context_error(1, is_opening=True) == 0
    assert existing.retained == 0, "it is that of somebody else"


def test_a_driver_without_these_functions_tells_nothing(use: Any) -> None:
    use(Driver(cuThreadExchangeStreamCaptureMode="absent"))
    assert context_error(1) is None


def test_a_question_that_is_asked_often_is_prepared(use: Any) -> None:
    use(absent)
    assert cuda.context_question() is None
    assert cuda.stream_question() is None
    libc = ctypes.CDLL(None)
    use(lambda: libc)
    assert cuda.context_question() is None, "this library has no such function"
