"""What a GPUSession takes, refuses and answers as the InferenceSession that it stands in for. On the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cpu_session import child


def test_methods_take_the_arguments_that_they_are_documented_with() -> None:
    differing = child("session.session_interface.methods_take_the_arguments_that_they_are_documented_with")
    assert differing == []


def test_types_of_the_arguments_can_be_asked_for() -> None:
    """As frameworks do that make what a constructor wants, or a command line of it."""
    found = child("session.session_interface.types_of_the_arguments_can_be_asked_for")
    assert found == [["Device", "NoneType", "int", "str"], ["allow", "warn", "forbid"]]


def test_types_of_the_attributes_of_a_subclass_can_be_asked_for() -> None:
    """As attrs.resolve_types and others do, which ask each class that a class is derived from."""
    found = child("session.session_interface.types_of_the_attributes_of_a_subclass_can_be_asked_for")
    assert found == ["str", "Device"]


def test_help_and_dir_show_what_a_session_has() -> None:
    text, names = child("session.session_interface.help_and_dir_show_what_a_session_has")
    assert {"device", "placement", "options_chosen"} <= set(names)
    assert "The GPU that the session runs on" in text
    assert "The nodes by provider" in text
    assert "each with its value and reason" in text


def test_the_constructor_says_each_argument_in_a_line() -> None:
    names, text = child("session.session_interface.the_constructor_says_each_argument_in_a_line")
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): .", arguments, re.MULTILINE) == names
    assert len(arguments.splitlines()) == len(names)
    assert "default precedence" not in text, "those are ONNX Runtime's words"


def test_a_session_shows_its_model_device_and_providers(tmp_path: Path) -> None:
    """Also while its constructor runs, in which a debugger may ask, and when it is closed."""
    path = str(tmp_path / "model.onnx")
    early, of_bytes, of_file, closed, guarded = child(
        "session.session_interface.a_session_shows_its_model_device_and_providers",
        path,
    )
    assert early.startswith("<ortgpu.session.GPUSession object at ")
    assert of_bytes == "<GPUSession of <bytes> on cpu [CPUExecutionProvider]>"
    assert of_file == f"<GPUSession of {path} on cpu [CPUExecutionProvider]>"
    assert closed == f"<GPUSession of {path} on cpu [CPUExecutionProvider], this GPUSession is closed>"
    assert guarded == "<InferenceSession of <bytes> on cpu [CPUExecutionProvider]>"


def test_run_async_refuses_what_cannot_be_called_back() -> None:
    found = child("session.session_interface.run_async_refuses_what_cannot_be_called_back")
    assert [each["type"] for each in found] == ["TypeError", "TypeError"]
    assert "callback" in found[0]["text"]


def test_a_text_is_no_yes_or_no() -> None:
    """A configuration's "false" is true in Python: it would have allowed the CPU."""
    all_found = child("session.session_interface.a_text_is_no_yes_or_no")
    for argument, found in all_found.items():
        assert [each["type"] for each in found] == ["TypeError"] * 4, argument
        assert f"{argument} must be True or False, not 'false'" in found[0]["text"]


MISSPELT = {"device_id": "device", "devices": "device", "cpu_node": "cpu_nodes", "session_options": "sess_options"}


@pytest.fixture(scope="module")
def misspelt() -> Any:
    return child(f"report({{wrong: outcome(lambda: GPUSession(NEG, **{{wrong: 0}})) for wrong in {[*MISSPELT]}}})")


@pytest.mark.parametrize(("wrong", "meant"), MISSPELT.items())
def test_a_misspelt_argument_is_refused(wrong: str, meant: str, misspelt: Any) -> None:
    """InferenceSession ignores what it does not know: the session would have been on another GPU than the one named."""
    found = misspelt[wrong]
    assert found["type"] == "TypeError"
    assert f"'{wrong}'" in found["text"]
    assert f"did you mean '{meant}'" in found["text"]


def test_arguments_that_onnx_runtime_knows_or_ignores_pass() -> None:
    device = child("session.session_interface.arguments_that_onnx_runtime_knows_or_ignores_pass")
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


def test_one_gpu_named_twice_the_same() -> None:
    found = child(
        """
        os.environ.pop("ORTGPU_ALLOW_CPU")
        providers = [("CUDAExecutionProvider", {"device_id": "00"})]
        names = ("cuda:1", "cuda", "cuda:0", "gpu:0", "0", 0)
        report([outcome(lambda: GPUSession(NEG, None, providers, device=each)) for each in names])
        """
    )
    assert [each["type"] for each in found] == ["ProviderRequestError", *["DriverNotFoundError"] * 5]


