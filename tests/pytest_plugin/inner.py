"""What inner test runs see: a machine that is made up, and sessions that are not real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ortgpu import testing
from ortgpu.errors import DriverUnusableError, GPUError, manual
from ortgpu.provider.devices import Device
from ortgpu.testing import FoundGPUs
from tests.support.children import program_text

GiB = 2**30
PLUGIN = "ortgpu.pytest_plugin"

NO_GPU = DriverUnusableError(
    "cuInit returned 999", evidence=["NVML sees 1 GPU"], fixes=[manual("reboot", needs="reboot")], cuda_code=999
)

ONE_OF_EACH = program_text("pytest_plugin.one_of_each")


def gpu(ordinal: int, **changes: Any) -> Device:
    facts = {
        "kind": "cuda",
        "ordinal": ordinal,
        "uuid": f"GPU-{ordinal}",
        "name": "NVIDIA H200",
        "compute_capability": (9, 0),
        "total_memory": 141 * GiB,
        "driver_version": "580.65.06",
    }
    return Device(**{**facts, **changes})


class Faked:
    """The machine that inner runs in this process see, and how often they looked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = FoundGPUs((), NO_GPU)
        self.looks = 0
        self.memory: dict[str, tuple[int, int] | None] = {}
        monkeypatch.setattr(testing, "find_gpus", self.find)
        monkeypatch.setattr("ortgpu.environment.gpu.driver.read_gpu_memory", lambda uuid: self.memory.get(uuid))

    def find(self) -> FoundGPUs:
        self.looks += 1
        return self.found

    def has(self, *gpus: Device, problem: GPUError | None = None) -> None:
        self.found = FoundGPUs(gpus, problem)


class Session:
    """In the place of GPUSession: says what it was asked for, and that it was closed."""

    log: list[str]  # of the test that uses it
    device = gpu(0)

    def __init__(self, model: str, *arguments: Any, **options: Any) -> None:
        self.model, self.arguments, self.options = model, arguments, options
        self.log.append(f"open {model} on {options.get('device')}")

    def close(self) -> None:
        self.log.append(f"close {self.model}")


Run = Callable[..., pytest.RunResult]


# Start-up


# GPU memory


class Memory:
    """What NVML says of memory: ``own`` is this process's use, None where it is not shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own: int | None = 600 * testing.MiB
        self.all: int | None = 900 * testing.MiB
        self.reads = 0
        self.after: dict[int, int] = {}  # own use from the n-th reading on
        monkeypatch.setattr(testing, "_memory_use", self.read)
        monkeypatch.setattr(testing, "_warm_up", lambda gpu: None)
        monkeypatch.setattr(testing, "_SETTLING", 0.3)

    def read(self, gpu: Device) -> tuple[int | None, int | None]:
        self.reads += 1
        self.own = self.after.get(self.reads, self.own)
        return self.own, self.all

    def take(self, size: int) -> None:
        self.own = None if self.own is None else self.own + size
        self.all = None if self.all is None else self.all + size
