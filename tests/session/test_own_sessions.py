"""A GPU that is full of sessions of this very process, as in a notebook whose cell was run again."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.diagnosis.checks.classifier import explain_opening
from ortgpu.provider.living import SessionRecord
from tests.support.children import program_path
from tests.support.cpu_session import child
from tests.support.made_facts import CUDA_H200, SEEN_HEALTHY, observed

PROGRAMS = program_path("session.own_sessions")


def played(program: str) -> Any:
    return child(program, behind="session.own_sessions")


def test_what_keeps_a_session_from_opening() -> None:
    found = played("session.own_sessions.what_keeps_a_session_from_opening")
    before, (name, evidence, fixes), after = found
    assert before == after == ["InsufficientDeviceMemoryError", [], []]
    assert name == "InsufficientDeviceMemoryError"
    assert len(evidence) == 6
    assert all(line.startswith(f"open in this process: <bytes>, created by {PROGRAMS}:") for line in evidence[:5])
    assert evidence[0].endswith(" opened")
    assert evidence[5] == "and 2 more, which ortgpu.sessions() lists"
    assert len(fixes) == 1


@pytest.mark.parametrize("base", ["onnxruntime.InferenceSession", "GPUSession"])
def test_sessions_are_listed_while_another_thread_makes_one(base: str) -> None:
    """An error of this thread names them: it was an AttributeError instead."""
    counts = child(f"""
import onnxruntime
from ortgpu.provider.options import recording_options
counts = []

class Made({base}):
    def __setattr__(self, name, value):  # what another thread could ask between any two of them
        super().__setattr__(name, value)
        counts.append(len(ortgpu.sessions()))

session = Made(NEG, recording_options(), providers=["CPUExecutionProvider"])
made = len(ortgpu.sessions())
first = counts[0]
if {base} is onnxruntime.InferenceSession:
    session.set_providers(["CPUExecutionProvider"])
report([first, made, max(counts)])
""")
    assert counts == [0, 1, 1]


@pytest.mark.parametrize(("others", "lines"), [(0, 0), (1, 2)])
def test_what_keeps_a_run_from_its_memory(others: int, lines: int) -> None:
    found = played(f"""
from onnxruntime.capi import onnxruntime_pybind11_state as native
from ortgpu.session import failures
kept = [opened() for _ in range({others})]
report(told(failures.explained(opened(), native.Fail(FULL))))
""")
    name, evidence, fixes = found
    assert name == "GPUOutOfMemoryError"
    assert len(evidence) == lines
    assert len(fixes) == bool(others)


def test_those_on_other_gpus_hold_nothing_of_it() -> None:
    from ortgpu.provider.devices import CPU, Device
    from ortgpu.provider.placement import Placement

    def record(uuid: str | None, providers: tuple[str, ...] = ("CUDAExecutionProvider",)) -> SessionRecord:
        device = CPU if uuid is None else Device("cuda", 0, uuid, "NVIDIA H200", (9, 0), None, None)
        return SessionRecord(f"{uuid}.onnx", device, providers, Placement(()), "GPUSession", None, 1, True)

    there = CUDA_H200.uuid
    held = (record(there), record("GPU-other"), record(None, ("CPUExecutionProvider",)))
    error = explain_opening("CUDA failure 2: out of memory", observed(list_sessions=lambda: held)(SEEN_HEALTHY))
    assert error is not None
    assert [line for line in error.evidence if "open in this process" in line] == [
        f"open in this process: {there}.onnx"
    ]
