"""Programs of ``tests/process/test_forked_end.py``."""

from __future__ import annotations


def ends() -> None:
    import ctypes
    import os
    import signal
    import sys
    import warnings

    warnings.simplefilter("ignore")
    import onnxruntime

    import ortgpu
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
        match sys.argv[1]:
            case "deleted":
                del session, passed
                sys.exit(5)
            case "uncaught":
                raise RuntimeError("uncaught")
            case "at once":
                os._exit(4)
            case status:
                sys.exit(*map(int, status.split()))
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
