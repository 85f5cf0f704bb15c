"""As under multiprocessing's fork method, gunicorn --preload and Celery: imported before the fork, used after it."""

from __future__ import annotations

from tests.programs.machines import report


def worker() -> None:
    import ctypes
    import os
    import signal
    import sys

    import ortgpu
    from ortgpu import GPUSession
    from ortgpu.diagnosis.probe.probing import RELU

    if sys.argv[1] == "used":
        ctypes.CDLL("libcuda.so.1").cuInit(0)  # as torch does it
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(40)
        try:
            GPUSession(RELU)
        except ortgpu.GPUError as error:
            os.write(writer, f"{type(error).__name__}\n{error}".encode())
        os._exit(0)
    os.close(writer)
    name, _, text = open(reader).read().partition("\n")
    os.wait()
    report([name, text])
