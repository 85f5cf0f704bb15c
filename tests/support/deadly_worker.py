"""The program of a worker process in which some values of a feed are deadly.

The rest of the process is the real one: a run raises, hangs or ends the process. On a GPU the sticky error is a real
one; elsewhere it is raised.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

STICKY, FAILS, HANGS, EXITS, STAYS = -700.0, -4000.0, -1.0, -3.0, -800.0
RAISES = {-900.0: TimeoutError, -901.0: EOFError, -902.0: BrokenPipeError}


def serve(*opening: Any) -> Any:
    """Serve as a worker process does."""
    from ortgpu import GPUSession
    from ortgpu.errors import PoisonedContextError, ProviderFailureError
    from ortgpu.session.pool import worker_process

    real: Callable[..., Any] = GPUSession.run

    def run(self: Any, output_names: Any, feed: Any, run_options: Any = None) -> Any:
        value = feed["x"].flat[0] if feed.get("x") is not None and feed["x"].size else 0
        if value == STICKY:
            if self.device.is_gpu:
                read_nowhere(self, feed["x"])
            raise PoisonedContextError("an illegal memory access was encountered", cuda_code=700)
        if value == FAILS:
            raise ProviderFailureError("cuDNN failed", library="cuDNN", status="CUDNN_STATUS_INTERNAL_ERROR")
        if value == HANGS:
            time.sleep(1000)
        if value == EXITS:
            os._exit(3)
        if value == STAYS:
            os.closerange(3, 1000)
            os.kill(os.getpid(), signal.SIGSTOP)
        if value in RAISES:
            raise RAISES[value]("of this run")
        if -65 < value < -3:
            os.kill(os.getpid(), signal.Signals(-int(value)))
            time.sleep(1000)
        return real(self, output_names, feed, run_options)

    GPUSession.run = run  # type: ignore[method-assign, assignment]  # in this process only
    return worker_process.serve(*opening)


def serve_on_cpu(*opening: Any) -> Any:
    """Serve as a worker process does, where no GPU is searched."""
    from ortgpu.session.pool import worker_process
    from tests.programs import no_search  # noqa: F401

    return worker_process.serve(*opening)


def serve_deadly_on_cpu(*opening: Any) -> Any:
    """Serve with deadly values, where no GPU is searched."""
    from tests.programs import no_search  # noqa: F401

    return serve(*opening)


def serve_and_keep_little(*opening: Any) -> Any:
    """Serve with the limit of kept memory that the test gives its own process."""
    from ortgpu.session.pool import shared_memory, worker_process

    shared_memory.KEPT = 1 << 20
    return worker_process.serve(*opening)


def serve_without_memfd(*opening: Any) -> Any:
    """Serve as in a Python that was built for an older glibc."""
    from ortgpu.session.pool import worker_process

    del os.memfd_create
    return worker_process.serve(*opening)


def fail_by_TimeoutError(*_: Any) -> None:  # noqa: N802 - the name of an exception
    raise TimeoutError("the disk is gone")


def fail_by_EOFError(*_: Any) -> None:  # noqa: N802
    raise EOFError("the disk is gone")


def fail_by_ConnectionResetError(*_: Any) -> None:  # noqa: N802
    raise ConnectionResetError("the disk is gone")


def crash(*_: Any) -> None:
    os.abort()


def hang(*_: Any) -> None:
    time.sleep(1000)


def read_nowhere(session: Any, array: Any) -> None:
    """Make an illegal memory access on the session's GPU, which raises PoisonedContextError."""
    binding = session.io_binding()
    binding.bind_input("x", "cuda", session.device.ordinal, array.dtype.type, array.shape, 0x7000)  # of nobody
    binding.bind_output("y", "cuda", session.device.ordinal)
    session.run_with_iobinding(binding)
    binding.copy_outputs_to_cpu()
