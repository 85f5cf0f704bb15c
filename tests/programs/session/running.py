"""Programs of ``tests/session/test_running.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import warnings

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as C

from ortgpu import GPUError, GPUSession
from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.provider import lifetime
from ortgpu.provider.devices import Device
from tests.programs import no_search  # noqa: F401

warnings.simplefilter("ignore")


def session():
    made = GPUSession(RELU, allow_cpu=True)
    made.device = Device("cuda", 0, None, "GPU", (9, 0), None, None)
    made._gpu_runner.caller = (None,)  # there are no streams to wait for
    return made


def failing(kind, text):
    class Failing:
        def is_webgpu_graph_capture_enabled(self):
            return False

        def run(self, *_):
            raise kind(text)

        run_with_ort_values = run_with_iobinding = run_with_ortvaluevector = run_async = run
        create_ortvalue_from_shape_and_type = run

    return Failing()


def outcome(action):
    try:
        return {"returned": repr(action())}
    except Exception as error:
        cause = error.__cause__
        return {
            "type": type(error).__name__,
            "text": str(error),
            "cause": type(cause).__name__ if cause else None,
            "details": error.details() if isinstance(error, GPUError) else {},
        }


FEED = {"x": np.ones(4, dtype=np.float32)}


def a_sticky_error_makes_every_session_refuse() -> None:
    one, other = session(), session()
    working = outcome(lambda: other.run(None, FEED)[0].tolist())
    one._sess = failing(C.Fail, "CUDA failure 700: an illegal memory access was encountered")
    first = outcome(lambda: one.run(None, FEED))
    print(
        json.dumps(
            [
                working,
                first,
                outcome(lambda: one.run(None, FEED)),
                outcome(lambda: other.run(None, FEED)),
                outcome(other.io_binding),
                outcome(lambda: lifetime.refuse_if_lost()),
                outcome(lambda: GPUSession(RELU, allow_cpu=True).device.kind),
                outcome(other.close),
            ]
        )
    )


def a_layout_that_a_record_chose_can_be_done_without() -> None:
    texts = []
    for chosen in ({}, {"prefer_nhwc": ("1", "faster")}):
        for text in ("CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED", "CUDA failure 2: out of memory"):
            made = session()
            made._verified = dataclasses.replace(made._verified, options_chosen=chosen)
            made._sess = failing(C.Fail, text)
            texts.append(outcome(lambda: made.run(None, FEED)))
    print(json.dumps([[each["type"], "tuned=False" in each["text"]] for each in texts]))


def cudnn_that_a_session_was_opened_without_is_not_said_to_be_missing() -> None:
    errors = []
    for chosen in ({}, {"enable_cudnn": ("0", "smaller")}):
        made = session()
        made._verified = dataclasses.replace(made._verified, options_chosen=chosen)
        made._sess = failing(C.NotImplemented, "cuDNN is not available. Install cuDNN, or set enable_cudnn=0")
        errors.append(outcome(lambda: made.run(None, FEED)))
    print(json.dumps([[each["type"], "enable_cudnn" in each["text"].partition("To fix")[2]] for each in errors]))


def a_sticky_error_that_a_callback_is_told_of_counts_too() -> None:
    one = session()

    class Failing:
        def is_webgpu_graph_capture_enabled(self):
            return False

        def run_async(self, names, feed, callback, data, options):
            callback([], data, "CUDA failure 719: unspecified launch failure")

    one._sess = Failing()
    told = []
    one.run_async(None, FEED, lambda results, data, text: told.append(text), None)
    print(json.dumps([told, outcome(lambda: one.run(None, FEED))]))


def a_forked_child_is_refused_by_every_method() -> None:
    made = session()
    binding = made.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(FEED["x"])
    read, write = os.pipe()
    if os.fork() == 0:
        signal.alarm(20)
        actions = [
            lambda: made.run(None, FEED),
            lambda: made.run_with_ort_values(["y"], {"x": value}),
            made.io_binding,
            lambda: made.run_with_iobinding(binding),
            lambda: made.run_async(None, FEED, print, None),
            lambda: made.run_with_ortvaluevector(None, [], [], [], [], []),
        ]
        os.write(write, json.dumps([outcome(action) for action in actions]).encode())
        os._exit(0)
    os.wait()
    print(
        json.dumps([json.loads(os.read(read, 100000)), outcome(lambda: made.run(None, FEED)[0].tolist()), os.getpid()])
    )


def use_after_close_is_told_by_every_method_and_closing_again_is_fine() -> None:
    with session() as made:
        before = made.run(None, FEED)[0].tolist()
        binding = made.io_binding()
    made.close()
    print(
        json.dumps(
            [
                before,
                outcome(lambda: made.run(None, FEED)),
                outcome(made.io_binding),
                outcome(lambda: made.run_with_iobinding(binding)),
                outcome(lambda: list(made.get_inputs())),
            ]
        )
    )


def pickling_carries_model_options_and_arguments() -> None:
    from tests.programs.worker_options import make_options

    made = GPUSession(RELU, make_options, ["CUDAExecutionProvider"], device="cuda:0", cpu_nodes="allow", allow_cpu=True)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))))
    carried = again.get_session_options()
    print(
        json.dumps(
            [
                again.run(None, FEED)[0].tolist(),
                carried.intra_op_num_threads,
                carried.get_session_config_entry("session.intra_op.allow_spinning"),
                again._request.device,
                again._request.cpu_nodes,
                again._request.allow_cpu,
            ]
        )
    )


def unpickling_verifies_again() -> None:
    data = pickle.dumps(GPUSession(RELU, allow_cpu=True)).replace(b"allow_cpu\x94\x88", b"allow_cpu\x94\x89")
    print(json.dumps(outcome(lambda: pickle.loads(data))))


def no_method_leads_to_the_cpu() -> None:
    made = session()
    print(
        json.dumps(
            [
                outcome(made.enable_fallback),
                outcome(lambda: made.set_providers(["CPUExecutionProvider"])),
                outcome(lambda: made.run(None, FEED)[0].tolist()),
                outcome(lambda: made._enable_fallback),
            ]
        )
    )
