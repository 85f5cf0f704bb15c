"""Programs of ``tests/session/test_models.py``."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
import time

import numpy as np
import onnx
from onnx import helper, numpy_helper

import ortgpu
from ortgpu import GPUModels
from tests.programs.on_cpu import outcome, report, threads


def saved(name, factor, mebibytes=1):
    w = numpy_helper.from_array(np.full((mebibytes, (1 << 20) // 4), factor, np.float32), "w")
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Sub", ["s", "s"], ["i"]),
        helper.make_node("Gather", ["w", "i"], ["v"]),
        helper.make_node("Gather", ["v", "i"], ["g"], axis=1),
        helper.make_node("Squeeze", ["g"], ["m"]),
        helper.make_node("Mul", ["x", "m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])], [helper.make_tensor_value_info("y", 1, ["n"])], [w]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), name)
    return name


x = {"x": np.ones(3, np.float32)}


def states(models):
    return [each.state for each in models.health()]


here = tempfile.TemporaryDirectory()
os.chdir(here.name)
names = [saved(f"{n}.onnx", n) for n in range(1, 5)]


def a_model_is_opened_at_its_first_use_and_by_any_spelling_of_its_path() -> None:
    from pathlib import Path

    with GPUModels() as models:
        seen = [len(models), states(models), "1.onnx" in models]
        first = models["1.onnx"]
        seen += [
            first is models[Path("1.onnx").absolute()],
            states(models),
            first.run(None, x)[0].tolist(),
            states(models),
        ]
        models.warm(["2.onnx", "1.onnx"])
        with models["2.onnx"].session() as session:
            seen.append([each[0].tolist() for each in session.map([x, x])])
        health = models.health()
        seen.append(
            [[os.path.basename(each.path), each.opened, each.running, each.device, each.memory] for each in health]
        )
        seen.append([os.path.basename(each) for each in models])
    seen.append([states(models), outcome(lambda: models["1.onnx"].run(None, x))["type"], ortgpu.sessions() == ()])
    models.close()
    report(seen)


def what_is_idle_is_closed_and_opened_again_and_no_thread_is_left() -> None:
    models = GPUModels(idle=0.05)
    results = []
    for _ in range(2):
        results.append(models["3.onnx"].run(None, x)[0].tolist())
        until = time.monotonic() + 30
        while states(models) != ["closed"] and time.monotonic() < until:
            time.sleep(0.01)
        while threads() and time.monotonic() < until:
            time.sleep(0.01)
        results += [states(models), threads()]
    opened = models.health()[0].opened
    with models["3.onnx"].session():
        time.sleep(0.3)
        used = states(models)
    models.close()
    models = GPUModels(idle=1000)
    models["3.onnx"].run(None, x)
    waiting = threads()
    del models
    gc.collect()
    until = time.monotonic() + 30
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    report([results, opened, used, waiting, threads()])


def a_handler_that_closes_amid_a_call_does_not_wait_for_it() -> None:
    import signal

    models = GPUModels(allow_cpu=True, idle=60)
    models[names[1]].run(None, x)
    with models[names[0]].session() as session:
        models.close()  # as a handler does
        inside = [states(models), float(session.run(None, x)[0][0])]
    found = [inside, states(models), outcome(lambda: models[names[1]].run(None, x))["type"]]

    models = GPUModels(allow_cpu=True, idle=60)
    signal.signal(signal.SIGALRM, lambda *_: models.close())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        while True:
            for name in names:
                models[name].run(None, x)
    except ortgpu.ExecutionError:
        report([*found, states(models), threads()])


def bad_paths_and_broken_models_raise_what_onnxruntime_raises() -> None:
    with open("broken.onnx", "wb") as file:
        file.write(b"none")
    with GPUModels(budget="1GiB") as models:
        plain = [
            outcome(lambda each=each: __import__("onnxruntime").InferenceSession(os.path.abspath(each)))["type"]
            for each in ("missing.onnx", "broken.onnx")
        ]
        ours = [
            outcome(lambda each=each: models[each].run(None, x))["type"] for each in ("missing.onnx", "broken.onnx")
        ]
        again = outcome(lambda: models["missing.onnx"].run(None, x))["type"]
        wrong = [outcome(lambda each=each: models[each])["type"] for each in (b"1.onnx", 3, None)]
        saved("missing.onnx", 7)
        report([plain == ours, plain, again == plain[0], wrong, models["missing.onnx"].run(None, x)[0].tolist()])


def arguments_are_checked_when_it_is_made() -> None:
    wrong = [
        {"budget": "much"},
        {"budget": 0},
        {"budget": [1]},
        {"idle": 0},
        {"idle": -1.0},
        {"idle": "5"},
        {"idle": True},
        {"memory": "1GiB"},
        {"devise": 0},
        {"buget": 3},
        {"cpu_nodes": "never"},
        {"pinned_memory_limit": "x"},
    ]
    report(
        [
            [outcome(lambda each=each: GPUModels(**each))["type"] for each in wrong],
            outcome(lambda: __import__("pickle").dumps(GPUModels()))["type"],
        ]
    )


def on_the_cpu_the_budget_counts_nothing_and_the_log_says_so() -> None:
    said = []

    class Kept(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("ortgpu").addHandler(Kept())
    with GPUModels(budget="1MiB") as models:
        results = [float(models[name].run(None, x)[0][0]) for name in names]
        report([results, states(models), sum("does not count it" in each for each in said)])


def threads_use_models_that_come_and_go() -> None:
    models = GPUModels()
    wrong, stop = [], threading.Event()

    def use(seed):
        order = np.random.default_rng(seed)
        while not stop.is_set():
            n = int(order.integers(1, 5))
            try:
                (result,) = models[f"{n}.onnx"].run(None, x)
                if result.tolist() != [float(n)] * 3:
                    wrong.append([n, result.tolist()])
            except Exception as error:
                wrong.append(repr(error))

    def close():
        while not stop.is_set():
            for name in names:
                with models._lock:
                    models._close(models[name])

    at_work = [threading.Thread(target=use, args=(seed,)) for seed in range(4)] + [threading.Thread(target=close)]
    for each in at_work:
        each.start()
    time.sleep(2)
    stop.set()
    for each in at_work:
        each.join()
    opened = sum(each.opened for each in models.health())
    running = sum(each.running for each in models.health())
    models.close()
    report([wrong, opened, running])
