"""Many models in one budget: what is opened, closed and opened again, under threads, and what wrong use says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.cpu_session import child

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python

FILES = """
import onnx
from onnx import helper, numpy_helper
from ortgpu import GPUModels
def saved(name, factor, mebibytes=1):
    w = numpy_helper.from_array(np.full((mebibytes, (1 << 20) // 4), factor, np.float32), "w")
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Sub", ["s", "s"], ["i"]),
             helper.make_node("Gather", ["w", "i"], ["v"]), helper.make_node("Gather", ["v", "i"], ["g"], axis=1),
             helper.make_node("Squeeze", ["g"], ["m"]),
             helper.make_node("Mul", ["x", "m"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["n"])],
        [helper.make_tensor_value_info("y", 1, ["n"])], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), name)
    return name
x = {"x": np.ones(3, np.float32)}
def states(models):
    return [each.state for each in models.health()]
"""


def on_cpu(code: str, deadline: float = 60) -> Any:
    here = "import tempfile\nhere = tempfile.TemporaryDirectory()\nos.chdir(here.name)\n"
    return child(here + FILES + "names = [saved(f'{n}.onnx', n) for n in range(1, 5)]\n" + code, deadline=deadline)


def test_a_model_is_opened_at_its_first_use_and_by_any_spelling_of_its_path() -> None:
    found = on_cpu(
        """
from pathlib import Path
with GPUModels() as models:
    seen = [len(models), states(models), "1.onnx" in models]
    first = models["1.onnx"]
    seen += [first is models[Path("1.onnx").absolute()], states(models), first.run(None, x)[0].tolist(), states(models)]
    models.warm(["2.onnx", "1.onnx"])
    with models["2.onnx"].session() as session:
        seen.append([each[0].tolist() for each in session.map([x, x])])
    health = models.health()
    seen.append([[os.path.basename(each.path), each.opened, each.running, each.device, each.memory] for each in health])
    seen.append([os.path.basename(each) for each in models])
seen.append([states(models), outcome(lambda: models["1.onnx"].run(None, x))["type"], ortgpu.sessions() == ()])
models.close()
report(seen)
"""
    )
    assert found == [
        0, [], False, True, ["closed"], [1.0] * 3, ["open"], [[2.0] * 3] * 2,
        [["1.onnx", 1, 0, "cpu", None], ["2.onnx", 1, 0, "cpu", None]], ["1.onnx", "2.onnx"],
        [["closed", "closed"], "ExecutionError", True],
    ]  # fmt: skip


def test_what_is_idle_is_closed_and_opened_again_and_no_thread_is_left() -> None:
    found = on_cpu(
        """
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
"""
    )
    once = [[3.0] * 3, ["closed"], []]
    assert found == [once * 2, 2, ["open"], ["ortgpu-models"], []]


def test_a_handler_that_closes_amid_a_call_does_not_wait_for_it() -> None:
    found = on_cpu("""
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
""")
    assert found == [[["closed", "open"], 1.0], ["closed", "closed"], "ExecutionError", ["closed"] * 4, []]


def test_bad_paths_and_broken_models_raise_what_onnxruntime_raises() -> None:
    found = on_cpu(
        """
with open("broken.onnx", "wb") as file:
    file.write(b"none")
with GPUModels(budget="1GiB") as models:
    plain = [outcome(lambda each=each: __import__("onnxruntime").InferenceSession(os.path.abspath(each)))["type"]
             for each in ("missing.onnx", "broken.onnx")]
    ours = [outcome(lambda each=each: models[each].run(None, x))["type"] for each in ("missing.onnx", "broken.onnx")]
    again = outcome(lambda: models["missing.onnx"].run(None, x))["type"]
    wrong = [outcome(lambda each=each: models[each])["type"] for each in (b"1.onnx", 3, None)]
    saved("missing.onnx", 7)
    report([plain == ours, plain, again == plain[0], wrong, models["missing.onnx"].run(None, x)[0].tolist()])
"""
    )
    assert found == [True, ["NoSuchFile", "InvalidProtobuf"], True, ["TypeError"] * 3, [7.0] * 3]


def test_arguments_are_checked_when_it_is_made() -> None:
    found = on_cpu(
        """
wrong = [{"budget": "much"}, {"budget": 0}, {"budget": [1]}, {"idle": 0}, {"idle": -1.0}, {"idle": "5"}, {"idle": True},
         {"memory": "1GiB"}, {"devise": 0}, {"buget": 3}, {"cpu_nodes": "never"}, {"pinned_memory_limit": "x"}]
report([[outcome(lambda each=each: GPUModels(**each))["type"] for each in wrong],
        outcome(lambda: __import__("pickle").dumps(GPUModels()))["type"]])
"""
    )
    assert found[0] == [
        "ValueError", "ValueError", "TypeError", "ValueError", "ValueError", "TypeError", "TypeError", "TypeError",
        "TypeError", "TypeError", "ValueError", "ValueError",
    ]  # fmt: skip
    assert found[1] == "TypeError"


def test_on_the_cpu_the_budget_counts_nothing_and_the_log_says_so() -> None:
    found = on_cpu(
        """
said = []
class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ortgpu").addHandler(Kept())
with GPUModels(budget="1MiB") as models:
    results = [float(models[name].run(None, x)[0][0]) for name in names]
    report([results, states(models), sum("does not count it" in each for each in said)])
"""
    )
    assert found == [[1.0, 2.0, 3.0, 4.0], ["open"] * 4, 4]


def test_threads_use_models_that_come_and_go() -> None:
    """Sessions are closed under the threads that use them, as often as can be, and no call notices."""
    wrong, opened, left = on_cpu(
        """
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
for each in at_work: each.start()
time.sleep(2)
stop.set()
for each in at_work: each.join()
opened = sum(each.opened for each in models.health())
running = sum(each.running for each in models.health())
models.close()
report([wrong, opened, running])
"""
    )
    assert wrong == []
    assert opened > 8, "each model was closed and opened again"
    assert left == 0


ON_GPU = """
import ctypes, os, sys, threading, time, warnings
import numpy as np
warnings.simplefilter("ignore")
FILES
os.chdir(sys.argv[1])
from ortgpu import GPUSession
from ortgpu.running.cudart import runtime_on
names = [saved(f"{n}.onnx", n, 40) for n in range(6)]
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
    global highest
    while not stop.is_set():
        highest = max(highest, device_bytes() - before)
watcher = threading.Thread(target=watch)
watcher.start()
at_work = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
for each in at_work: each.start()
for each in at_work: each.join()
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
"""


@pytest.fixture(scope="module")
def used(module_lab: Lab, provider_library: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if reason := older_than(TELLS):
        pytest.skip(reason)
    code = ON_GPU.replace("FILES", FILES)
    folder = tmp_path_factory.mktemp("models")
    machine = module_lab.machine_that_places(provider_library)
    return machine.run(code, argv=[str(folder)], timeout=120).ok().json


def test_the_least_recently_used_are_closed_for_others(used: Any) -> None:
    assert used["least recently used"] == ["closed"] * 4 + ["open"] * 2
    assert used["then"] == ["open"] + ["closed"] * 3 + ["open", "closed"]
    memory = [each for each in used["memory"] if each is not None]
    assert len(memory) == 2
    assert sum(memory) <= 600 * MIB


def test_a_run_that_needs_more_gets_more_of_the_budget(used: Any) -> None:
    assert used["large"] == [30 << 18]
    state, opened, memory = used["after large"]
    assert (state, opened) == ("open", 3)
    assert memory > 254 * MIB


def test_a_run_beyond_the_budget_raises_and_the_models_go_on(used: Any) -> None:
    kind, text = used["too large"]
    assert kind == "GPUOutOfMemoryError"
    assert text.startswith("the session's budget of 600 MiB is reached")
    assert used["next"] == [3]


def test_eight_threads_stay_within_the_budget(used: Any) -> None:
    wrong, highest, running = used["threads"]
    assert wrong == []
    assert 40 * MIB < highest <= 600 * MIB
    assert running == 0
    assert used["closed"] == 0


def test_a_thread_does_not_wait_for_itself(used: Any) -> None:
    assert used["nested"].endswith("MiB of the budget are needed, but models in use hold the rest")
