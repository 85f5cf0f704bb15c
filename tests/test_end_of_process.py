"""What outlives ortgpu's own modules at the end of a process, and is collected then, writes nothing about that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cpu_session import PRELUDE

# Python never frees a module that an extension refers to, as NumPy's, before it has taken the others apart.
KEPT = {
    "a session": "np.kept = GPUSession(NEG)",
    "a session that ran": "np.kept = GPUSession(NEG); list(np.kept.map(feeds(3)))",
    "a guarded session": """
import onnxruntime
ortgpu.install()
np.kept = onnxruntime.InferenceSession(NEG, providers=["CPUExecutionProvider"])
""",
    "a pool": "np.kept = ortgpu.GPUSessionPool(NEG); np.kept.run(None, feeds(1)[0])",
    "a map under way": "np.kept = GPUSession(NEG).map(feeds(9)); next(np.kept)",
    "pinned memory": "np.kept = GPUSession(NEG).pinned_empty(1 << 20)",
}


@pytest.mark.parametrize("code", KEPT.values(), ids=KEPT.keys())
def test_the_end_is_silent(code: str) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ORTGPU_ALLOW_CPU": "1"}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
