"""Which GPU a caller may ask for, and by which name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import DeviceNotFoundError, GPUError
from ortgpu.provider.devices import (
    CPU,
    Device,
    check_form,
    choose,
    choose_visible,
    describe,
    narrowed_by,
    ordinal_of,
    plain_request,
)
from tests.support.made_requests import attempt


def gpu(ordinal: int, uuid: str | None = None, name: str | None = "NVIDIA H200") -> CudaDevice:
    return CudaDevice(ordinal, uuid, name, (9, 0), 141 << 30, 0)


UUIDS = (
    "GPU-aaaaaaaa-0000-0000-0000-000000000000",
    "GPU-aaaabbbb-0000-0000-0000-000000000001",
    "GPU-cccccccc-0000-0000-0000-000000000002",
)
GPUS = tuple(gpu(ordinal, uuid) for ordinal, uuid in enumerate(UUIDS))


def never(uuid: str) -> int | None:
    raise AssertionError("the free memory of a device is asked for only where it decides")


@pytest.mark.parametrize(
    ("requested", "ordinal"),
    [
        (None, 0), (0, 0), (2, 2), ("0", 0), ("2", 2), (" 1 ", 1), ("cuda", 0), ("cuda:1", 1), ("CUDA:1", 1),
        ("gpu", 0), ("GPU:2", 2), (UUIDS[1], 1), (UUIDS[1].upper(), 1), (f" {UUIDS[1]} ", 1), ("GPU-aaaab", 1),
        ("GPU-c", 2), ("MIG-cccccccc-0000-0000-0000-000000000002", 2),
    ],
)  # fmt: skip
def test_a_device_that_is_there(requested: Any, ordinal: int) -> None:
    check_form(requested)
    assert choose(requested, GPUS, never) is GPUS[ordinal]


@pytest.mark.parametrize("requested", [3, 99, "3", "cuda:7", "GPU-dddd", "MIG-dddd"])
def test_a_device_that_is_not_there(requested: Any) -> None:
    check_form(requested)
    with pytest.raises(DeviceNotFoundError, match="is not among the GPUs") as caught:
        choose(requested, GPUS, never, narrowed_by("0,1,2", "0,1,2"))
    error = caught.value
    assert error.requested == requested
    assert error.available == tuple(describe(one.ordinal, one.name, one.uuid) for one in GPUS)
    assert "visible to this process: 3 GPUs" in error.evidence
    assert "CUDA_VISIBLE_DEVICES=0,1,2" in error.evidence
    assert all(uuid in str(error) for uuid in UUIDS)


def test_a_uuid_that_begins_several() -> None:
    with pytest.raises(DeviceNotFoundError, match="names more than one GPU"):
        choose("GPU-aaaa", GPUS, never)


@pytest.mark.parametrize(
    "requested",
    ["", " ", "cpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1.0", "-1", "1.0", "GPU-", "auto ", "AUTO", "H200",
     "cuda 0", "cuda:0,1", "gpu-xyz", "0x1", "²", "cuda:²", "9" * 5000, -1],
)  # fmt: skip
def test_what_names_no_device(requested: Any) -> None:
    for function in (check_form, lambda value: choose(value, GPUS, never)):
        with pytest.raises(DeviceNotFoundError, match="names no GPU") as caught:
            function(requested)
        assert caught.value.requested == requested
        assert ("onnxruntime.InferenceSession" in caught.value.fixes[0]) == (requested == "cpu")


@pytest.mark.parametrize("requested", [True, False, 1.0, b"cuda", ["cuda"], ("cuda", 0), object(), CPU])
def test_what_is_no_request(requested: Any) -> None:
    with pytest.raises(TypeError, match="device must be") as caught:
        check_form(requested)
    # By its type alone, that of a session and one of PyTorch would be "not Device" and "not device"
    assert str(caught.value).endswith(f"not {requested!r}")


def test_what_names_a_device_elsewhere() -> None:
    gpu = Device("cuda", 1, UUIDS[1], "NVIDIA H200", (9, 0), None, None)
    assert choose(plain_request(gpu), GPUS, never) is GPUS[1]
    assert choose(plain_request(replace(gpu, uuid=None)), GPUS, never) is GPUS[1]
    assert choose(plain_request(np.int64(1)), GPUS, never) is GPUS[1]
    assert plain_request(CPU) == "cpu"
    assert [plain_request(each) for each in (None, 2, "auto", True)] == [None, 2, "auto", True]


def test_a_device_of_pytorch_is_known_without_its_import() -> None:
    class OfPyTorch:
        def __str__(self) -> str:
            return "cuda:1"

    OfPyTorch.__module__, OfPyTorch.__name__ = "torch", "device"
    assert plain_request(OfPyTorch()) == "cuda:1"
    OfPyTorch.__module__ = "other"
    assert type(plain_request(OfPyTorch())) is OfPyTorch


def test_a_device_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch, which ortgpu does not bring")
    assert [plain_request(torch.device(each)) for each in ("cuda", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(None, 0), (0, 0), (5, 5), ("cuda", 0), ("gpu:3", 3), ("7", 7), ("auto", None), (UUIDS[0], None)],
)
def test_ordinal_of(requested: Any, expected: int | None) -> None:
    assert ordinal_of(requested) == expected


MEMORY = st.lists(st.none() | st.integers(0, 1 << 40), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(MEMORY)
def test_auto_is_the_one_with_most_free_memory(free: list[int | None]) -> None:
    devices = [gpu(ordinal, f"GPU-{ordinal:08x}") for ordinal in range(len(free))]
    by_uuid = dict(zip((device.uuid for device in devices), free, strict=True))
    found = choose("auto", devices, lambda uuid: by_uuid[uuid])
    most = max(value or 0 for value in free)
    assert found.ordinal == next(n for n, value in enumerate(free) if (value or 0) == most)


def test_auto_without_uuids_is_the_first() -> None:
    assert choose("auto", [gpu(0), gpu(1)], never).ordinal == 0


DEVICES = st.lists(
    st.builds(
        CudaDevice,
        st.integers(0, 16),
        st.none() | st.from_regex(r"GPU-[0-9a-f]{8}", fullmatch=True),
        st.none() | st.text(max_size=5),
        st.none() | st.tuples(st.integers(1, 15), st.integers(0, 9)),
        st.none() | st.integers(0, 1 << 50),
        st.none() | st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda device: device.ordinal,
)
REQUESTS = (
    st.none()
    | st.integers(-2, 20)
    | st.sampled_from(["auto", "cuda", "cuda:1", "0", "GPU-0", "MIG-1"])
    | st.from_regex(r"GPU-[0-9a-f]{1,8}", fullmatch=True)
    | st.text(max_size=8)
)


@settings(max_examples=300, deadline=None)
@given(requested=REQUESTS, devices=DEVICES)
def test_a_request_is_one_of_the_devices_or_refused(requested: Any, devices: list[CudaDevice]) -> None:
    found = attempt(lambda: choose(requested, devices, lambda uuid: 1))
    if isinstance(found, GPUError):
        assert type(found) is DeviceNotFoundError
        assert found.requested == requested
        assert len(found.available) in (0, len(devices))
        return
    assert found in devices
    ordinal = ordinal_of(requested)
    assert ordinal in (None, found.ordinal)
    if ordinal is None and requested != "auto":
        assert (found.uuid or "").lower()[4:].startswith(requested.strip().lower()[4:])


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"\s?(cuda|gpu|mig|auto)[:-]?\w{0,3}\s?"))
def test_the_form_is_checked_as_the_choice_does(requested: str) -> None:
    def refused(function: Callable[[], object]) -> bool:
        found = attempt(function)
        return isinstance(found, DeviceNotFoundError) and "names no GPU" in found.summary

    assert refused(lambda: check_form(requested)) == refused(lambda: choose(requested, GPUS, lambda uuid: 1))


def test_names_of_devices() -> None:
    device = Device("cuda", 1, UUIDS[0], "NVIDIA H200", (9, 0), 1, "580.65")
    assert str(device) == f"cuda:1 (NVIDIA H200, {UUIDS[0]})"
    assert device.is_gpu
    assert (str(CPU), CPU.is_gpu) == ("cpu", False)
    assert str(Device("cuda", 0, None, None, None, None, None)) == "cuda:0"
    assert describe(0, None, None) == "cuda:0 unnamed GPU"


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (None, None, None),
        ("0", "0", "CUDA_VISIBLE_DEVICES=0"),
        ("1", None, "CUDA_VISIBLE_DEVICES was not set when this process initialised CUDA; it is '1' now"),
        (None, "0", "CUDA_VISIBLE_DEVICES was '0' when this process initialised CUDA; it is not set now"),
    ],
)
def test_the_variable_counts_as_it_was_when_cuda_was_initialised(
    now: str | None, then: str | None, words: str | None
) -> None:
    """Seen on an H200: what is set after a cuInit that succeeded changes nothing, what is set after one that found no
    GPU does."""
    said = narrowed_by(now, then)
    assert (said is None) == (words is None)
    assert (said or "").startswith(words or "")


@pytest.mark.parametrize(("requested", "ordinal"), [(None, 0), ("auto", 0), (2, 2), ("cuda:1", 1), (UUIDS[0], None)])
def test_without_a_list_of_the_gpus_only_a_number_names_one(requested: Any, ordinal: int | None) -> None:
    """As in some containers, where the driver works and lists nothing."""
    state = CudaState(0, None, 1)
    if ordinal is None:
        with pytest.raises(DeviceNotFoundError, match="it is unknown which GPU is"):
            choose_visible(requested, state)
    else:
        assert choose_visible(requested, state).ordinal == ordinal


def test_a_session_on_another_gpu_than_the_variable_says_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = CudaState(0, GPUS, 1, None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_visible(None, state) is GPUS[0]
    assert not caplog.records
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_visible(None, state) is GPUS[0]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "came too late" in record.getMessage()
    assert UUIDS[0] in record.getMessage()
    with pytest.raises(DeviceNotFoundError, match="before anything in it uses CUDA"):
        choose_visible(7, state)
