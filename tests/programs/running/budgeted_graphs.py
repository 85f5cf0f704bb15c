"""Programs of ``tests/running/test_cuda_graph.py``."""

from __future__ import annotations

import threading

import numpy as np

from ortgpu.running import cuda_graph
from tests.programs.on_cpu import NEG, report
from tests.programs.with_graphs import Recorded, bound, capturing, runtime, stub


def graphs_are_measured_and_stay_in_the_room_of_a_budget() -> None:
    MIB = 1 << 20
    cuda_graph._GRAPH_BYTES, cuda_graph._THREAD_BYTES = 6 * MIB, 8 * MIB
    session = capturing(NEG, room=38 * MIB)

    class Taking(Recorded):
        # A capture takes memory that the session keeps
        def run_with_iobinding(self, binding, options):
            number = int(options.get_run_config_entry("gpu_graph_id"))
            key = number, threading.get_ident()
            if key not in taken:
                taken[key] = runtime.allocate(8 * MIB)
            return super().run_with_iobinding(binding, options)

    taken, inner = {}, session._sess._inner
    session._sess._inner = Taking(inner.inner, inner.stream)

    def run(size):
        return (session.run(None, {"x": np.full(size, 3, np.float32)})[0] == -3).all()

    right = [bool(run(size)) for size in (4, MIB, 8 * MIB, 5, 2 * MIB, 4, MIB, 8 * MIB)]
    graphs = session._sess
    held = [graphs.bytes_held() - stub.stub_device_bytes(), len(taken), max(bound), graphs.bytes_held() <= 38 * MIB]
    other = threading.Thread(target=lambda: right.append(bool(run(4))))
    other.start()
    other.join()
    report([right, held, len(taken)])
