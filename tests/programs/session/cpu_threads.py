"""Programs of ``tests/session/test_cpu_threads.py``."""

from __future__ import annotations

from tests.programs.machines import report


def place() -> None:
    import sys
    from pathlib import Path

    import onnxruntime

    from ortgpu import preload
    from ortgpu.provider.options import recording_options
    from ortgpu.provider.placement import read_placement
    from ortgpu.session.chosen import ON_FEW_THREADS, unfit

    preload()
    onnxruntime.set_default_logger_severity(4)
    on_cpu = []
    for path in Path(sys.argv[1]).iterdir():
        session = onnxruntime.InferenceSession(
            path, recording_options(), ["CUDAExecutionProvider", "CPUExecutionProvider"]
        )
        assert session.get_providers()[0] == "CUDAExecutionProvider"
        if unfit(ON_FEW_THREADS, read_placement(session)):
            on_cpu.append(path.stem)
    report(on_cpu)


def opened() -> None:
    import os
    import sys
    import weakref

    import onnxruntime

    from ortgpu import GPUSession

    os.cpu_count = lambda: int(sys.argv[2])
    options = onnxruntime.SessionOptions()
    before = len(os.listdir("/proc/self/task"))
    constructed, made, alive = [], [], []
    construct = onnxruntime.InferenceSession.__init__

    def watched(self, *given, **named):
        constructed.append(given[1].intra_op_num_threads)
        alive.append(sum(each() is not None for each in made))
        construct(self, *given, **named)
        made.append(weakref.ref(self._sess))

    onnxruntime.InferenceSession.__init__ = watched
    make = eval(f"lambda options: GPUSession(sys.argv[1], {sys.argv[3]})", {"GPUSession": GPUSession, "sys": sys})
    with make(options) as session:
        report(
            {
                "constructed": constructed,
                "alive": alive,
                "started": len(os.listdir("/proc/self/task")) - before,
                "says": session.get_session_options().intra_op_num_threads,
                "chosen": session.options_chosen.get("intra_op_num_threads"),
                "cudnn": session.options_chosen.get("enable_cudnn"),
                "computing": [node.op_type for node in session.placement.cpu_compute_nodes],
            }
        )
