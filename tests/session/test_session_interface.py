"""What a GPUSession takes, refuses and answers as the InferenceSession that it stands in for. On the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.cpu_session import child


def test_methods_take_the_arguments_that_they_are_documented_with() -> None:
    differing = child(
        """
        import inspect, onnxruntime
        plain = onnxruntime.InferenceSession
        def arguments(function):
            return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
        report([
            name for name in dir(plain)
            if not name.startswith("_") and callable(getattr(plain, name))
            and arguments(getattr(plain, name)) != arguments(getattr(GPUSession, name))
        ])
        """
    )
    assert differing == []


def test_types_of_the_arguments_can_be_asked_for() -> None:
    """As frameworks do that make what a constructor wants, or a command line of it."""
    found = child(
        """
        import typing
        from ortgpu import GPUSessionPool
        asked = [typing.get_type_hints(each) for each in (GPUSession.__init__, GPUSession.run, GPUSessionPool.__init__)]
        device, cpu_nodes = (typing.get_args(asked[0][name]) for name in ("device", "cpu_nodes"))
        report([sorted(each.__name__ for each in device), list(cpu_nodes)])
        """
    )
    assert found == [["Device", "NoneType", "int", "str"], ["allow", "warn", "forbid"]]


def test_types_of_the_attributes_of_a_subclass_can_be_asked_for() -> None:
    """As attrs.resolve_types and others do, which ask each class that a class is derived from."""
    found = child(
        """
        import typing
        class Detector(GPUSession):
            label: str
        found = typing.get_type_hints(Detector)
        of_a_device = typing.get_type_hints(GPUSession.device.func)["return"]
        report([found["label"].__name__, of_a_device.__name__])
        """
    )
    assert found == ["str", "Device"]


def test_help_and_dir_show_what_a_session_has() -> None:
    text, names = child(
        """
        import pydoc
        report([pydoc.plain(pydoc.render_doc(GPUSession)), dir(GPUSession)])
        """
    )
    assert {"device", "placement", "options_chosen"} <= set(names)
    assert "The GPU that the session runs on" in text
    assert "The nodes by provider" in text
    assert "each with its value and reason" in text


def test_the_constructor_says_each_argument_in_a_line() -> None:
    names, text = child(
        """
        import inspect
        report([list(inspect.signature(GPUSession).parameters), inspect.getdoc(GPUSession.__init__)])
        """
    )
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): .", arguments, re.MULTILINE) == names
    assert len(arguments.splitlines()) == len(names)
    assert "default precedence" not in text, "those are ONNX Runtime's words"


def test_a_session_shows_its_model_device_and_providers(tmp_path: Path) -> None:
    """Also while its constructor runs, in which a debugger may ask, and when it is closed."""
    path = str(tmp_path / "model.onnx")
    early, of_bytes, of_file, closed, guarded = child(
        """
        import onnxruntime
        with open(sys.argv[1], "wb") as file:
            file.write(NEG)
        session = GPUSession(sys.argv[1])
        shown = [repr(GPUSession.__new__(GPUSession)), repr(GPUSession(NEG)), repr(session)]
        session.close()
        with ortgpu.enforce():
            shown += [repr(session), repr(onnxruntime.InferenceSession(NEG))]
        report(shown)
        """,
        path,
    )
    assert early.startswith("<ortgpu.session.GPUSession object at ")
    assert of_bytes == "<GPUSession of <bytes> on cpu [CPUExecutionProvider]>"
    assert of_file == f"<GPUSession of {path} on cpu [CPUExecutionProvider]>"
    assert closed == f"<GPUSession of {path} on cpu [CPUExecutionProvider], this GPUSession is closed>"
    assert guarded == "<InferenceSession of <bytes> on cpu [CPUExecutionProvider]>"


def test_run_async_refuses_what_cannot_be_called_back() -> None:
    found = child(
        """
        session = GPUSession(NEG)
        report([outcome(lambda: session.run_async(["y"], feeds(1)[0], wrong, None)) for wrong in (None, 3)])
        """
    )
    assert [each["type"] for each in found] == ["TypeError", "TypeError"]
    assert "callback" in found[0]["text"]


@pytest.mark.parametrize("argument", ["allow_cpu", "cuda_graph"])
def test_a_text_is_no_yes_or_no(argument: str) -> None:
    """A configuration's "false" is true in Python: it would have allowed the CPU."""
    found = child(
        f"""
        os.environ.pop("ORTGPU_ALLOW_CPU")
        report([outcome(lambda: GPUSession(NEG, {argument}=wrong)) for wrong in ("false", "", b"1", 2)])
        """
    )
    assert [each["type"] for each in found] == ["TypeError"] * 4
    assert f"{argument} must be True or False, not 'false'" in found[0]["text"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("device_id", "device"), ("devices", "device"), ("cpu_node", "cpu_nodes"), ("session_options", "sess_options")],
)
def test_a_misspelt_argument_is_refused(wrong: str, meant: str) -> None:
    """InferenceSession ignores what it does not know: the session would have been on another GPU than the one named."""
    found = child(f"report(outcome(lambda: GPUSession(NEG, {wrong}=0)))")
    assert found["type"] == "TypeError"
    assert f"'{wrong}'" in found["text"]
    assert f"did you mean '{meant}'" in found["text"]


