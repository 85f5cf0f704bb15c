"""A forked child comes to its end, also where it inherited ONNX Runtime without the threads that it started."""

from __future__ import annotations

import os

import pytest

from tests.support.children import run_python

pytestmark = pytest.mark.lab

PROGRAM = """
import ctypes, os, signal, sys, warnings
warnings.simplefilter("ignore")
import onnxruntime, ortgpu
from ortgpu import GPUSession
from ortgpu.diagnosis.probe.probing import RELU

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 3  # which wait from the start, instead of spinning
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
ortgpu.install()
session = GPUSession(RELU, options, allow_cpu=True)
passed = onnxruntime.InferenceSession(RELU, options, providers=["CPUExecutionProvider"])
child = os.fork()
if child == 0:
    signal.alarm(20)
    ctypes.CDLL(None).printf(b"buffered by C ")
    print("buffered by Python", end=" ")
    {end}
print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("del session, passed; sys.exit(5)", 5),
        ("sys.exit()", 0),
        ("raise RuntimeError('uncaught')", 1),
        ("os._exit(4)", 4),
    ],
)
def test_it_ends_with_its_status_and_loses_nothing_that_was_written(end: str, status: int) -> None:
    told_to_be_quiet = ("CI", "ORT_DISABLE_TELEMETRY")  # with which ONNX Runtime starts no thread
    done = run_python(
        PROGRAM.replace("{end}", end),
        env={name: value for name, value in os.environ.items() if name not in told_to_be_quiet},
    ).ok()
    assert f"status {status}" in done.stdout
    if "_exit" not in end:
        assert "buffered by C" in done.stdout
        assert "buffered by Python" in done.stdout
    assert ("uncaught" in done.stderr) == ("uncaught" in end)
