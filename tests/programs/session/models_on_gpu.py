"""The program of ``tests/session/test_models.py`` on a machine that counts memory."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from ortgpu import GPUModels, GPUSession
from tests.programs.on_cpu import report
from tests.programs.session.models import names, saved, states, x


def on_gpu() -> None:
    import ctypes

    os.chdir(sys.argv[1])
    from ortgpu.running.cudart import runtime_on

    names[:] = [saved(f"{n}.onnx", n, 40) for n in range(6)]
    GPUSession(names[0]).close()
    device_bytes = runtime_on(0)._library.stub_device_bytes
    device_bytes.restype = ctypes.c_size_t
    before = device_bytes()
    found = {}

    models = GPUModels(budget="600MiB")  # two shares of 254 MiB, or one and what a large run needs
    for name in names:
        models[name].run(None, x)
    found["least recently used"] = states(models)
    models[names[4]].run(None, x)
    models[names[0]].run(None, x)
    found["then"] = states(models)
    found["memory"] = [each.memory for each in models.health()]
    large = {"x": np.ones(30 << 18, np.float32)}
    found["large"] = models[names[0]].run(None, large)[0].shape
    found["after large"] = [states(models)[0], models.health()[0].opened, models.health()[0].memory]
    try:
        models[names[1]].run(None, {"x": np.ones(400 << 18, np.float32)})
    except MemoryError as error:
        found["too large"] = [type(error).__name__, str(error).splitlines()[0]]
    found["next"] = models[names[1]].run(None, x)[0].shape

    highest, wrong, stop = 0, [], threading.Event()

    def use(seed):
        order = np.random.default_rng(seed)
        for _ in range(6):
            rows = int(order.choice([3, 1000, 10 << 18]))
            try:
                (result,) = models[names[int(order.integers(6))]].run(None, {"x": np.ones(rows, np.float32)})
                if result.shape != (rows,):
                    wrong.append(result.shape)
            except Exception as error:
                wrong.append(repr(error))

    def watch():
        nonlocal highest
        while not stop.is_set():
            highest = max(highest, device_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    at_work = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for each in at_work:
        each.start()
    for each in at_work:
        each.join()
    stop.set()
    watcher.join()
    found["threads"] = [wrong, highest, sum(each.running for each in models.health())]

    with models[names[2]].session() as session:
        shares = sum(each.memory or 0 for each in models.health())
        try:
            with models[names[3]].session(), models[names[4]].session(), models[names[5]].session():
                found["nested"] = "opened"
        except MemoryError as error:
            found["nested"] = str(error).splitlines()[0]
    models.close()
    found["closed"] = device_bytes() - before
    report(found)
