"""What programs with sessions that replay CUDA graphs share: see tests/support/graph_sessions.py."""

import os
import sys

from ortgpu import GPUSession
from ortgpu.running import cuda_graph
from ortgpu.running.cuda_graph import MAX_CAPTURES, MAX_SHAPES, CapturedRunner, CapturingSession
from ortgpu.running.cudart import Stream
from ortgpu.running.pinned import PinnedMemory
from tests.programs import no_search
from tests.programs.on_cpu import outcome, stub_runtime

os.environ["STUB_CUDART_LATE"] = "1"
cuda_graph.TRIALS = 0  # every run is a replay; tests of the choice set it
runtime, stub = stub_runtime(sys.argv[1])
bound = []  # numbers of the graphs, in the order of their runs
waiting = []  # whether each of these runs waits for the GPU


class Recorded:
    # The C++ session, and the run options that it is given
    def __init__(self, inner, stream):
        self.inner, self.stream = inner, stream

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run_with_iobinding(self, binding, options):
        bound.append(int(options.get_run_config_entry("gpu_graph_id")))
        waiting.append(
            "returned" not in outcome(lambda: options.get_run_config_entry("disable_synchronize_execution_providers"))
        )
        runtime.synchronise(self.stream)
        return self.inner.run_with_iobinding(binding, options)


def capturing(model, limit=1 << 24, room=None):
    session = GPUSession(model)
    inner, stream = session._sess, Stream(runtime)
    session._pinned = memory = PinnedMemory(runtime, limit)
    session._sess = CapturingSession(inner, runtime, session.device, stream, memory, (1 << 64) - 1, room)
    session._sess._inner = Recorded(inner, stream.handle)
    session._gpu_runner = CapturedRunner(session, session._sess)
    return session
