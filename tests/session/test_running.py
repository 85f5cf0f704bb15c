"""What a session raises while it runs, where there is no GPU: ONNX Runtime's exceptions with the texts of an H200.

A session on the CPU has its C++ session replaced by one whose every method raises such an exception, as the real one
does; everything above it is the real thing. Each case is a child process.
"""

# ruff: noqa: E501 - the texts of ONNX Runtime are as long as they are

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fork_server import run_forked

CALL = "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t<THRW, void, Status> CudaCall(...) "
WHERE = " ; GPU=0 ; hostname=vm ; file=/onnxruntime_src/x.cc ; line=91 ; expr=cudaMemcpyAsync(...); "
FAIL = "[ONNXRuntimeError] : 1 : FAIL : "

# Exception class, text, error, details
FAILURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "arena limit": (
        "C.Fail",
        FAIL + "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:360 void* onnxruntime::BFCArena::AllocateRawInternal("
        "size_t, bool, onnxruntime::Stream*) Available memory of 67108864 is smaller than requested bytes of 268435456\n",
        "GPUOutOfMemoryError",
        {"requested": 268435456},
    ),
    "arena cannot grow": (
        "C.Fail",
        FAIL + "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824\n",
        "GPUOutOfMemoryError",
        {"requested": 1073741824},
    ),
    "out of memory below": ("RuntimeError", CALL + "CUDA failure 2: out of memory" + WHERE, "GPUOutOfMemoryError", {}),
    "cublas": (
        "C.Fail",
        FAIL + "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED" + WHERE,
        "GPUOutOfMemoryError",
        {},
    ),
    "cublas of 1.31": (
        "C.Fail",
        FAIL + "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; hostname=vm ; file=/onnxruntime_src/onnxruntime"
        "/core/providers/cuda/cuda_stream_handle.cc ; line=79 ; expr=cublasCreate(&cublas_handle_); \n",
        "GPUOutOfMemoryError",
        {},
    ),
    "illegal address": (
        "C.Fail",
        FAIL + "CUDA failure 700: an illegal memory access was encountered" + WHERE,
        "PoisonedContextError",
        {"cuda_code": 700},
    ),
    "launch failure": ("RuntimeError", CALL + "CUDA failure 719: unspecified launch failure" + WHERE, "PoisonedContextError",
                       {"cuda_code": 719}),
    "no kernel image": (
        "C.Fail",
        FAIL + "CUDA failure 209: no kernel image is available for execution on the device" + WHERE,
        "UnsupportedDeviceError",
        {},
    ),
    "cudnn": (
        "C.Fail",
        FAIL + "CUDNN failure 3: CUDNN_STATUS_BAD_PARAM" + WHERE,
        "ProviderFailureError",
        {"library": "CUDNN", "status": "CUDNN_STATUS_BAD_PARAM"},
    ),
    "cudnn of two releases": (
        "C.Fail",
        FAIL + "CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH" + WHERE,
        "LibraryConflictError",
        {},
    ),
    "cudnn frontend": (
        "C.EPFail",
        "[ONNXRuntimeError] : 11 : EP_FAIL : CUDNN_FE failure 8: HEURISTIC_QUERY_FAILED" + WHERE,
        "ProviderFailureError",
        {"library": "CUDNN", "status": "HEURISTIC_QUERY_FAILED"},
    ),
    "provider": ("C.EPFail", "[ONNXRuntimeError] : 11 : EP_FAIL : engine could not be built", "ProviderFailureError",
                 {"status": "EP_FAIL"}),
    "no cudnn": (
        "C.NotImplemented",
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : cuDNN is unavailable or disabled for CUDA Execution Provider: cuDNN is "
        "not available.",
        "LibraryNotFoundError",
        {"missing": ["libcudnn.so.9"]},
    ),
}  # fmt: skip

OTHERS = {
    "wrong input": (
        "C.InvalidArgument",
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x",
    ),
    "model error": ("C.Fail", FAIL + "Non-zero status code returned while running Gather node. indices out of bounds"),
    "python error": ("KeyError", "x"),
}


