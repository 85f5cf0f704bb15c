"""Programs of ``tests/session/test_session_interface.py``."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

import ortgpu
from ortgpu import GPUSession
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, feeds, model, outcome, report


def methods_take_the_arguments_that_they_are_documented_with() -> None:
    import inspect

    import onnxruntime

    plain = onnxruntime.InferenceSession

    def arguments(function):
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    report(
        [
            name
            for name in dir(plain)
            if not name.startswith("_")
            and callable(getattr(plain, name))
            and arguments(getattr(plain, name)) != arguments(getattr(GPUSession, name))
        ]
    )


def types_of_the_arguments_can_be_asked_for() -> None:
    import typing

    from ortgpu import GPUSessionPool

    asked = [typing.get_type_hints(each) for each in (GPUSession.__init__, GPUSession.run, GPUSessionPool.__init__)]
    device, cpu_nodes = (typing.get_args(asked[0][name]) for name in ("device", "cpu_nodes"))
    report([sorted(each.__name__ for each in device), list(cpu_nodes)])


def types_of_the_attributes_of_a_subclass_can_be_asked_for() -> None:
    import typing

    class Detector(GPUSession):
        label: str

    found = typing.get_type_hints(Detector)
    of_a_device = typing.get_type_hints(GPUSession.device.func)["return"]  # type: ignore[attr-defined]  # set here, or of the type that it is
    report([found["label"].__name__, of_a_device.__name__])


def help_and_dir_show_what_a_session_has() -> None:
    import pydoc

    report([pydoc.plain(pydoc.render_doc(GPUSession)), dir(GPUSession)])


def the_constructor_says_each_argument_in_a_line() -> None:
    import inspect

    report([list(inspect.signature(GPUSession).parameters), inspect.getdoc(GPUSession.__init__)])


def a_session_shows_its_model_device_and_providers() -> None:
    import onnxruntime

    with open(sys.argv[1], "wb") as file:
        file.write(NEG)
    session = GPUSession(sys.argv[1])
    shown = [repr(GPUSession.__new__(GPUSession)), repr(GPUSession(NEG)), repr(session)]
    session.close()
    with ortgpu.enforce():
        shown += [repr(session), repr(onnxruntime.InferenceSession(NEG))]
    report(shown)


def run_async_refuses_what_cannot_be_called_back() -> None:
    session = GPUSession(NEG)
    report([outcome(lambda: session.run_async(["y"], feeds(1)[0], wrong, None)) for wrong in (None, 3)])


def arguments_that_onnx_runtime_knows_or_ignores_pass() -> None:
    others = {"prepacked_weights_container": None, "other": 1}
    session = GPUSession(NEG, disabled_optimizers=["ConstantFolding"], **others)  # type: ignore[call-arg]  # theirs
    report(session.device.kind)


def methods_that_somebody_puts_in_the_place_of_onnx_runtimes_are_called() -> None:
    from unittest import mock

    import onnxruntime

    called = []
    for name in ("run", "run_with_ort_values", "run_with_iobinding", "io_binding"):
        original = getattr(onnxruntime.InferenceSession, name)

        def traced(*arguments, name=name, original=original, **options):
            called.append(name)
            return original(*arguments, **options)

        with mock.patch.object(onnxruntime.InferenceSession, name, traced):
            session = GPUSession(NEG)  # it looks once who stands in for run
            value = onnxruntime.OrtValue.ortvalue_from_numpy(feeds(1)[0]["x"])
            session.run(None, feeds(1)[0])
            session.run_with_ort_values(None, {"x": value})
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", value)
            binding.bind_output("y")
            session.run_with_iobinding(binding)
    report(called)


def options_that_keep_the_cpu_out_outweigh_a_permission() -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    report(outcome(lambda: GPUSession(NEG, options, allow_cpu=True)))


def a_closed_session_is_closed_for_every_use() -> None:
    import copy
    import pickle

    session = GPUSession(NEG)
    session.close()
    uses = (pickle.dumps, copy.copy, copy.deepcopy, lambda session: session.explain_placement())
    report([outcome(lambda: use(session)) for use in uses])


def a_closed_session_gives_back_the_bytes_of_its_model() -> None:
    before = sys.getrefcount(NEG)
    session = GPUSession(NEG)
    held = sys.getrefcount(NEG) - before
    session.close()
    report([held > 0, sys.getrefcount(NEG) - before])


def an_explicit_false_wins_over_the_variable() -> None:
    path = sys.argv[1]
    with open(path, "wb") as file:
        file.write(NEG)
    kept = []

    class Keeping(logging.Handler):
        def emit(self, record):
            kept.append([record.levelname, record.getMessage()])

    logging.getLogger("ortgpu").addHandler(Keeping())
    made = {}
    for allowed in (None, True, False):
        made[str(allowed)] = outcome(lambda: GPUSession(path, allow_cpu=allowed).device.kind)
        made[f"pool {allowed}"] = outcome(lambda: len(ortgpu.GPUSessionPool(path, [0, 1], allow_cpu=allowed)))
    made["unset"] = outcome(lambda: GPUSession(path).device.kind)
    os.environ.pop("ORTGPU_ALLOW_CPU")
    made["no variable"] = outcome(lambda: GPUSession(path).device.kind)
    report([{name: each.get("type", each.get("returned")) for name, each in made.items()}, kept])


def a_session_on_the_cpu_is_logged_where_warnings_are_hidden_and_guarded_too() -> None:
    kept = []

    class Keeping(logging.Handler):
        def emit(self, record):
            kept.append([record.levelname, record.getMessage()])

    logging.getLogger("ortgpu").addHandler(Keeping())
    import onnxruntime

    with ortgpu.enforce():
        onnxruntime.InferenceSession(NEG)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        GPUSession(NEG)
    report([kept, [[each.category.__name__, str(each.message)] for each in warned]])


def pickling_carries_what_was_said_of_the_cpu() -> None:
    import dataclasses
    import pickle

    allowed = json.loads(sys.argv[1])
    session = GPUSession(NEG)
    session._request = dataclasses.replace(session._request, allow_cpu=allowed)
    data = pickle.dumps(session)
    with_variable = outcome(lambda: pickle.loads(data)._request.allow_cpu)
    os.environ.pop("ORTGPU_ALLOW_CPU")
    report([with_variable, outcome(lambda: pickle.loads(data)._request.allow_cpu)])


def a_model_that_onnx_runtime_refuses_leaves_no_threads_and_no_warning() -> None:
    import onnx
    import onnxruntime

    made = onnx.load_from_string(model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"))
    (weights,) = made.graph.initializer
    weights.ClearField("float_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "absent.bin", "offset": "0", "length": "8"}.items():
        weights.external_data.add(key=key, value=value)
    with open(sys.argv[1], "wb") as file:
        file.write(made.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 5
    GPUSession(NEG, allow_cpu=True)
    said = []

    class Keeping(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("ortgpu").addHandler(Keeping())
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: said.append(str(message))
    results = []
    for allowed in (False, True):
        before = len(os.listdir("/proc/self/task"))
        try:
            GPUSession(sys.argv[1], options, allow_cpu=allowed)
        except Exception as error:
            kept = error
            results.append([type(error).__module__.partition(".")[0], len(os.listdir("/proc/self/task")) - before])
            del kept
    report([results, said])


def a_warning_of_the_cpu_that_is_kept_keeps_no_session() -> None:
    import gc
    import weakref

    gc.disable()
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always")
        sessions = [GPUSession(NEG, allow_cpu=True) for _ in range(2)]
    references = [weakref.ref(session) for session in sessions]
    del sessions
    report([[type(each.message).__name__ for each in kept], [each() is None for each in references]])


def an_error_of_a_model_follows_no_error_that_was_known() -> None:
    GPUSession(NEG, allow_cpu=True)
    try:
        GPUSession(b"no model", allow_cpu=True)
    except Exception as error:
        report([type(error).__name__, repr(error.__cause__), repr(error.__context__)])


def a_session_that_is_being_opened_is_not_listed() -> None:
    seen = []
    warnings.showwarning = lambda *_: seen.append([record.kind for record in ortgpu.sessions()])
    warnings.simplefilter("always")
    session = GPUSession(NEG)
    report([seen, [record.kind for record in ortgpu.sessions()]])


def a_warning_of_the_cpu_that_is_raised_leaves_no_session() -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 5
    GPUSession(NEG, allow_cpu=True)
    before = len(os.listdir("/proc/self/task"))
    warnings.simplefilter("error")
    try:
        GPUSession(NEG, options, allow_cpu=True)
    except ortgpu.CPUExecutionWarning as error:
        report([type(error.error).__name__, len(os.listdir("/proc/self/task")) - before, len(ortgpu.sessions())])


def the_name_of_a_model_adds_no_line_to_what_a_session_shows() -> None:
    with open(sys.argv[1], "wb") as file:
        file.write(NEG)
    models = ortgpu.GPUModels(budget="1GiB", allow_cpu=True)
    session = GPUSession(sys.argv[1], allow_cpu=True)
    report([repr(session), str(ortgpu.sessions()[0]), repr(models[sys.argv[1]])])


def a_text_is_no_yes_or_no() -> None:
    os.environ.pop("ORTGPU_ALLOW_CPU")
    report(
        {
            argument: [outcome(lambda: GPUSession(NEG, **{argument: wrong})) for wrong in ("false", "", b"1", 2)]
            for argument in ("allow_cpu", "cuda_graph")
        }
    )
