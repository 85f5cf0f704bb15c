"""What a process of its own makes of a failure that no check explains: it is the machine's, or this process's alone."""

from __future__ import annotations

import logging
import time

from ...environment.gpu.cuda import CudaState
from ...errors import GPUError, ProviderFallbackError, manual
from .. import find_problems, inspect_after, observed_by
from ..facts import Facts
from .parent import run_probe
from .result import ProbeResult

logger = logging.getLogger("ortgpu")

_PATIENCE = 20.0  # seconds
_GOOD_FOR = 60.0  # seconds: a server that tries again and again does not start a process each time

_last: tuple[float, ProbeResult] | None = None


def explained_elsewhere(error: ProviderFallbackError, cuda: CudaState | None) -> GPUError:
    """``error``, or what really opening driver, libraries, provider and a small session in a child process finds.

    Takes seconds, and twenty at most; what was found is good for a minute. ``cuda``: the driver's answer to this
    process. A GPU that serves one process at a time would refuse the child for this one, so that none is started.
    """
    if cuda is not None and any(device.compute_mode not in (None, 0) for device in cuda.devices or ()):
        return error
    probe = _probe()
    problems = find_problems(Facts(inspect_after(probe), observed=observed_by(probe)))
    found = [each for each in problems if each.severity == "fatal"]
    known = next((each for each in found if not isinstance(each, ProviderFallbackError)), None)
    if known is not None:
        return known.with_others((*(each for each in found if each is not known), error))
    if found:
        error.evidence = (*error.evidence, f"in a process of its own: {found[0].summary}", *found[0].evidence)
        error.fixes = (*error.fixes, *found[0].fixes)
        return error
    session = probe.step("session")
    if session is not None and session.ok:
        error.evidence = (*error.evidence, "a process of its own opened a small session on the GPU and ran it")
        error.fixes = (
            *error.fixes,
            manual(
                "start this process anew; if it comes again, open its first GPUSession before it loads other libraries "
                "that use CUDA"
            ),
        )
    return error


def _probe() -> ProbeResult:
    global _last
    if _last is None or time.monotonic() - _last[0] > _GOOD_FOR:
        logger.info("no check explains why a session does not open: one is tried in a process of its own")
        probe = run_probe(timeout=_PATIENCE)
        _last = time.monotonic(), probe
    return _last[1]
