"""Programs of ``tests/diagnosis/test_runtime_words.py``."""

from __future__ import annotations

import numpy as np

from ortgpu import GPUSession
from tests.programs.on_cpu import NEG, feeds, model, outcome, report


def wrong_arguments_and_exceptions_of_the_caller_are_theirs() -> None:
    from ortgpu.provider.devices import Device

    class Lazy(dict):
        def keys(self):
            raise KeyError("CUDA failure 700: x")

    session = GPUSession(NEG)
    session.device = Device("cuda", 0, None, None, None, None, None)
    x = feeds(1)[0]["x"]
    wrong = ({}, {"CUDA failure 700: x": x}, {"x": x, "CUDA failure 700: x": x}, Lazy())
    report([outcome(lambda: session.run(None, feed)) for feed in wrong])


def memory_of_the_host_is_not_that_of_a_gpu() -> None:
    text = "g (float[n] x, int64[k] s) => (float[m] y) { y = Expand(x, s) }"
    session = GPUSession(model(text))
    feed = {"x": np.ones(1, dtype=np.float32), "s": np.array([10**15])}
    report([str(session.device), outcome(lambda: session.run(None, feed))])


def the_names_are_those_of_the_runtime() -> None:
    import ctypes
    import sys

    from ortgpu.diagnosis.messages.cuda_codes import CODES
    from ortgpu.environment.packages.installed import locate_packages
    from ortgpu.provider.preloading import load, plan

    runtime = ctypes.CDLL(load(plan(locate_packages())).path_of("libcudart"))
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    given = {name: runtime.cudaGetErrorName(code).decode() for name, code in CODES.items()}
    known = {name: its for name, its in given.items() if its != "unrecognized error code"}
    sys.stdout.write(
        f"{len(CODES)} {len(known) >= 62} { {name for name, its in known.items() if its != name} or None }"
    )