def test_methods_that_somebody_puts_in_the_place_of_onnx_runtimes_are_called() -> None:
    """As tracers do, and tests with unittest.mock."""
    called = child("session.session_interface.methods_that_somebody_puts_in_the_place_of_onnx_runtimes_are_called")
    assert called == ["run", "run_with_ort_values", "run_with_iobinding", "io_binding"]


def test_a_device_that_is_none_is_a_mistake_where_the_cpu_is_allowed_too() -> None:
    found = child(
        """
        devices = ("cuda:x", -1, 1.5, "cpu", "cuda:9")
        report([outcome(lambda: GPUSession(NEG, device=each, allow_cpu=True).device.kind) for each in devices])
        """
    )
    mistakes = ["DeviceNotFoundError", "DeviceNotFoundError", "TypeError"]
    assert [each.get("type", each.get("returned")) for each in found] == [*mistakes, "cpu", "cpu"]


def test_options_that_keep_the_cpu_out_outweigh_a_permission() -> None:
    raised = child("session.session_interface.options_that_keep_the_cpu_out_outweigh_a_permission")
    assert raised["type"] in ("DriverNotFoundError", "NoDeviceError")


def test_a_closed_session_is_closed_for_every_use() -> None:
    found = child("session.session_interface.a_closed_session_is_closed_for_every_use")
    assert [(each["type"], each["text"].splitlines()[0]) for each in found] == [
        ("ExecutionError", "this GPUSession is closed")
    ] * 4


def test_a_closed_session_gives_back_the_bytes_of_its_model() -> None:
    freed = child("session.session_interface.a_closed_session_gives_back_the_bytes_of_its_model")
    assert freed == [True, 0]


def test_an_explicit_false_wins_over_the_variable(tmp_path: Path) -> None:
    found = child(
        "session.session_interface.an_explicit_false_wins_over_the_variable",
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
    found = child("session.session_interface.a_session_on_the_cpu_is_logged_where_warnings_are_hidden_and_guarded_too")
    kept, warned = found
    assert [level for level, _ in kept] == ["WARNING", "WARNING"]
    assert all(text.startswith("<bytes> is running on the CPU") for _, text in kept)
    ((kind, text),) = warned
    assert kind == "CPUExecutionWarning"
    assert text.startswith("<bytes> is running on the CPU")


@pytest.mark.parametrize("allowed", [None, False, True])
def test_pickling_carries_what_was_said_of_the_cpu(allowed: bool | None) -> None:
    found = child(
        "session.session_interface.pickling_carries_what_was_said_of_the_cpu",
        json.dumps(allowed),
    )
    works = [each.get("returned", "refused") for each in found]
    assert works == {None: [None, "refused"], False: ["refused", "refused"], True: [True, True]}[allowed]


def test_a_model_that_onnx_runtime_refuses_leaves_no_threads_and_no_warning(tmp_path: Path) -> None:
    """Its weights are not there, which it finds out with the threads of the session made."""
    found = child(
        "session.session_interface.a_model_that_onnx_runtime_refuses_leaves_no_threads_and_no_warning",
        str(tmp_path / "model.onnx"),
    )
    assert found == [[["onnxruntime", 0]] * 2, []]


def test_a_warning_of_the_cpu_that_is_kept_keeps_no_session() -> None:
    """A test does keep it, by pytest.warns, and so does a handler of the log. The second session knows the error."""
    assert child("session.session_interface.a_warning_of_the_cpu_that_is_kept_keeps_no_session") == [
        ["CPUExecutionWarning"] * 2,
        [True, True],
    ]


def test_an_error_of_a_model_follows_no_error_that_was_known() -> None:
    assert child("session.session_interface.an_error_of_a_model_follows_no_error_that_was_known") == [
        "InvalidProtobuf",
        "None",
        "None",
    ]


def test_a_session_that_is_being_opened_is_not_listed() -> None:
    """It was called one that no guard had seen."""
    found = child("session.session_interface.a_session_that_is_being_opened_is_not_listed")
    assert found == [[[]], ["GPUSession"]]


def test_a_warning_of_the_cpu_that_is_raised_leaves_no_session() -> None:
    found = child("session.session_interface.a_warning_of_the_cpu_that_is_raised_leaves_no_session")
    assert found[0] in ("DriverNotFoundError", "NoDeviceError")
    assert found[1:] == [0, 0]


def test_the_name_of_a_model_adds_no_line_to_what_a_session_shows(tmp_path: Path) -> None:
    path = tmp_path / "a\nTo fix it:\u202e\u2028.onnx"
    found = child(
        "session.session_interface.the_name_of_a_model_adds_no_line_to_what_a_session_shows",
        str(path),
    )
    for text in found:
        assert r"a\nTo fix it:\u202e\u2028.onnx" in text
        assert text.isprintable()
