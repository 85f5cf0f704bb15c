"""A session is opened with what suits its model: what a caller, a signal's handler and a log notice of it.

And a file that a writer changes meanwhile ends no process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpu.provider.runtime import load_runtime
from tests.lab.fixtures import Lab
from tests.support.cpu_session import child
from tests.support.networks import CHANNELS, Network

since_131 = pytest.mark.skipif(load_runtime().release < (1, 31), reason="options are chosen since ONNX Runtime 1.31")

SETUP = """
import weakref
import onnxruntime
from onnxruntime import InferenceSession
from onnxruntime.capi import onnxruntime_inference_collection as collection
from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.model.outline import GraphOutline
from ortgpu.session import opening
from ortgpu.provider import requests as providers
from ortgpu.provider.runtime import load_runtime
from ortgpu.session.plan import Plan
from ortgpu.session.request import SessionRequest

CPU = providers.parse(["CPUExecutionProvider"], None)
GIVEN = providers.parse(["CUDAExecutionProvider", "CPUExecutionProvider"], None)
path = sys.argv[1]

def construct(**arguments):
    session = InferenceSession.__new__(InferenceSession)
    plan = Plan(SessionRequest(path, providers=GIVEN, **arguments), CPU, gpu=None, chosen=providers.CHOSEN_OPTIONS)
    ready = opening.Ready(plan, load_runtime(), CudaState(0, None, None))
    opened = opening.open_with_choices(session, session.__init__, ready, GraphOutline(path))
    return session, opened and opened.plan.chosen
"""


def matrix_model(side: int, operator: str = "MatMul") -> Any:
    """A product of the input with a matrix; a session on CUDA needs no cuDNN for it, which is an option to choose."""
    matrix = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "m"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", side])],
        [numpy_helper.from_array(matrix, "m")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a-model-of-this-test.onnx"
    onnx.save(matrix_model(4), path)
    return path


@since_131
@pytest.mark.parametrize("kind", ["Exception", "OSError"])
def test_what_a_handler_of_a_signal_raises_is_not_lost(path: Path, kind: str) -> None:
    """The time limit of a job: without it the model would be opened again, without one."""
    found = child(f"""{SETUP}
class TimeLimit({kind}):
    pass
def limit(*_):
    raise TimeLimit("of the job")
signal.signal(signal.SIGALRM, limit)
def slow(*_, **__):
    signal.raise_signal(signal.SIGALRM)
collection.C.InferenceSession = slow
report(outcome(construct))
""", str(path))  # fmt: skip
    assert found == {"type": "TimeLimit", "text": "of the job"}


@since_131
def test_a_log_that_keeps_its_records_keeps_nothing_of_a_session(tmp_path: Path) -> None:
    """As those of test runners and error trackers do."""
    path = tmp_path / "a-wrong-model-of-this-test.onnx"
    onnx.save(matrix_model(4), path)
    found = child(f"""{SETUP}
class Keeping(logging.Handler):
    kept = []
    def emit(self, record):
        self.kept.append(record)
def refusing(*_, **__):
    raise RuntimeError("refused by this test")
collection.C.InferenceSession = refusing
logging.getLogger("ortgpu").addHandler(Keeping())
logging.getLogger("ortgpu").setLevel(logging.DEBUG)
session, options = construct()
made = weakref.ref(session)
del session
gc.collect()
report([options, "refused by this test" in Keeping.kept[0].getMessage(), made() is not None])
""", str(path))  # fmt: skip
    assert found == [None, True, False]


@since_131
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
new, record = sys.argv[2:]
best = Choice({{"layout": "channels-last, biases fused", "search": "exhaustive"}}, 0.6)
Record(key_of(GraphOutline(path), None), best, best).write(Path(record))
def replacing(plan, release, outline, record, plain=opening.fit_to_model):
    chosen = plain(plan, release, outline, record)
    if {replaced}:
        os.replace(new, outline.model)
    return chosen
opening.fit_to_model = replacing
session, chosen = construct(tuned=record)
report([chosen is not None and "prefer_nhwc" in chosen, hasattr(session, "_sess")])
""", str(path), str(new), str(record))  # fmt: skip
    assert found == [not replaced, not replaced]


