"""Sessions that are made with their weights in place: what a caller, a tracer and a log notice of it. On the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from ortgpu.provider.runtime import load_runtime
from ortgpu.session.weights import _FIRST
from tests.session.test_weights import large_model, matrix
from tests.support.cpu_session import child
from tests.support.networks import CHANNELS, Network

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(load_runtime().release < _FIRST, reason="of ONNX Runtime 1.31 and newer"),
]

SETUP = """
import weakref
import onnxruntime
from onnxruntime import InferenceSession
from onnxruntime.capi import onnxruntime_inference_collection as collection
from ortgpu.model.outline import GraphOutline
from ortgpu.session import opening, weights
from ortgpu.provider import requests as providers
from ortgpu.provider.runtime import load_runtime
from ortgpu.session.plan import Plan
from ortgpu.session.request import SessionRequest

CPU = providers.parse(["CPUExecutionProvider"], None)
GIVEN = providers.parse([("CUDAExecutionProvider", {"enable_cudnn": "1"}), "CPUExecutionProvider"], None)
path = sys.argv[1]

def construct(model=path):
    session = InferenceSession.__new__(InferenceSession)
    plan = Plan(SessionRequest(model, providers=GIVEN), CPU)
    opened = opening._open_with_choices(session, session.__init__, plan, GraphOutline(model), load_runtime())
    return session, opened and opened[0].chosen

memories = []
def watched(outline, plain=opening.weights_in_place):
    found = plain(outline)
    if found is not None:
        memories.append(weakref.ref(found._memory))
    return found
opening.weights_in_place = watched

def is_in_memory():
    gc.collect()
    [memory] = memories
    return memory() is not None
"""


def constructed(path: Path, code: str) -> Any:
    return child(SETUP + code, str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a-model-of-this-test.onnx"
    onnx.save(large_model(), path)
    return path


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """ONNX Runtime refuses it however it is opened."""
    path = tmp_path / "a-wrong-model-of-this-test.onnx"
    model = large_model()
    model.graph.node[0].op_type = "Unheard"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("where", ["(weights, 'with_values_elsewhere')", "(collection.C, 'InferenceSession')"])
@pytest.mark.parametrize("kind", ["Exception", "OSError"])
def test_what_a_handler_of_a_signal_raises_is_not_lost(path: Path, where: str, kind: str) -> None:
    """The time limit of a job: without it the model would be opened again, without one."""
    found = constructed(path, f"""
class TimeLimit({kind}):
    pass
def limit(*_):
    raise TimeLimit("of the job")
signal.signal(signal.SIGALRM, limit)
def slow(*_, **__):
    signal.raise_signal(signal.SIGALRM)
setattr(*{where}, slow)
report(outcome(construct))
""")  # fmt: skip
    assert found == {"type": "TimeLimit", "text": "of the job"}


def test_a_log_that_keeps_its_records_keeps_nothing_of_a_session(refused: Path) -> None:
    """As those of test runners and error trackers do."""
    found = constructed(refused, """
class Keeping(logging.Handler):
    kept = []
    def emit(self, record):
        self.kept.append(record)
logging.getLogger("ortgpu").addHandler(Keeping())
logging.getLogger("ortgpu").setLevel(logging.DEBUG)
session, options = construct()
del session
report([options, "Unheard" in Keeping.kept[0].getMessage(), is_in_memory()])
""")  # fmt: skip
    assert found == [None, True, False]


@pytest.mark.parametrize("guard", ["", "ortgpu.install()", "ortgpu.install(); ortgpu.install()"])
def test_a_guard_is_no_tracer(path: Path, guard: str) -> None:
    found = constructed(path, f"{guard}\nsession, options = construct()\nreport([options, is_in_memory()])")
    assert found == [{}, True]


@pytest.mark.parametrize("guard", ["", "ortgpu.install()"])
def test_a_tracer_sees_the_model_that_the_caller_named(path: Path, guard: str) -> None:
    found = constructed(path, f"""
import functools
seen, plain = [], InferenceSession.__init__
@functools.wraps(plain)
def traced(self, path_or_bytes, *given, **named):
    seen.append(path_or_bytes)
    plain(self, path_or_bytes, *given, **named)
InferenceSession.__init__ = traced
{guard}
construct()
InferenceSession(path, providers=["CPUExecutionProvider"])
report([each == path for each in seen])
""")  # fmt: skip
    assert found == [True]


def test_a_model_that_names_a_weight_twice_opens_as_ever(tmp_path: Path) -> None:
    """With the last of them, says ONNX Runtime."""
    model = large_model()
    model.graph.initializer.append(numpy_helper.from_array(matrix(2), "m"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert constructed(path, "report(construct()[1])") is None


def test_a_weight_that_no_node_takes_costs_no_second_attempt(tmp_path: Path) -> None:
    model = large_model()
    model.graph.initializer.append(numpy_helper.from_array(matrix(2)[:500], "unused"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert constructed(path, "report(construct()[1])") == {}


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_chosen_for_a_file_is_not_for_the_one_that_replaces_it(tmp_path: Path, replaced: bool) -> None:
    """A layout that suits the old model can make wrong results of the new one, whose weights are computed."""
    path, new, record = tmp_path / "model.onnx", tmp_path / "new.onnx", tmp_path / "record.json"
    network = Network(0)
    network.conv()
    path.write_bytes(network.model())
    network.add("Conv", "x", network.add("Mul", network.weights(CHANNELS, CHANNELS, 1, 1), network.number(2)))
    new.write_bytes(network.model())
    found = child(f"""{SETUP}
from pathlib import Path
from ortgpu.provider.records import Choice, Record, key_of
given = providers.parse(["CUDAExecutionProvider", "CPUExecutionProvider"], None)
new, record = sys.argv[2:]
best = Choice({{"layout": "channels-last, biases fused"}}, 0.6)
Record(key_of(GraphOutline(path), None), best, best).write(Path(record))
def replacing(plan, release, outline, record, plain=opening.for_model):
    chosen = plain(plan, release, outline, record)
    if {replaced}:
        os.replace(new, outline.model)
    return chosen
opening.for_model = replacing
session = InferenceSession.__new__(InferenceSession)
plan = Plan(SessionRequest(path, providers=given, tuned=record), CPU, gpu=None)
opened = opening._open_with_choices(session, session.__init__, plan, GraphOutline(path), load_runtime())
report([opened is not None and "prefer_nhwc" in opened[0].chosen, hasattr(session, "_sess")])
""", str(path), str(new), str(record))  # fmt: skip
    assert found == [not replaced, not replaced]
