"""Sessions that travel through multiprocessing and do not open where they arrive: ``received_sessions.py MODEL WAY``.

The session is on the CPU, which a variable allows here and not where it arrives.
"""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ortgpu import GPUSession, errors
from tests.support.children import report

ALLOWED = "ORTGPU_ALLOW_CPU"
_received: Any = None


def run(session: GPUSession) -> Any:
    return session.run(None, {"x": np.ones(4, np.float32)})[0].tolist()


def receive(session: GPUSession) -> None:
    global _received
    _received = session


def run_received(_: object) -> Any:
    return run(_received)


def look(session: GPUSession) -> dict[str, str]:
    """Use a session in every way."""
    uses: dict[str, Callable[[], object]] = {
        "run": lambda: run(session),
        "run_on_device": lambda: session.run_on_device(None, {"x": np.ones(4, np.float32)}),
        "map": lambda: list(session.map([{"x": np.ones(4, np.float32)}])),
        "io_binding": session.io_binding,
        "get_inputs": session.get_inputs,
        "get_providers": session.get_providers,
        "device": lambda: session.device,
        "placement": lambda: session.placement,
        "options_chosen": lambda: session.options_chosen,
        "batched": session.batched,
        "pinned_empty": lambda: session.pinned_empty(4),
        "set_providers": lambda: session.set_providers(["CUDAExecutionProvider"]),
        "explain_placement": session.explain_placement,
        "with": session.__enter__,
        "repr": lambda: repr(session),
        "sessions": lambda: len(__import__("ortgpu").sessions()),
        "close": session.close,
    }
    return {name: outcome(use) for name, use in uses.items()}


def open_there(model: str) -> GPUSession:
    return GPUSession(model, allow_cpu=None)


def allow(value: str) -> None:
    os.environ[ALLOWED] = value


def outcome(action: Callable[[], object]) -> str:
    try:
        return f"returned {action()}"
    except errors.GPUError:
        return "GPUError"
    except Exception as error:
        return type(error).__name__


def travel(way: str, model: str) -> Any:
    session = GPUSession(model)
    os.environ[ALLOWED] = "0"
    name, _, method = way.partition(" ")
    context: Any = multiprocessing.get_context(method or None)
    if name == "argument":
        with context.Pool(1) as pool:
            return outcome(lambda: pool.apply_async(run, (session,)).get())
    if name == "uses":
        with context.Pool(1) as pool:
            return pool.apply_async(look, (session,)).get()
    if name == "initializer":
        with context.Pool(1, receive, (session,)) as pool:
            return outcome(lambda: pool.map(run_received, [1]))
    if name == "executor":
        with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
            return outcome(executor.submit(run, session).result)
    if name == "result":
        with context.Pool(1, allow, ("1",)) as pool:
            return outcome(lambda: run(pool.apply_async(open_there, (model,)).get()))
    if name == "file":
        session = GPUSession(model, allow_cpu=True)
        os.remove(model)
        with context.Pool(1) as pool:
            return outcome(lambda: pool.apply_async(run, (session,)).get())
    if name == "again":
        reader, writer = context.Pipe(duplex=False)
        writer.send(session)
        received = reader.recv()
        os.environ[ALLOWED] = "1"
        return [outcome(lambda: run(received)), run(pickle.loads(pickle.dumps(received)))]
    return [outcome(lambda: pickle.loads(pickle.dumps(session))), outcome(lambda: copy.copy(session))]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report("json", travel(sys.argv[2], sys.argv[1]))