def child(program: str) -> Any:
    """What the program printed as JSON."""
    return json.loads(run_forked(program, behind="session.running").ok().stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes() -> Any:
    """Every failure out of every method, each in a session of its own; poison is taken back between them."""
    cases = json.dumps({name: case[:2] for name, case in {**FAILURES, **OTHERS}.items()})
    return child(f"""
        out = {{}}
        for name, (kind, text) in json.loads({cases!r}).items():
            made = session()
            made._sess = failing(eval(kind), text)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(FEED["x"])
            class Binding: _session, _iobinding = made._sess, None
            out[name] = {{
                "run": outcome(lambda: made.run(None, FEED)),
            }}
            made._sess = failing(eval(kind), text)
            out[name]["run_with_ort_values"] = outcome(lambda: made.run_with_ort_values(["y"], {{"x": value}}))
            made._sess = failing(eval(kind), text)
            Binding._session = made._sess
            out[name]["run_with_iobinding"] = outcome(lambda: made.run_with_iobinding(Binding()))
            made._sess = failing(eval(kind), text)
            out[name]["run_with_ortvaluevector"] = outcome(lambda: made.run_with_ortvaluevector(None, [], [], [], [], []))
            made._sess = failing(eval(kind), text)
            out[name]["run_async"] = outcome(lambda: made.run_async(None, FEED, print, None))
            lifetime._poison = None
        print(json.dumps(out))
    """)


METHODS = ["run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector", "run_async"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAILURES)
def test_failures_become_typed(outcomes: Any, name: str, method: str) -> None:
    kind, _, expected, details = FAILURES[name]
    raised = outcomes[name][method]
    assert raised["type"] == expected
    assert raised["cause"] == kind.removeprefix("C.")
    assert details.items() <= raised["details"].items()
    assert "onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc" not in raised["text"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_about_the_gpu_stays_as_it_is(outcomes: Any, name: str, method: str) -> None:
    raised = outcomes[name][method]
    assert raised["type"] == OTHERS[name][0].removeprefix("C.")
    assert OTHERS[name][1] in raised["text"]


@pytest.mark.parametrize("name", ["arena cannot grow", "illegal address"])
def test_making_a_value_in_the_memory_of_a_session_fails_as_a_run_does(name: str) -> None:
    kind, text, expected, _ = FAILURES[name]
    raised = child(f"""
        made = session()
        made._sess = failing({kind}, {text!r})
        make = getattr(made, "create_ortvalue_from_shape_and_type", None)  # not in every release
        print(json.dumps(make and outcome(lambda: make([2], np.float32, "cuda"))))
    """)
    assert raised is None or raised["type"] == expected


def test_a_sticky_error_makes_every_session_refuse() -> None:
    found = child("session.running.a_sticky_error_makes_every_session_refuse")
    assert found[0] == {"returned": "[1.0, 1.0, 1.0, 1.0]"}
    assert [each.get("type") for each in found[1:6]] == ["PoisonedContextError"] * 5
    assert found[2]["cause"] is None
    assert found[6] == {"returned": "'cpu'"}
    assert "type" not in found[7]


def test_a_layout_that_a_record_chose_can_be_done_without() -> None:
    """Kernels of cuDNN differ with it, and one of them may be at fault."""
    found = child("session.running.a_layout_that_a_record_chose_can_be_done_without")
    assert found == [
        ["ProviderFailureError", False],
        ["GPUOutOfMemoryError", False],
        ["ProviderFailureError", True],
        ["GPUOutOfMemoryError", False],
    ]


def test_cudnn_that_a_session_was_opened_without_is_not_said_to_be_missing() -> None:
    found = child("session.running.cudnn_that_a_session_was_opened_without_is_not_said_to_be_missing")
    assert found == [["LibraryNotFoundError", False], ["ProviderOptionError", True]]


def test_a_sticky_error_that_a_callback_is_told_of_counts_too() -> None:
    found = child("session.running.a_sticky_error_that_a_callback_is_told_of_counts_too")
    assert found[0] == ["CUDA failure 719: unspecified launch failure"]
    assert found[1]["type"] == "PoisonedContextError"


def test_a_forked_child_is_refused_by_every_method() -> None:
    found = child("session.running.a_forked_child_is_refused_by_every_method")
    refused, parent, pid = found
    assert [each.get("type") for each in refused] == ["ForkedSessionError"] * 6
    assert {each["details"]["creator_pid"] for each in refused} == {pid}
    assert parent == {"returned": "[1.0, 1.0, 1.0, 1.0]"}


def test_use_after_close_is_told_by_every_method_and_closing_again_is_fine() -> None:
    found = child("session.running.use_after_close_is_told_by_every_method_and_closing_again_is_fine")
    assert found[0] == [1, 1, 1, 1]
    assert [each.get("type") for each in found[1:]] == ["ExecutionError"] * 4
    assert all("closed" in each["text"] for each in found[1:])


def test_pickling_carries_model_options_and_arguments() -> None:
    found = child("session.running.pickling_carries_model_options_and_arguments")
    assert found == [[1, 1, 1, 1], 2, "0", "cuda:0", "allow", True]


def test_unpickling_verifies_again() -> None:
    found = child("session.running.unpickling_verifies_again")
    assert found["type"] == "DriverNotFoundError"


def test_no_method_leads_to_the_cpu() -> None:
    found = child("session.running.no_method_leads_to_the_cpu")
    assert [each.get("type") for each in found[:2]] == ["ProviderRequestError"] * 2
    assert found[2:] == [{"returned": "[1.0, 1.0, 1.0, 1.0]"}, {"returned": "False"}]
