"""Programs of ``tests/session/test_construction.py``."""

from __future__ import annotations

from tests.programs.machines import report


def open_and_rewrite() -> None:
    import os
    import shutil
    import sys
    import time
    import warnings

    import onnxruntime

    from ortgpu import GPUSession

    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    path, openings = sys.argv[1], int(sys.argv[2])
    GPUSession(path)
    raised = {}
    writer = os.fork()
    if not writer:
        while os.getppid() != 1:
            shutil.copyfile(path + ".new", path)
            time.sleep(0.01)
        os._exit(0)
    try:
        opened = 0
        for number in range(openings):
            options = onnxruntime.SessionOptions() if number % 4 == 3 else None
            try:
                GPUSession(path, options)
                opened += 1
            except Exception as error:
                raised[type(error).__name__] = raised.get(type(error).__name__, 0) + 1
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)
    report([opened, raised])


def mappings() -> None:
    import pickle
    import sys

    mapped = []

    def watch(event, given):
        if event == "mmap.__new__" and given[0] != -1:
            mapped.append([os.readlink(f"/proc/self/fd/{given[0]}"), *given])

    import os

    sys.addaudithook(watch)
    import onnxruntime

    import ortgpu
    from ortgpu import GPUSession

    path = sys.argv[1]
    GPUSession(path)
    pickle.dumps(GPUSession(path, onnxruntime.SessionOptions, [("CUDAExecutionProvider", {"use_tf32": "0"})]))
    ortgpu.diagnose(path)
    report(mapped)
