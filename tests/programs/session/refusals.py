"""Programs of ``tests/session/test_refusals.py``."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import onnxruntime

from ortgpu import GPUSession, PoisonedContextError
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, outcome, report

session = GPUSession(NEG)
session.device = Device("cuda", 0, None, "GPU", (9, 0), None, None)  # what happens to a GPU happens to this session
feed = feeds(1)[0]
value = onnxruntime.OrtValue.ortvalue_from_numpy(feed["x"])
binding = session.io_binding()
arguments = {
    "run": (None, feed),
    "run_async": (None, feed, print, None),
    "run_on_device": (None, feed),
    "run_with_iobinding": (binding,),
    "run_with_ort_values": (["y"], {"x": value}),
    "run_with_ortvaluevector": (None, [], [], [], [], []),
    "create_ortvalue_from_shape_and_type": ([4], np.float32, "cpu"),
    "map": ([feed],),
    "pinned_empty": (4,),
    "release_captured_graph": (1,),
    "set_ep_dynamic_options": ({"a": "b"},),
    "set_providers": (["CUDAExecutionProvider"],),
    "set_tuning_results": ([],),
    "warm": ([feed],),
}
# what ends a session, makes another, or only switches off what is off
others = {"close", "disable_fallback", "for_rank"}


def asked():
    names = [name for name in dir(GPUSession) if not name.startswith("_") and callable(getattr(GPUSession, name))]
    return {
        name: outcome(lambda name=name: repr(getattr(session, name)(*arguments.get(name, ()))))
        for name in [*names, "__enter__"]
        if name not in others
    }


def forked() -> None:
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        os.write(write, json.dumps(asked()).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    report([json.loads(open(read).read()), outcome(lambda: session.run(None, feed)[0].tolist())])


def closed() -> None:
    session.close()
    report([asked(), None])


def poisoned() -> None:
    lifetime.noted(PoisonedContextError("the GPU is lost", cuda_code=700))
    report([asked(), None])
