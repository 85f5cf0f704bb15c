"""A process that has opened as many files as it may: the driver then fails with whatever code is at hand.

With fewer than 30 descriptors left, driver 580 on an H100 gave 304, 999, 100 and, from a context, 46, by how many.
"""

from __future__ import annotations

from ...errors import DriverUnusableError, Fix, on_linux, python
from ..facts import Facts
from ..messages.cuda_codes import returned_by_cuinit
from .visible import hides_everything

_NEEDED = 48  # that are left, to be sure: the driver opens its devices some 30 times for a first session
_ENOUGH = 65_536


def exhausted(facts: Facts) -> DriverUnusableError | None:
    """``cuInit`` was called and failed for it."""
    cuda = facts.observed.cuda
    if cuda is None or not cuda.code or hides_everything(facts.environment):
        return None
    return too_few_for(cuda.code, facts, [returned_by_cuinit(cuda.code)])


def too_few_for(code: int | None, facts: Facts, evidence: list[str]) -> DriverUnusableError | None:
    """``code``: what a CUDA call gave that opens files; None: it was not told."""
    files = facts.environment.host.open_files
    if files is None or files.limit - files.used >= _NEEDED:
        return None
    fixes: list[Fix] = []
    higher = min(files.hard_limit, max(_ENOUGH, 2 * files.limit))
    if higher >= files.used + _NEEDED:
        may = f"({higher}, resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
        fixes.append(python(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {may})"))
    fixes.append(
        on_linux(
            ("first of all in the program, or " if fixes else "")
            + "raise the limit of this process (ulimit -n, LimitNOFILE= of a service, docker run --ulimit "
            "nofile=65536), or let it close what it does not need; and restart it: the driver does not try again",
            needs="host",
        )
    )
    return DriverUnusableError(
        f"this process may open {files.limit} files and has {files.used} open: too few are left for CUDA",
        evidence=evidence,
        fixes=fixes,
        cuda_code=code,
    )
