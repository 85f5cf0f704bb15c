"""Programs of ``tests/behaviour/test_broken_environments.py``."""

from __future__ import annotations

from tests.programs.machines import report


def attempts() -> None:
    import os
    import signal
    import warnings

    import ortgpu
    from ortgpu import GPUSession
    from ortgpu.diagnosis.probe.probing import RELU

    warnings.simplefilter("always")
    os.environ["STUB_CUDA_TRACE"] = "1"  # read at each call: cuInit is written to stderr
    kept = []

    def say(what):
        os.write(2, f"--- {what}\n".encode())

    def opened(what, count=3, **arguments):
        say(what)
        for _ in range(count):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    kind = GPUSession(RELU, **arguments).device.kind
                except ortgpu.GPUError as error:
                    kind = type(error).__name__
            errors = [each.message.error for each in warned]  # type: ignore[union-attr]  # CPUExecutionWarning
            kept.append([kind, [type(error).__name__ for error in errors]])
            seen.extend(errors)

    seen = []
    opened("first", allow_cpu=True)
    opened("another device", allow_cpu=True, device=1)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    opened("another variable", allow_cpu=True)
    opened("not allowed")
    opened("none", allow_cpu=True)
    if os.fork() == 0:
        signal.alarm(40)
        opened("forked", allow_cpu=True)
        os._exit(0)
    os.wait()
    say("end")
    assert len(set(map(id, seen))) == len(seen)  # each is a copy of its own
    report(kept)
