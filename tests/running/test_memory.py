"""What a session holds, what it gives back, and in which order.

The arena is ONNX Runtime's own: on the CPU, and over libraries of CUDA that count memory and compute nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.running.memory import Holdings, SessionMemory
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.cpu_session import child

MIB = 1 << 20
TELLS = (1, 30)  # the first release that allocates from a session's arena for Python

pytestmark = pytest.mark.skipif(older_than(TELLS) is not None, reason=str(older_than(TELLS)))

GROWS = """
big, small = np.zeros((64, MIB // 4), np.float32), np.zeros((1, MIB // 4), np.float32)
text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'
"""


@pytest.fixture(scope="module")
def counted(module_lab: Lab, provider_library: str) -> Any:
    """What became of the memory of a device that counts it."""
    machine = module_lab.machine_that_places(provider_library)
    return machine.run(f"MIB = {MIB}\n" + COUNTED.replace("GROWS", GROWS)).ok().json


COUNTED = """
import ctypes, threading
import numpy as np, onnx.parser
from ortgpu import GPUSession
from ortgpu.running.cudart import runtime_on
GROWS
model = onnx.parser.parse_model(text).SerializeToString()
def held():
    return device_bytes() - before
def arena():
    return session.memory.arena
session = GPUSession(model)
device_bytes = runtime_on(0)._library.stub_device_bytes
device_bytes.restype = ctypes.c_size_t
session.close()
before, steps = device_bytes(), {}
def step(name):
    steps[name] = [held(), arena()]
for arguments in ({}, {"providers": [("CUDAExecutionProvider", {"gpu_mem_limit": str(1 << 30)})]}):
    session = GPUSession(model, **arguments)
    session.run(None, {"x": small})
    step("small")
    session.run(None, {"x": big})
    step("big")
    session.trim()
    step("trimmed")
    session.run(None, {"x": small})
    step("again")
    value = session.run_on_device(None, {"x": big})[0]
    step("kept")
    session.trim()
    step("trimmed with a value")
    del value
    session.trim()
    step("trimmed without")
    session.close()
    steps["closed"] = [held(), 0]
    report_to = "limited" if arguments else "unlimited"
    if not arguments:
        unlimited = dict(steps)
report({"unlimited": unlimited, "limited": steps})
"""


@pytest.mark.parametrize("limit", ["unlimited", "limited"])
def test_the_arena_is_measured_to_the_byte(counted: Any, limit: str) -> None:
    assert all(held == arena for held, arena in counted[limit].values()), counted[limit]


@pytest.mark.parametrize("limit", ["unlimited", "limited"])
def test_trimming_leaves_what_there_was_after_the_first_small_run(counted: Any, limit: str) -> None:
    steps = {name: held for name, (held, _) in counted[limit].items()}
    assert steps["big"] > steps["small"] + 64 * MIB
    assert steps["trimmed"] <= 1.1 * steps["small"]
    assert steps["again"] == steps["small"]
    assert steps["trimmed with a value"] >= 64 * MIB, "which the caller keeps"
    assert steps["trimmed without"] <= 1.1 * steps["small"]
    assert steps["closed"] == 0


def test_a_session_on_the_cpu_measures_its_arena_in_host_memory() -> None:
    sizes = child(
        f"MIB = {MIB}\n{GROWS}"
        """
session = GPUSession(model(text.partition("> ")[2]))
sizes = []
for feed in (small, big, None, small):
    session.run(None, {"x": feed}) if feed is not None else session.trim()
    sizes.append(session.memory.arena)
report([sizes, session.memory.pinned, session.memory.process, session.memory.budget])
"""
    )
    (first, grown, trimmed, again), *others = sizes
    assert grown > first + 64 * MIB
    assert trimmed <= first
    assert again == first
    assert others == [0, None, None]


def test_a_run_beside_a_trim_gives_the_right_result() -> None:
    wrong = child(
        f"MIB = {MIB}\n{GROWS}"
        """
session = GPUSession(model(text.partition("> ")[2]))
feeds = [np.full((1 << n, 1 << 12), n, np.float32) for n in range(8)]
wrong, stop = [], threading.Event()
def run():
    while not stop.is_set():
        for feed in feeds:
            (result,) = session.run(None, {"x": feed})
            if not np.array_equal(result, feed):
                wrong.append(feed.shape)
at_work = [threading.Thread(target=run) for _ in range(2)]
for each in at_work: each.start()
for _ in range(500): session.trim()
stop.set()
for each in at_work: each.join()
report(wrong)
"""
    )
    assert wrong == []


def test_weights_are_those_of_the_file_until_it_changes() -> None:
    found = child(
        """
import onnx, tempfile
from onnx import helper, numpy_helper
here = tempfile.TemporaryDirectory()
os.chdir(here.name)
def saved(rows, path):
    w = numpy_helper.from_array(np.ones((rows, 4), np.float16), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", 10, ["n", rows])], [helper.make_tensor_value_info("y", 10, ["n", 4])], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
saved(500, "a.onnx")
first = GPUSession("a.onnx")
sizes = [first.memory.weights]
second = GPUSession("a.onnx")
saved(900, "b.onnx")
os.replace("b.onnx", "a.onnx")
sizes += [first.memory.weights, second.memory.weights, GPUSession("a.onnx").memory.weights]
sizes.append(GPUSession(open("a.onnx", "rb").read()).memory.weights)
report(sizes)
"""
    )
    assert found == [4000, 4000, None, 7200, 7200]


def test_a_closed_session_has_no_memory_to_tell_of() -> None:
    found = child(
        """
session = GPUSession(NEG)
session.close()
report([outcome(lambda: session.memory), outcome(session.trim)])
"""
    )
    assert [each["type"] for each in found] == ["ExecutionError", "ExecutionError"]


def test_a_subclass_may_have_a_memory_of_its_own() -> None:
    found = child(
        """
class Named(GPUSession):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory = "of names"
report(Named(NEG).memory)
"""
    )
    assert found == "of names"


class Kept:
    """A holder that notes when it is asked to give back."""

    def __init__(self, name: str, size: int | None, log: list[str]) -> None:
        self.name, self.size, self.log = name, size, log

    def bytes_held(self) -> int | None:
        return self.size

    def give_back(self) -> None:
        self.log.append(self.name)
        self.size = 0


def test_holders_are_counted_by_part_and_give_back_plans_first() -> None:
    log: list[str] = []
    holdings = Holdings()
    graphs, plans, more = Kept("graphs", 5, log), Kept("plans", 3, log), Kept("more", 4, log)
    for part, holder in (("graphs", graphs), ("plans", plans), ("plans", more)):
        holdings.add(part, holder)  # type: ignore[arg-type]  # a name out of a tuple
    assert (holdings.bytes_of("plans"), holdings.bytes_of("graphs")) == (7, 5)
    holdings.give_back()
    assert log == ["plans", "more", "graphs"]
    assert holdings.bytes_of("plans") == 0
    holdings.remove(more)
    plans.size = None
    assert holdings.bytes_of("plans") is None
    holdings.remove(plans)
    assert holdings.bytes_of("plans") == 0


def test_it_is_printed_as_a_line_for_each_part() -> None:
    lines = str(SessionMemory(None, 3 * MIB, 4 * MIB + MIB // 2, None, 0, 0, 1 << 30, None)).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "weights", "arena, with the weights", "arena, in use", "plans for further shapes", "captured CUDA graphs",
        "pinned host memory", "this process on the GPU",
    ]  # fmt: skip
    assert lines[1].split()[-2:] == ["4.5", "MiB"]
    assert lines[2].split()[-1] == "unknown"
    assert str(SessionMemory(MIB, 0, 0, 0, 0, 0, 0, 0)).startswith("budget")