def test_arguments_that_onnx_runtime_knows_or_ignores_pass() -> None:
    device = child(
        """
        session = GPUSession(NEG, disabled_optimizers=["ConstantFolding"], prepacked_weights_container=None, other=1)
        report(session.device.kind)
        """
    )
    assert device == "cpu"


def test_session_options_of_the_wrong_kind() -> None:
    found = child(
        """
        report([outcome(lambda: GPUSession(NEG, wrong)) for wrong in ("text", {"intra_op_num_threads": 1}, 3)])
        """
    )
    assert [each["type"] for each in found] == ["TypeError"] * 3
    assert (
        "sess_options must be an onnxruntime.SessionOptions, or a function that returns them, not str"
        in found[0]["text"]
    )


def test_false_session_options_are_none_as_for_onnx_runtime() -> None:
    assert child("report([GPUSession(NEG, none).device.kind for none in (None, False, {}, 0)])") == ["cpu"] * 4


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "gpu:0", "0", 0])
def test_one_gpu_named_twice_the_same(device: str | int) -> None:
    found = child(
        f"""
        os.environ.pop("ORTGPU_ALLOW_CPU")
        providers = [("CUDAExecutionProvider", {{"device_id": "00"}})]
        report([outcome(lambda: GPUSession(NEG, None, providers, device=each)) for each in ({device!r}, "cuda:1")])
        """
    )
    assert [each["type"] for each in found] == ["DriverNotFoundError", "ProviderRequestError"]


def test_methods_that_somebody_puts_in_the_place_of_onnx_runtimes_are_called() -> None:
    """As tracers do, and tests with unittest.mock."""
    called = child(
        """
        import onnxruntime
        from unittest import mock

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
        """
    )
    assert called == ["run", "run_with_ort_values", "run_with_iobinding", "io_binding"]


@pytest.mark.parametrize(
    ("device", "outcome_"),
    [
        ("cuda:x", "DeviceNotFoundError"),
        (-1, "DeviceNotFoundError"),
        (1.5, "TypeError"),
        ("cpu", "cpu"),
        ("cuda:9", "cpu"),
    ],
)
def test_a_device_that_is_none_is_a_mistake_where_the_cpu_is_allowed_too(device: object, outcome_: str) -> None:
    found = child(f"report(outcome(lambda: GPUSession(NEG, device={device!r}, allow_cpu=True).device.kind))")
    assert found.get("type", found.get("returned")) == outcome_


def test_options_that_keep_the_cpu_out_outweigh_a_permission() -> None:
    raised = child(
        """
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        report(outcome(lambda: GPUSession(NEG, options, allow_cpu=True)))
        """
    )
    assert raised["type"] in ("DriverNotFoundError", "NoDeviceError")


def test_a_closed_session_is_closed_for_every_use() -> None:
    found = child(
        """
        import copy, pickle
        session = GPUSession(NEG)
        session.close()
        uses = (pickle.dumps, copy.copy, copy.deepcopy, lambda session: session.explain_placement())
        report([outcome(lambda: use(session)) for use in uses])
        """
    )
    assert [(each["type"], each["text"].splitlines()[0]) for each in found] == [
        ("ExecutionError", "this GPUSession is closed")
    ] * 4


def test_a_closed_session_gives_back_the_bytes_of_its_model() -> None:
    freed = child(
        """
        before = sys.getrefcount(NEG)
        session = GPUSession(NEG)
        held = sys.getrefcount(NEG) - before
        session.close()
        report([held > 0, sys.getrefcount(NEG) - before])
        """
    )
    assert freed == [True, 0]


