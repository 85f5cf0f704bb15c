"""Sessions that are pickled and copied with what a subclass or a user added to them. On the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lab.installed import older_than
from tests.support.cpu_session import child

DETECTOR = """
import copy, pickle, sys

class Detector(GPUSession):
    def __init__(self, path, size=640, *, labels=()):
        self.size = size
        super().__init__(path)
        self.labels, self._seen = labels, {"twice": self}

def state(detector):
    return [type(detector).__name__, detector.size, detector.labels, detector._seen["twice"] is detector,
            str(detector.device), detector.run(None, feeds(2)[1])[0].tolist()]

def arrived(session, protocol=pickle.HIGHEST_PROTOCOL):
    return pickle.loads(pickle.dumps(session, protocol))
"""
EXPECTED = ["Detector", 320, ["cat"], True, "cpu", [-1] * 4]


def test_a_subclass_with_a_constructor_of_its_own_arrives_whole() -> None:
    found = child(
        DETECTOR
        + """
detector = Detector(NEG, 320, labels=["cat"])
again = arrived(detector)
report([state(again), state(arrived(again)), state(copy.deepcopy(detector)),
        [state(arrived(detector, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]])
"""
    )
    *whole, by_protocol = found
    assert whole == [EXPECTED] * 3
    assert by_protocol == [EXPECTED] * len(by_protocol)


def test_a_class_that_says_itself_what_is_carried() -> None:
    """As for an InferenceSession, which cannot be pickled otherwise."""
    found = child(
        DETECTOR
        + """
class Pickable(GPUSession):
    def __init__(self, path):
        super().__init__(path)
        self.named, self.made = path, os.getpid()
    def __getstate__(self):
        return ("state", self.named)
    def __setstate__(self, state):
        calls.append(state[0])
        self.__init__(state[1])

calls = []
session = Pickable(NEG)
again = [arrived(session), arrived(session, 2), copy.copy(session), copy.deepcopy(session)]
report([calls, [each.run(None, feeds(2)[1])[0].tolist() for each in again]])
"""
    )
    assert found == [["state"] * 4, [[-1] * 4] * 4]


def test_an_attribute_called_as_one_of_ours_is_the_subclass_s() -> None:
    found = child(
        DETECTOR
        + """
class Named(GPUSession):
    def __init__(self, path, device):
        self.placement, self.options_chosen = "set before", None
        super().__init__(path)
        self.device = device

again = arrived(Named(NEG, "mine"))
twice = arrived(again)
again.__init__(NEG, "anew")
others = Detector(NEG)
first, before = others.placement, others._verified
others.__init__(NEG)
report([twice.device, twice.placement, twice.options_chosen, again.device, again.placement,
        type(first).__name__, others._verified is before, others.placement is others._verified.placement])
"""
    )
    assert found == ["mine", "set before", None, "anew", "set before", "Placement", False, True]


def test_what_a_run_left_behind_stays() -> None:
    found = child(
        DETECTOR
        + """
session = GPUSession(NEG)
session.pinned_empty(4)
list(session.map(feeds(2)))
session.note = "mine"
session.__init__(NEG)
again = arrived(session)
report([again.note, copy.copy(session).note, sorted(vars(again).keys() ^ vars(session).keys())])
"""
    )
    assert found[:2] == ["mine", "mine"]
    assert set(found[2]) <= {"_pinned"}


def test_entries_of_the_session_options_that_only_the_installed_release_has() -> None:
    entries = {"session.qdq_matmulnbits_accuracy_level": "4"}
    if older_than((1, 31)) is None:
        entries["session.intra_op.spin_duration_us"] = "7"
        entries["ep.cuda.fpa_intb_gemm"] = "1"  # read by the CUDA provider
        entries["optimization.constant_folding_max_output_size_in_bytes"] = "999"
    found = child(
        DETECTOR
        + """
import onnxruntime
from ortgpu.provider.options import Carried
options = onnxruntime.SessionOptions()
entries = json.loads(sys.argv[1])
for name, value in entries.items():
    options.add_session_config_entry(name, value)
carried = Carried(options).copied()
report({name: carried.get_session_config_entry(name) for name in entries})
""",
        json.dumps(entries),
    )
    assert found == entries


def test_a_copy_has_all_of_the_session_options() -> None:
    """Also what cannot be read back: without the initialiser, a copy gave other results, and said nothing."""
    found = child(
        DETECTOR
        + """
import onnxruntime
ADD = model("add (float[n] x) => (float[n] y) <float[1] w = {1.0}> { y = Add(x, w) }")
ten = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(1, 10, np.float32))
options = onnxruntime.SessionOptions()
options.add_initializer("w", ten)
options.add_free_dimension_override_by_name("n", 4)
session = GPUSession(ADD, options)
copies = [copy.copy(session), copy.deepcopy(session), copy.copy(copy.deepcopy(session))]
report([[each.run(None, feeds(1)[0])[0].tolist(), each.get_inputs()[0].shape] for each in (session, *copies)])
"""
    )
    assert found == [[[10] * 4, [4]]] * 4


def test_session_options_travel_by_the_function_that_makes_them() -> None:
    """Without their initialiser and dimension, a session in another process gave other results, and said nothing."""
    found = child(
        DETECTOR
        + """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from tests.programs.worker_options import ten_times
from ortgpu import install, uninstall
import onnxruntime

ADD = model("add (float[n] x) => (float[n] y) <float[1] w = {1.0}> { y = Add(x, w) }")
def state(session):
    return [session.run(None, feeds(1)[0])[0].tolist(), session.get_inputs()[0].shape]

sessions = {"function": GPUSession(ADD, ten_times), "object": GPUSession(ADD, ten_times()),
            "untouched": GPUSession(ADD, onnxruntime.SessionOptions())}
install()
sessions["guarded"] = onnxruntime.InferenceSession(ADD, ten_times())
uninstall()
found = {name: outcome(lambda: state(arrived(arrived(each)))) for name, each in sessions.items()}
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
    for name, each in sessions.items():
        found[f"spawned {name}"] = outcome(lambda: pool.submit(type, each).result(timeout=50).__name__)
found["none"] = outcome(lambda: state(arrived(GPUSession(ADD, lambda: None))))
found["no options"] = outcome(lambda: GPUSession(ADD, lambda: 3))
report(found)
"""
    )
    assert found["function"]["returned"] == [[10] * 4, [4]]
    assert found["spawned function"]["returned"] == "GPUSession"
    for name in ("object", "untouched", "guarded"):
        for way in (name, f"spawned {name}"):
            assert found[way]["type"] == "ProviderRequestError", way
            assert "sess_options=make_options" in found[way]["text"]
    assert found["none"]["type"] in ("PicklingError", "AttributeError")  # of a lambda
    assert found["no options"]["type"] == "TypeError"


def test_a_relative_path_is_that_of_the_process_that_opened_it(tmp_path: Path) -> None:
    found = child(
        DETECTOR
        + """
folder = sys.argv[1]
os.makedirs(os.path.join(folder, "elsewhere"))
with open(os.path.join(folder, "neg.onnx"), "wb") as file:
    file.write(NEG)
os.chdir(folder)
session = GPUSession("neg.onnx")
class Path:
    def __fspath__(self):
        return b"neg.onnx"
in_bytes = GPUSession(Path())
os.chdir("elsewhere")
report([session._model_path, *[arrived(each).run(None, feeds(2)[1])[0].tolist() for each in (session, in_bytes)]])
""",
        str(tmp_path),
    )
    assert found == ["neg.onnx", [-1] * 4, [-1] * 4]


def test_a_spawned_worker_gets_a_session_of_its_own() -> None:
    """As with joblib, which pickles what it passes on in the same way."""
    found = child(
        DETECTOR
        + """
import multiprocessing, operator
from concurrent.futures import ProcessPoolExecutor

with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
    session = GPUSession(NEG, cpu_nodes="allow")
    ran = pool.submit(operator.methodcaller("run", None, feeds(3)[2]), session).result(timeout=50)
    again = pool.submit(copy.copy, session).result(timeout=50)
report([ran[0].tolist(), again._request.cpu_nodes, again.run(None, feeds(2)[1])[0].tolist()])
"""
    )
    assert found == [[-2] * 4, "allow", [-1] * 4]


def test_what_cannot_be_pickled_says_so() -> None:
    found = child(
        DETECTOR
        + """
session = GPUSession(NEG)
session.lock = threading.Lock()
report(outcome(lambda: pickle.dumps(session)))
"""
    )
    assert found["type"] == "TypeError"
    assert "lock" in found["text"]
