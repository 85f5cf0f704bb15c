"""Programs of ``tests/running/test_graph_buffers.py``."""

from __future__ import annotations

import numpy as np

from ortgpu.running.cuda_graph import CapturingSession
from tests.programs.on_cpu import report
from tests.programs.running.graph_buffers import PAIR
from tests.programs.with_graphs import capturing

ways = []


class Noting(CapturingSession):
    def run(self, *arguments):
        ways.append("run")
        return super().run(*arguments)

    def replay(self, *arguments):
        results = super().replay(*arguments)
        ways.append("replay" if results is not None else "no replay")
        return results


session = capturing(PAIR)
session._sess.__class__ = Noting
x, w = np.ones((1, 2), np.float32), np.ones(3, np.float32)
session.run(None, {"x": x, "w": w})
ways.clear()


def which_runs_are_replayed_at_once() -> None:
    import collections

    import onnxruntime

    def way(names, feed, *options):
        ways.clear()
        session.run(names, feed, *options)
        return ways[0]

    class Own(np.ndarray):
        pass

    uncaptured = onnxruntime.RunOptions()
    uncaptured.add_run_config_entry("gpu_graph_id", "-1")
    value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
    report(
        [
            way(*each)
            for each in (
                (None, {"x": x, "w": w}),
                ([], {"w": w, "x": x}),
                (["z"], {"x": x[::-1], "w": np.ones(9, "f4")[::3]}),
                (None, {"x": x, "w": w}, uncaptured),
                (None, {"x": value, "w": w}),
                (None, {"x": x, "w": [1, 2, 3]}),
                (("z",), {"x": x, "w": w}),
                (None, collections.OrderedDict(x=x, w=w)),
                (None, {"x": x.view(Own), "w": w}),
                (None, {"x": x, "w": w}),
                (None, {"x": x, "w": np.ones(4, "f4")}),
                (None, {"x": x, "w": np.ones(4, "f4")}),
            )
        ]
    )
