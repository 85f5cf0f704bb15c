"""``ortgpu doctor`` on machines of the lab."""

from __future__ import annotations

import json
from typing import Any

from tests.lab import GPU, NVML, Cuda, Machine
from tests.support.children import Child

LOOK = ("doctor", "--no-probe")
H200 = GPU()
EVERYTHING: dict[str, Any] = {"cuda": Cuda(devices=(H200,)), "nvml": NVML(gpus=(H200,))}


def doctor(machine: Machine, *options: str, **settings: Any) -> Child:
    """``python -m ortgpu doctor`` on a machine of the lab."""
    result = machine.run(argv=["-m", "ortgpu", "doctor", *options], **settings)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.stdout
    return result


def document(machine: Machine, *options: str, **settings: Any) -> dict[str, Any]:
    result = doctor(machine, "--json", *options, **settings)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.returncode == (0 if found["ok"] else 1)
    return found
