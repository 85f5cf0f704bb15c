"""Errors of every class, with everything set."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.errors import Fix, GPUError, LibraryNotFoundError, catalogue
from ortgpu.provider.placement import PlacedNode

EACH = pytest.mark.parametrize("cls", catalogue().values(), ids=lambda cls: cls.__name__)


def full(cls: type[GPUError], summary: str = "it failed") -> GPUError:
    """An error of this class in which everything is set."""
    values: dict[str, Any] = {name: (name, 1) for name in cls.fields}
    if "found" in values:
        values["found"] = {"libcublas.so.13": "/opt/libcublas.so.12"}
    if "nodes" in values:
        values["nodes"] = (PlacedNode("n", "Conv", "", "CPUExecutionProvider", "compute"),)
    return cls(
        summary,
        evidence=["fact one", "fact two"],
        fixes=[
            Fix("sudo reboot", kind="shell", needs="root"),
            Fix("import torch", kind="python"),
            Fix("buy a GPU", kind="manual", needs="hardware"),
        ],
        others=[LibraryNotFoundError("libcurand.so.10 not found", missing=("libcurand.so.10",)), GPUError("more")],
        consequence_of="driver-too-old",
        severity="warning",
        **values,
    )


def contents(error: GPUError) -> dict[str, Any]:
    return {
        "type": type(error),
        "text": str(error),
        "summary": error.summary,
        "args": error.args,
        "evidence": error.evidence,
        "fixes": [(str(fix), type(fix), fix.kind, fix.needs) for fix in error.fixes],
        "others": [contents(other) for other in error.others],
        "consequence_of": error.consequence_of,
        "severity": error.severity,
        "details": error.details(),
    }
