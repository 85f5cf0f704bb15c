"""Programs of ``tests/distributed/test_checkpoint.py``."""

from __future__ import annotations


def as_another_user() -> None:
    import os
    import sys

    from ortgpu.distributed import checkpoint
    from ortgpu.errors import DistributedError

    if os.geteuid() == 0:
        os.seteuid(65534)
    for action in (checkpoint.steps, checkpoint.load):
        try:
            print("found", getattr(action(sys.argv[1]), "step", "steps"))
        except DistributedError as error:
            print(error.summary, *error.evidence, *error.fixes, sep="|")


def killed() -> None:
    import os
    import signal
    import sys

    from ortgpu.distributed import Rank, checkpoint
    from tests.distributed.test_checkpoint import Recorded

    remaining = int(sys.argv[2])

    def watch(event, arguments):
        nonlocal remaining
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove") and sys.argv[1] in str(arguments[0]):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    from tests.distributed import test_checkpoint

    checkpoint.save(sys.argv[1], 3, Recorded(b"new"), files=[test_checkpoint.__file__], rank=Rank(0, 2, 0, 2))
