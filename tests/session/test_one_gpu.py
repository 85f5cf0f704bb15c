"""A session is on one GPU, whatever names it: the argument, the options of CUDA, those of TensorRT."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.cpu_session import child

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"

PROGRAM = """
from ortgpu.environment.gpu.cuda import CudaDevice
from ortgpu.errors import ProviderRequestError
from ortgpu.session.opening import _device_asked_for, _with_device
from ortgpu.provider.requests import cuda_first, parse

device, providers = json.loads(sys.argv[1])
requested = parse([tuple(entry) if isinstance(entry, list) else entry for entry in providers], None)

def bound():
    ordinal = _device_asked_for(requested, device) or 0
    asked = _with_device(cuda_first(requested), CudaDevice(ordinal, None, None, None, None, None))
    return {name: asked.options_of(name).get("device_id") for name in asked.names}

report(outcome(bound))
"""


@pytest.mark.parametrize(
    ("device", "providers", "bound"),
    [
        (None, [CUDA], {CUDA: None}),
        (1, [CUDA], {CUDA: "1"}),
        (None, [TENSORRT, CUDA], {TENSORRT: None, CUDA: None}),
        (None, [[TENSORRT, {"device_id": 1}], CUDA], {TENSORRT: "1", CUDA: "1"}),
        (None, [[TENSORRT, {"device_id": 1}]], {TENSORRT: "1", CUDA: "1"}),
        (None, [TENSORRT, [CUDA, {"device_id": 1}]], {TENSORRT: "1", CUDA: "1"}),
        ("cuda:1", [[TENSORRT, {"device_id": 1}], [CUDA, {"device_id": 1}]], {TENSORRT: "1", CUDA: "1"}),
        (None, [[TENSORRT, {"device_id": 0}], CUDA], {TENSORRT: "0", CUDA: "0"}),
    ],
)
def test_named_once_it_holds_for_all(device: Any, providers: Any, bound: dict[str, str | None]) -> None:
    found = child(PROGRAM, json.dumps([device, providers]))["returned"]
    assert found == {**bound, "CPUExecutionProvider": None}


@pytest.mark.parametrize(
    ("device", "providers"),
    [
        (0, [[TENSORRT, {"device_id": 1}], CUDA]),
        (0, [[CUDA, {"device_id": 1}]]),
        (None, [[TENSORRT, {"device_id": 1}], [CUDA, {"device_id": 0}]]),
        (1, [[TENSORRT, {"device_id": 0}], [CUDA, {"device_id": 1}]]),
    ],
)
def test_named_differently_it_is_refused(device: Any, providers: Any) -> None:
    found = child(PROGRAM, json.dumps([device, providers]))
    assert found["type"] == "ProviderRequestError"
    assert "different GPUs" in found["text"]
    assert "device_id=1 in the options of" in found["text"]