CAPTURING = f"""{SETUP}
from pathlib import Path
from ortgpu.provider.records import Choice, Record, key_of
from ortgpu.running import graph_requests

class Stream:
    living = weakref.WeakSet()
    def __init__(self, ordinal):
        self.handle = id(self)
        self.living.add(self)

graph_requests.own_stream = Stream
record = sys.argv[2]
best, gpu = Choice({{"graph": "captured"}}, 0.6), CudaDevice(0, None, None, None, None, None)
Record(key_of(GraphOutline(path), gpu), Choice({{}}, 1.0), best).write(Path(record))
calls = []

def refusing_the_first(*_, providers, **__):
    stream = dict(providers)["CUDAExecutionProvider"].get("user_compute_stream")
    calls.append([stream is not None, stream in [None, *(str(each.handle) for each in Stream.living)]])
    if len(calls) == 1:
        raise RuntimeError("refused by this test")

session = InferenceSession.__new__(InferenceSession)
request = SessionRequest(path, providers=GIVEN, tuned=record, cuda_graph=json.loads(sys.argv[3]))
ready = opening.Ready(Plan(request, GIVEN, gpu=gpu), load_runtime(), CudaState(0, None, None))
opening.open_as_chosen(session, refusing_the_first, ready, GraphOutline(path))
report([calls, getattr(session, "_stream", None) is not None])
"""


@pytest.mark.parametrize("is_asked", [True, False], ids=["cuda_graph", "by the record alone"])
def test_a_session_that_does_not_open_as_chosen_has_no_stream_of_before(
    path: Path, tmp_path: Path, is_asked: bool
) -> None:
    """The handle of a stream that is gone would be given to ONNX Runtime; or one that nothing uses would be kept."""
    calls, has_stream = child(CAPTURING, str(path), str(tmp_path / "record.json"), str(is_asked).lower())
    assert calls == [[True, True], [is_asked, True]]
    assert has_stream is is_asked


OPEN_AND_REWRITE = """
import os, shutil, sys, time, warnings
import onnxruntime
from ortgpu import GPUSession
warnings.simplefilter("ignore")
onnxruntime.set_default_logger_severity(4)
path, openings = sys.argv[1], int(sys.argv[2])
GPUSession(path)
raised = {}
writer = os.fork()
if not writer:
    while os.getppid() != 1:
        shutil.copyfile(path + ".new", path)
        time.sleep(0.01)
    os._exit(0)
try:
    opened = 0
    for number in range(openings):
        options = onnxruntime.SessionOptions() if number % 4 == 3 else None
        try:
            GPUSession(path, options)
            opened += 1
        except Exception as error:
            raised[type(error).__name__] = raised.get(type(error).__name__, 0) + 1
finally:
    os.kill(writer, 9)
    os.waitpid(writer, 0)
report([opened, raised])
"""


@pytest.mark.parametrize("openings", [30, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_sessions_open_while_the_file_is_written(
    lab: Lab, provider_library: str, tmp_path: Path, openings: int
) -> None:
    """What a session raises is ONNX Runtime's, and nothing ends the process."""
    for name in ("model.onnx", "model.onnx.new"):
        onnx.save(matrix_model(4096), tmp_path / name)
    machine = lab.machine_that_places(provider_library)
    arguments = [str(tmp_path / "model.onnx"), str(openings)]
    opened, raised = machine.run(OPEN_AND_REWRITE, argv=arguments, timeout=1700).ok().json
    assert opened + sum(raised.values()) == openings
    assert raised.keys() <= {"InvalidProtobuf", "InvalidGraph", "Fail", "InvalidArgument"}, raised


MAPPINGS = """
import pickle, sys
mapped = []
def watch(event, given):
    if event == "mmap.__new__" and given[0] != -1:
        mapped.append([os.readlink(f"/proc/self/fd/{given[0]}"), *given])
import os
sys.addaudithook(watch)
import onnxruntime
import ortgpu
from ortgpu import GPUSession
path = sys.argv[1]
GPUSession(path)
pickle.dumps(GPUSession(path, onnxruntime.SessionOptions, [("CUDAExecutionProvider", {"use_tf32": "0"})]))
ortgpu.diagnose(path)
report(mapped)
"""


def test_no_file_is_mapped(lab: Lab, provider_library: str, path: Path) -> None:
    """Nor are libraries, to be looked at: a writer that cuts one short would end the process as well."""
    machine = lab.machine_that_places(provider_library)
    assert machine.run(MAPPINGS, argv=[str(path)]).ok().json == []
