"""Programs of ``tests/running/test_pinned.py`` without the stub of CUDA's runtime."""

from __future__ import annotations

import logging

import numpy as np

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, outcome, report


def the_real_runtime_without_a_gpu_pins_nothing_and_says_why() -> None:
    import ortgpu.running.cudart

    path = ortgpu.preload().path_of("libcudart")
    messages = []
    logger = logging.getLogger("ortgpu")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(lambda record: messages.append(record.getMessage()))
    if path is not None:
        from ortgpu.running.pinned import PinnedMemory

        memory = PinnedMemory(ortgpu.running.cudart.CudaRuntime(path, 0), 1 << 30)
        array = memory.empty(1 << 20)
        staged = memory.staged({"x": array})["x"] is array
        report([staged, memory.bytes_held, messages[-1]])
    else:
        report(None)


def on_the_cpu_it_is_ordinary_memory_with_a_debug_message() -> None:
    messages = []
    logger = logging.getLogger("ortgpu")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(lambda record: messages.append(record.getMessage()))
    session = GPUSession(NEG)
    array = session.pinned_empty((2, 3), "float64")
    array[:] = 5
    report([array.shape, array.dtype.str, session._pinned.bytes_held, messages[-1]])


def the_limit_is_an_argument_and_travels() -> None:
    import pickle

    session = GPUSession(NEG, pinned_memory_limit=np.int64(5 << 20))
    again = pickle.loads(pickle.dumps(session))
    report(
        [
            again._pinned_memory_limit,
            outcome(lambda: GPUSession(NEG, pinned_memory_limit=-1)),
            outcome(lambda: GPUSession(NEG, pinned_memory_limit="2 apples"))["type"],
            outcome(lambda: GPUSession(NEG, pinned_memory_limit=[1]))["type"],
            GPUSession(NEG, pinned_memory_limit="2GiB")._pinned_memory_limit,
        ]
    )
