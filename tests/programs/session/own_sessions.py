"""Programs of ``tests/session/test_own_sessions.py``."""

from __future__ import annotations

import dataclasses
import os

from ortgpu import GPUSession
from ortgpu.provider.requests import CPU, CUDA
from tests.programs.on_cpu import NEG, report

FULL = "CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=/cuda_allocator.cc ; line=28 ; expr=cudaMalloc(p, n);"


def opened():
    session = GPUSession(NEG)
    # As if it were on a GPU: what a record says of it
    session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0)
    session._providers = [CUDA, CPU]
    return session


def told(error):
    return [
        type(error).__name__,
        [line for line in error.evidence if "process" in line or "more" in line],
        [str(fix) for fix in error.fixes if "close()" in fix],
    ]


def what_keeps_a_session_from_opening() -> None:
    from ortgpu.diagnosis.diagnosing import why_unusable
    from ortgpu.environment.gpu.cuda import CudaState
    from ortgpu.provider.runtime import load_runtime

    works = CudaState(
        0, None, os.getpid()
    )  # the driver, which where it does not has no sessions of this process either

    def told_now():
        return told(why_unusable(load_runtime(), cuda=works, cause=RuntimeError(FULL)))

    before = told_now()
    kept = [opened() for _ in range(7)]
    full = told_now()
    for session in kept:
        session.close()
    report([before, full, told_now()])
