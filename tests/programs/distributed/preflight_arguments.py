"""Programs of ``tests/distributed/test_preflight_arguments.py``."""

from __future__ import annotations


def a_resolver_that_never_answers() -> None:
    import ortgpu
    from ortgpu.distributed import Rank, preflight

    try:
        preflight(4, rank=Rank(1, 2, 0, 1), address="node1:23456")
    except ortgpu.RendezvousError as error:
        print(error.ranks, error.evidence[-1])


def a_disk_without_room() -> None:
    import resource

    import ortgpu
    from ortgpu.distributed import Rank, preflight

    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        preflight(4, rank=Rank(0, 2, 0, 2, "openmpi"))
    except ortgpu.RendezvousError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(error.summary)


def a_daemon_without_standard_streams() -> None:
    import os
    import sys

    found = os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 50)
    os.closerange(0, 50)
    from ortgpu.distributed import preflight

    try:
        preflight(20)
    except Exception as error:
        os.write(found, str(error).encode())
