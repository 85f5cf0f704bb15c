"""Programs of ``tests/session/test_session_pickling.py``."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import threading

import numpy as np

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, model, outcome, report


class Detector(GPUSession):
    def __init__(self, path, size=640, *, labels=()):
        self.size = size
        super().__init__(path)
        self.labels, self._seen = labels, {"twice": self}


def state(detector):
    return [
        type(detector).__name__,
        detector.size,
        detector.labels,
        detector._seen["twice"] is detector,
        str(detector.device),
        detector.run(None, feeds(2)[1])[0].tolist(),
    ]


def arrived(session, protocol=pickle.HIGHEST_PROTOCOL):
    return pickle.loads(pickle.dumps(session, protocol))


calls = []


class Pickable(GPUSession):
    def __init__(self, path):
        super().__init__(path)
        self.named, self.made = path, os.getpid()

    def __getstate__(self):
        return ("state", self.named)

    def __setstate__(self, state):
        calls.append(state[0])
        self.__init__(state[1])


class Named(GPUSession):
    def __init__(self, path, device):
        self.placement, self.options_chosen = "set before", None
        super().__init__(path)
        self.device = device


def a_subclass_with_a_constructor_of_its_own_arrives_whole() -> None:
    detector = Detector(NEG, 320, labels=["cat"])
    again = arrived(detector)
    report(
        [
            state(again),
            state(arrived(again)),
            state(copy.deepcopy(detector)),
            [state(arrived(detector, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
        ]
    )


def a_class_that_says_itself_what_is_carried() -> None:
    session = Pickable(NEG)
    again = [arrived(session), arrived(session, 2), copy.copy(session), copy.deepcopy(session)]
    report([calls, [each.run(None, feeds(2)[1])[0].tolist() for each in again]])


def an_attribute_called_as_one_of_ours_is_the_subclass_s() -> None:
    again = arrived(Named(NEG, "mine"))
    twice = arrived(again)
    again.__init__(NEG, "anew")
    others = Detector(NEG)
    first, before = others.placement, others._verified
    others.__init__(NEG)
    report(
        [
            twice.device,
            twice.placement,
            twice.options_chosen,
            again.device,
            again.placement,
            type(first).__name__,
            others._verified is before,
            others.placement is others._verified.placement,
        ]
    )


def what_a_run_left_behind_stays() -> None:
    session = GPUSession(NEG)
    session.pinned_empty(4)
    list(session.map(feeds(2)))
    session.note = "mine"
    session.__init__(NEG)
    again = arrived(session)
    report([again.note, copy.copy(session).note, sorted(vars(again).keys() ^ vars(session).keys())])


def entries_of_the_session_options_that_only_the_installed_release_has() -> None:
    import onnxruntime

    from ortgpu.provider.options import Carried

    options = onnxruntime.SessionOptions()
    entries = json.loads(sys.argv[1])
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    carried = Carried(options).copied()
    report({name: carried.get_session_config_entry(name) for name in entries})


def a_copy_has_all_of_the_session_options() -> None:
    import onnxruntime

    ADD = model("add (float[n] x) => (float[n] y) <float[1] w = {1.0}> { y = Add(x, w) }")
    ten = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(1, 10, np.float32))
    options = onnxruntime.SessionOptions()
    options.add_initializer("w", ten)
    options.add_free_dimension_override_by_name("n", 4)
    session = GPUSession(ADD, options)
    copies = [copy.copy(session), copy.deepcopy(session), copy.copy(copy.deepcopy(session))]
    report([[each.run(None, feeds(1)[0])[0].tolist(), each.get_inputs()[0].shape] for each in (session, *copies)])


def session_options_travel_by_the_function_that_makes_them() -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import onnxruntime

    from ortgpu import install, uninstall
    from tests.programs.worker_options import ten_times

    ADD = model("add (float[n] x) => (float[n] y) <float[1] w = {1.0}> { y = Add(x, w) }")

    def state(session):
        return [session.run(None, feeds(1)[0])[0].tolist(), session.get_inputs()[0].shape]

    sessions = {
        "function": GPUSession(ADD, ten_times),
        "object": GPUSession(ADD, ten_times()),
        "untouched": GPUSession(ADD, onnxruntime.SessionOptions()),
    }
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


def a_relative_path_is_that_of_the_process_that_opened_it() -> None:
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


def a_spawned_worker_gets_a_session_of_its_own() -> None:
    import multiprocessing
    import operator
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        session = GPUSession(NEG, cpu_nodes="allow")
        ran = pool.submit(operator.methodcaller("run", None, feeds(3)[2]), session).result(timeout=50)
        again = pool.submit(copy.copy, session).result(timeout=50)
    report([ran[0].tolist(), again._request.cpu_nodes, again.run(None, feeds(2)[1])[0].tolist()])


def what_cannot_be_pickled_says_so() -> None:
    session = GPUSession(NEG)
    session.lock = threading.Lock()
    report(outcome(lambda: pickle.dumps(session)))
