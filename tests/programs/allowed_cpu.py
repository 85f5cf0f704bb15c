"""A GPUSession on the CPU, by its argument alone: ``allowed_cpu.py MODEL``. Nothing allows it by the variable."""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ortgpu import CPUExecutionWarning, GPUSession
from tests.support.children import report


def outcome(action: Callable[[], Any]) -> str:
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__


def moved(session: GPUSession, *providers: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.set_providers(list(providers))
    warned = [each.category.__name__ for each in caught]
    return f"{session.device} {session.get_providers()} {len(warned)}"


if __name__ == "__main__":
    warnings.simplefilter("ignore", CPUExecutionWarning)
    model = sys.argv[1]
    session = GPUSession(model, allow_cpu=True)
    report(
        "json",
        {
            "to cpu": outcome(lambda: moved(session, "CPUExecutionProvider")),
            "to cpu with options": outcome(lambda: moved(session, ("CPUExecutionProvider", {}))),
            "to cuda": outcome(lambda: moved(session, "CUDAExecutionProvider")),
            "to cuda again": outcome(lambda: moved(session, "CUDAExecutionProvider", "CPUExecutionProvider")),
            "to openvino": outcome(lambda: moved(session, "OpenVINOExecutionProvider")),
            "pickled": outcome(lambda: pickle.loads(pickle.dumps(session)).device),
            "copied": outcome(lambda: copy.copy(session).device),
            "constructed again": outcome(lambda: GPUSession(model, device=session.device, allow_cpu=True).device),
            "explained": outcome(lambda: {str(node): reason for node, reason in session.explain_placement().off_gpu}),
        },
    )
