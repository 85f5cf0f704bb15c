"""Measurements of the benchmarks inside one process, alternately.

Started in a child, as ``workers.py NAME '{"argument": value}'``.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortgpu.process.timing import alternate
from tests.support.children import report
from tests.support.plain_session import PLAIN_PROVIDERS, plain_session
from tests.support.this_machine import mapped_files


def feed_of(session: Any, batch: int = 1, seed: int | None = None) -> dict[str, Any]:
    """Return zeros for every input, or random numbers with a seed; free dimensions are ``batch``."""
    import numpy as np

    def array(shape: list[int]) -> Any:
        return np.zeros(shape, np.float32) if seed is None else np.random.default_rng(seed).random(shape, np.float32)

    inputs = session.get_inputs()
    return {each.name: array([n if isinstance(n, int) else batch for n in each.shape]) for each in inputs}


def report_turns(
    actions: Mapping[str, Callable[[], float]], rounds: int, *, count: int = 1, name: str = "seconds"
) -> None:
    """Report the seconds of each action, divided by ``count``; after each round, so that a deadline loses none."""

    def told(seconds: Mapping[str, Sequence[float]]) -> None:
        report(name, {action: [each / count for each in taken] for action, taken in seconds.items()})

    alternate(actions, rounds, told)


def construct(model: str, rounds: int, *, with_options: bool = False) -> None:
    """Report the seconds of the constructor in a warm process, without those of freeing the session.

    ``with_options``: with SessionOptions.
    """
    import onnxruntime

    from ortgpu import GPUSession

    def arguments() -> dict[str, Any]:
        return {"sess_options": onnxruntime.SessionOptions()} if with_options else {}

    makers = {"ours": functools.partial(GPUSession, model), "plain": functools.partial(plain_session, model)}
    _construct_in_turns(makers, rounds, arguments)


def construct_on_cpu(model: str, rounds: int) -> None:
    """Measure as :func:`construct`, with the CPU allowed where there is no GPU."""
    import logging
    import warnings

    import onnxruntime

    from ortgpu import GPUSession
    from ortgpu.provider.options import recording_options
    from ortgpu.provider.placement import read_placement

    logging.getLogger("ortgpu").addHandler(logging.NullHandler())  # each session says that it is on the CPU
    warnings.simplefilter("ignore")

    def with_placement() -> Any:
        session = onnxruntime.InferenceSession(model, recording_options(), PLAIN_PROVIDERS[1:])
        read_placement(session, without_options=True)
        return session

    makers: dict[str, Callable[..., Any]] = {
        "ours": functools.partial(GPUSession, model, allow_cpu=True),
        "plain": functools.partial(plain_session, model, "cpu"),
        "plain, placement read": with_placement,
    }
    _construct_in_turns(makers, rounds)


def _construct_in_turns(
    makers: Mapping[str, Callable[..., Any]], rounds: int, arguments: Callable[[], dict[str, Any]] = dict
) -> None:
    def seconds(make: Callable[..., Any]) -> Callable[[], float]:
        def action() -> float:
            given = arguments()
            gc.collect()
            started = time.perf_counter()
            session = make(**given)
            taken = time.perf_counter() - started
            if hasattr(session, "close"):
                session.close()
            del session
            gc.collect()
            return taken

        return action

    actions = {name: seconds(make) for name, make in makers.items()}
    alternate(actions, 2)
    report_turns(actions, rounds)


def run(model: str, rounds: int, calls: int) -> None:
    """Report the mean seconds of a call, by blocks of calls.

    Two plain sessions differ by a microsecond, by where their memory happens to lie. "inherited" is therefore plain
    ONNX Runtime's ``run`` on our own session: what differs is only what we add.
    """
    import onnxruntime

    from ortgpu import GPUSession

    ours = GPUSession(model)
    inherited = functools.partial(onnxruntime.InferenceSession.run, ours)
    runs = {
        "ours": ours.run,
        "inherited": inherited,
        "plain": plain_session(model).run,
        "plain again": plain_session(model).run,
    }
    feed = feed_of(ours)

    def seconds(run: Callable[..., Any]) -> Callable[[], float]:
        def action() -> float:
            started = time.perf_counter()
            for _ in range(calls):
                run(None, feed)
            return (time.perf_counter() - started) / calls

        return action

    actions = {name: seconds(each) for name, each in runs.items()}
    alternate(actions, 3)
    gc.collect()
    gc.disable()
    report_turns(actions, rounds)
    device = ours.device
    report("device", {"name": device.name, "uuid": device.uuid, "driver_version": device.driver_version})


def locate(model: str) -> None:
    """Report the folders of the CUDA and cuDNN libraries of a working session, for a process that must be told."""
    from ortgpu import GPUSession

    with GPUSession(model) as session:
        session.run(None, feed_of(session))
        paths = mapped_files()
    for name, start in (("cuda", "libcublas.so"), ("cudnn", "libcudnn.so")):
        report(
            name, next((path.rpartition("/")[0] for path in paths if path.rpartition("/")[2].startswith(start)), None)
        )


WORKERS: dict[str, Callable[..., None]] = {
    "construct": construct,
    "construct_on_cpu": construct_on_cpu,
    "run": run,
    "locate": locate,
}


if __name__ == "__main__":
    from benchmarks import pool_workers, throughput_workers

    workers = dict(WORKERS)
    for module in (pool_workers, throughput_workers):
        workers.update(module.WORKERS)

    try:
        workers[sys.argv[1]](**json.loads(sys.argv[2]))
    except BaseException:
        report("error", traceback.format_exc())
        raise
