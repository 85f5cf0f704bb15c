"""Programs of ``tests/running/test_plain_runs.py``."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, outcome, report

validated, validate = [], InferenceSession._validate_input


def noting(self, names):
    validated.append(names)
    return validate(self, names)


InferenceSession._validate_input = noting


def is_direct(session, feed, *options, names=None):
    before = len(validated)
    session.run(names, feed, *options)
    return len(validated) == before


def which_runs_are_direct() -> None:
    session, x = GPUSession(NEG), np.ones(4, np.float32)

    class Array(np.ndarray):
        pass

    class Feed(dict):
        pass

    report(
        {
            "an array": is_direct(session, {"x": x}),
            "with names": is_direct(session, {"x": x}, names=["y"]),
            "a view": is_direct(session, {"x": np.ones(8, np.float32)[::2]}),
            "run options": is_direct(session, {"x": x}, onnxruntime.RunOptions()),
            "a list": is_direct(session, {"x": [1.0, 2.0]}),
            "a subclass": is_direct(session, {"x": x.view(Array)}),
            "an OrtValue": is_direct(session, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)._ortvalue}),
            "another dict": is_direct(session, Feed(x=x)),
        }
    )


def outcomes_are_those_of_plain_run() -> None:
    from onnx import TensorProto, helper

    def value(name, kind=TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, kind, ["n"])

    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"]))
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "b"], ["y"]),
            helper.make_node("Identity", ["words"], ["same"]),
            helper.make_node("OptionalHasElement", ["maybe"], ["has"]),
        ],
        "g",
        [value("x"), value("b"), value("words", TensorProto.STRING), helper.make_value_info("maybe", optional)],
        [value("y"), value("same", TensorProto.STRING), helper.make_tensor_value_info("has", TensorProto.BOOL, [])],
        [helper.make_tensor("b", TensorProto.FLOAT, [2], [1, 2])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = GPUSession(made.SerializeToString())
    x, words = np.ones(2, np.float32), np.array(["a", "b"])
    whole = {"x": x, "words": words, "maybe": x}
    feeds = [
        whole,
        {"x": x, "words": words},
        {**whole, "b": x},
        {"x": x},
        {},
        {"words": words},
        {**whole, "z": x},
        {"x": x, "words": words, "z": x},
        {"b": x, "words": words, "maybe": x},
        {**whole, "x": x.astype(np.float64)},
        {**whole, "x": np.ones((2, 2), np.float32)},
        {**whole, "x": x[:0]},
        {**whole, "x": x.astype(">f4")},
        {**whole, "x": None},
        {**whole, "x": "text"},
        {**whole, 1: x},
        {"x": x, 1: x},
        None,
        [],
        5,
        list(whole),
        {**whole, "words": words.astype(object)},
        {**whole, "x": np.ones(3, np.float32)},
    ]
    names = [None, [], ["y"], ("has", "y"), ["y", "y"], ["no"], "y", [1], 7, np.array(["y", "has"])]

    def told(run, output_names, feed):
        try:
            return [[type(each).__name__, str(each.dtype), each.tolist()] for each in run(output_names, feed)]
        except Exception as error:
            return [type(error).__name__, str(error)]

    different, direct = [], 0
    for output_names, feed in itertools.product(names, feeds):
        before = len(validated)
        ours = told(session.run, output_names, feed)
        direct += len(validated) == before
        plain = told(lambda *given: InferenceSession.run(session, *given), output_names, feed)
        if ours != plain:
            different.append([str(output_names), str(feed), ours, plain])
    report([different, direct > 50])


def a_tracer_sees_each_run_of_a_session_that_is_opened_after_it_came() -> None:
    plain, seen = InferenceSession.run, []

    def traced(self, *given):
        seen.append(len(given))
        return plain(self, *given)

    session, feed = GPUSession(NEG), feeds(1)[0]
    ran = [is_direct(session, feed)]
    InferenceSession.run = traced
    later = GPUSession(NEG)
    ran += [is_direct(session, feed), is_direct(later, feed)]
    del InferenceSession.run
    report([ran, is_direct(later, feed), len(seen)])


def a_class_in_between_sees_each_run() -> None:
    seen = []

    class Logged(InferenceSession):
        def run(self, *given):
            seen.append(len(given))
            return super().run(*given)

    class After(GPUSession, Logged):
        pass

    class Before(Logged, GPUSession):
        pass

    feed = feeds(3)[2]
    report([[each(NEG).run(None, feed)[0].tolist() for each in (After, Before)], seen])


def a_run_that_does_something_new_is_called() -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    exec(
        "def run(self, output_names, input_feed, run_options=None):\n"
        "    self._something_new = True\n"
        "    return self._sess.run(output_names or ['y'], input_feed, run_options)",
        Session.run.__globals__,
    )
    Session.run = Session.run.__globals__["run"]
    session = GPUSession(NEG)
    results = session.run(None, feeds(2)[1])
    report([results[0].tolist(), session._something_new])


def a_closed_session_refuses() -> None:
    session, feed = GPUSession(NEG), feeds(1)[0]
    ran = is_direct(session, feed)
    session.close()
    report([ran, outcome(lambda: session.run(None, feed))["type"]])


def names_that_are_not_utf_8_leave_the_session_be() -> None:
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] abc) => (float[n] y) { y = Neg(abc) }'
    damaged = onnx.parser.parse_model(text).SerializeToString().replace(b"abc", b"a\xffc")
    report(type(GPUSession(damaged)).__name__)