def test_an_explicit_false_wins_over_the_variable(tmp_path: Path) -> None:
    found = child(
        """
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
        """,
        str(tmp_path / "known.onnx"),
    )
    made, kept = found
    refused = made.pop("no variable")
    assert refused.endswith("Error")
    assert made == {
        "None": "cpu", "True": "cpu", "False": refused, "unset": "cpu",
        "pool None": 2, "pool True": 2, "pool False": refused,
    }  # fmt: skip
    assert len(kept) == 7
    assert all(level == "WARNING" and "known.onnx is running on the CPU" in text for level, text in kept)


def test_a_session_on_the_cpu_is_logged_where_warnings_are_hidden_and_guarded_too() -> None:
    found = child(
        """
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
        """
    )
    kept, warned = found
    assert [level for level, _ in kept] == ["WARNING", "WARNING"]
    assert all(text.startswith("<bytes> is running on the CPU") for _, text in kept)
    ((kind, text),) = warned
    assert kind == "CPUExecutionWarning"
    assert text.startswith("<bytes> is running on the CPU")


@pytest.mark.parametrize("allowed", [None, False, True])
def test_pickling_carries_what_was_said_of_the_cpu(allowed: bool | None) -> None:
    found = child(
        """
        import dataclasses, pickle
        allowed = json.loads(sys.argv[1])
        session = GPUSession(NEG)
        session._request = dataclasses.replace(session._request, allow_cpu=allowed)
        data = pickle.dumps(session)
        with_variable = outcome(lambda: pickle.loads(data)._request.allow_cpu)
        os.environ.pop("ORTGPU_ALLOW_CPU")
        report([with_variable, outcome(lambda: pickle.loads(data)._request.allow_cpu)])
        """,
        json.dumps(allowed),
    )
    works = [each.get("returned", "refused") for each in found]
    assert works == {None: [None, "refused"], False: ["refused", "refused"], True: [True, True]}[allowed]


def test_a_model_that_onnx_runtime_refuses_leaves_no_threads_and_no_warning(tmp_path: Path) -> None:
    """Its weights are not there, which it finds out with the threads of the session made."""
    found = child(
        """
        import onnx, onnxruntime
        made = onnx.load_from_string(model(
            "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }"
        ))
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
        """,
        str(tmp_path / "model.onnx"),
    )
    assert found == [[["onnxruntime", 0]] * 2, []]


def test_a_warning_of_the_cpu_that_is_kept_keeps_no_session() -> None:
    """A test does keep it, by pytest.warns, and so does a handler of the log. The second session knows the error."""
    assert child(
        """
        import gc, weakref
        gc.disable()
        with warnings.catch_warnings(record=True) as kept:
            warnings.simplefilter("always")
            sessions = [GPUSession(NEG, allow_cpu=True) for _ in range(2)]
        references = [weakref.ref(session) for session in sessions]
        del sessions
        report([[type(each.message).__name__ for each in kept], [each() is None for each in references]])
        """
    ) == [["CPUExecutionWarning"] * 2, [True, True]]


def test_an_error_of_a_model_follows_no_error_that_was_known() -> None:
    assert child(
        """
        GPUSession(NEG, allow_cpu=True)
        try:
            GPUSession(b"no model", allow_cpu=True)
        except Exception as error:
            report([type(error).__name__, repr(error.__cause__), repr(error.__context__)])
        """
    ) == ["InvalidProtobuf", "None", "None"]


def test_a_session_that_is_being_opened_is_not_listed() -> None:
    """It was called one that no guard had seen."""
    found = child(
        """
        seen = []
        warnings.showwarning = lambda *_: seen.append([record.kind for record in ortgpu.sessions()])
        warnings.simplefilter("always")
        session = GPUSession(NEG)
        report([seen, [record.kind for record in ortgpu.sessions()]])
        """
    )
    assert found == [[[]], ["GPUSession"]]


def test_a_warning_of_the_cpu_that_is_raised_leaves_no_session() -> None:
    found = child(
        """
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
        """
    )
    assert found[0] in ("DriverNotFoundError", "NoDeviceError")
    assert found[1:] == [0, 0]


def test_the_name_of_a_model_adds_no_line_to_what_a_session_shows(tmp_path: Path) -> None:
    path = tmp_path / "a\nTo fix it:\u202e\u2028.onnx"
    found = child(
        """
        with open(sys.argv[1], "wb") as file:
            file.write(NEG)
        models = ortgpu.GPUModels(budget="1GiB", allow_cpu=True)
        session = GPUSession(sys.argv[1], allow_cpu=True)
        report([repr(session), str(ortgpu.sessions()[0]), repr(models[sys.argv[1]])])
        """,
        str(path),
    )
    for text in found:
        assert r"a\nTo fix it:\u202e\u2028.onnx" in text
        assert text.isprintable()
