"""What ranks do that tests start with real launchers: ``rank_program.py '{"action": name, "arguments": {...}}'``.

Each writes what its action returned or raised to a file in the folder RANK_REPORTS. Imports nothing of the tests but
the lab's description of errors: it runs in the lab's environments too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

PROBE = Path(__file__).resolve().parents[1] / "lab" / "probe.py"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def who_am_i() -> Any:
    from ortgpu.distributed import current_rank

    return asdict(current_rank())


def identity() -> Any:
    from ortgpu.distributed import current_rank
    from ortgpu.environment.ranks import identity_of

    return identity_of(current_rank())


def meet(folder: str, timeout: float) -> Any:
    from ortgpu.distributed import current_rank
    from ortgpu.distributed.environment.shared_folder import meet_in_folder

    rank = current_rank()
    return asdict(meet_in_folder(folder, rank.rank, rank.world_size, timeout=timeout))


def preflight(
    timeout: float,
    misbehaving: dict[str, str] | None = None,
    calls: dict[str, list[list[Any]]] | None = None,
    address: str | None = None,
    variables: dict[str, dict[str, str]] | None = None,
    repeats: int = 1,
    disturbed: bool = False,
    late: dict[str, float] | None = None,
    apart: dict[str, Any] | None = None,
) -> Any:
    """By rank: ``misbehaving``, what its child does (rank_worker.py), or "absent"; ``calls``, each with how often;
    ``variables``; ``late``, seconds that it comes after the others. ``apart``: what is different in a Rank on a host of
    its own. ``disturbed``: others connect to the address before the last rank does, and stay.
    """
    from ortgpu.distributed import Collective, current_rank, preflighting
    from ortgpu.distributed import preflight as run

    number = str(current_rank().rank)
    kind = (misbehaving or {}).get(number)
    if kind == "absent":
        sys.exit(0)
    if kind is not None:
        vars(preflighting)["_BOOT"] = preflighting._BOOT.replace("ortgpu.distributed.worker", "rank_worker")
        os.environ["RANK_MISBEHAVES"] = kind
    os.environ.update((variables or {}).get(number, {}))
    time.sleep((late or {}).get(number, 0.0))
    others = _disturb(address) if disturbed and address and number != "0" else []
    planned = (calls or {}).get(number) or (calls or {}).get("all")
    given = None if planned is None else [Collective(*call) for *call, times in planned for _ in range(times)]
    rank = None if apart is None else dataclasses.replace(current_rank(), local_rank=0, local_world_size=1, **apart)
    for _ in range(repeats):
        report = run(timeout, rank=rank, address=address, calls=given)
    from ortgpu.environment.gpu.cuda import initialised_in

    return {**report.as_dict(), "disturbed_by": len(others), "cuda_used_here": initialised_in() is not None}


def _disturb(address: str) -> list[socket.socket]:
    """Whatever may be on a network: nonsense, a huge message, another program's greeting, another job, silence."""
    from ortgpu import __version__
    from ortgpu.distributed.meeting import parse_address
    from ortgpu.distributed.wire import encode

    hello = {
        "ortgpu": __version__,
        "proof": "of another job",
        "rank": 1,
        "world_size": 2,
        "host": "x",
        "seconds": [9, 9],
    }
    said = [b"\0\0\0\x05hello", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", encode(hello), encode({"rank": []}), b""]
    others = []
    for words in said:
        until = time.monotonic() + 10
        while True:
            try:
                other = socket.create_connection(parse_address(address), timeout=5)
            except ConnectionRefusedError:  # rank 0 is not there yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
                continue
            other.sendall(words)
            others.append(other)
            break
    return others


def claim(uuids: list[str], wait_for: int) -> Any:
    """Claim the GPU that the list names for this rank; stay until so many ranks have said what came of it."""
    from ortgpu.distributed import current_rank
    from ortgpu.provider.rank_devices import claim as claim_gpu

    rank = current_rank()
    try:
        claim_gpu(rank, uuids[rank.rank])
        claim_gpu(rank, uuids[rank.rank])
    finally:
        _wait_for_ranks(wait_for, "done")
    return uuids[rank.rank]


def open_session(model: str, **options: Any) -> Any:
    from ortgpu import GPUSession

    return str(GPUSession.for_rank(model, **options).device)


def place_session(model: str, ranks: int, variables: dict[str, dict[str, str]] | None = None) -> Any:
    """Where a session of this rank is, while all ranks have theirs: by CUDA's contexts, and by NVML: processes, and the
    GPUs that lost more than 100 MiB while all ranks opened theirs."""
    os.environ.update((variables or {}).get(_number(), {}))

    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.environment.gpu.cuda import context_is_active, initialise
    from ortgpu.environment.gpu.driver import processes_on, read_nvml

    def free() -> dict[str, int]:
        return {gpu.uuid: gpu.memory_free or 0 for gpu in read_nvml().gpus if gpu.uuid is not None}

    before = free()
    _wait_for_ranks(ranks, "measured")
    try:
        session = GPUSession.for_rank(model)
        feed = {}
        for entry in session.get_inputs():
            shape = [size if isinstance(size, int) else 1 for size in entry.shape]
            feed[entry.name] = np.zeros(shape, np.float32)
        session.run(None, feed)
    finally:
        _wait_for_ranks(ranks, "opened")
    after = free()
    devices = initialise().devices or ()
    seen = {
        "uuid": session.device.uuid,
        "pid": os.getpid(),
        "contexts": [device.uuid for device in devices if context_is_active(device.ordinal)],
        "processes": {device.uuid: sorted(processes_on(device.uuid or "")) for device in devices},
        "filled": [uuid for uuid, bytes_free in before.items() if bytes_free - after[uuid] > 100 << 20],
    }
    _wait_for_ranks(ranks, "looked")
    return seen


def run_out_of_memory(model: str, limit: int) -> Any:
    """A session of this rank with so many bytes of GPU memory, and an input that has more."""
    import numpy as np

    from ortgpu import GPUSession

    options = {"gpu_mem_limit": str(limit)}
    with GPUSession.for_rank(model, providers=[("CUDAExecutionProvider", options)]) as session:
        (entry,) = session.get_inputs()
        _wait_for_ranks(2, "opened")
        try:
            return len(session.run(None, {entry.name: np.zeros((limit // 4, *entry.shape[1:]), np.float32)}))
        finally:
            _wait_for_ranks(2, "ran")


def session_request(model: str, wait_for: int = 1) -> Any:
    """The ordinal that a session of this rank asks for; the lab's driver names devices and opens none."""
    from ortgpu import GPUSession

    asked: list[Any] = []

    class Session(GPUSession):
        def __init__(self, *_: Any, device: Any, **__: Any) -> None:
            asked.append(device)

    try:
        Session.for_rank(model)
    finally:
        if wait_for > 1:
            _wait_for_ranks(wait_for, "asked")
    return asked[0]


def _wait_for_ranks(count: int, suffix: str) -> None:
    """Until ``count`` ranks, this one among them, are here."""
    folder = Path(os.environ["RANK_REPORTS"]).parent
    (folder / f"{_number()}.{suffix}").touch()
    until = time.monotonic() + 20
    while len(list(folder.glob(f"*.{suffix}"))) < count and time.monotonic() < until:
        time.sleep(0.01)


def _number() -> str:
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")


ACTIONS: dict[str, Callable[..., Any]] = {
    action.__name__: action
    for action in (
        who_am_i,
        identity,
        meet,
        preflight,
        claim,
        open_session,
        place_session,
        run_out_of_memory,
        session_request,
    )
}


def main() -> None:
    task = json.loads(sys.argv[1])
    started = time.monotonic()
    outcome: dict[str, Any] = {"rank": int(_number()), "returned": None, "error": None}
    try:
        outcome["returned"] = ACTIONS[task["action"]](**task["arguments"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks about
        outcome["error"] = runpy.run_path(str(PROBE))["describe"](error)
    outcome["seconds"] = time.monotonic() - started
    path = Path(os.environ["RANK_REPORTS"], f"{outcome['rank']}.json")
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
