"""Programs of ``tests/session/test_construction.py``."""

from __future__ import annotations

import builtins
import gc
import json
import logging
import os
import signal
import sys
import weakref

from onnxruntime import InferenceSession
from onnxruntime.capi import onnxruntime_inference_collection as collection

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.model.outline import GraphOutline
from ortgpu.provider import requests as providers
from ortgpu.provider.runtime import load_runtime
from ortgpu.session import opening
from ortgpu.session.plan import Plan
from ortgpu.session.request import SessionRequest
from tests.programs.on_cpu import outcome, report

CPU = providers.parse(["CPUExecutionProvider"], None)
GIVEN = providers.parse(["CUDAExecutionProvider", "CPUExecutionProvider"], None)
path = sys.argv[1]


def construct(**arguments):
    session = InferenceSession.__new__(InferenceSession)
    plan = Plan(SessionRequest(path, providers=GIVEN, **arguments), CPU, gpu=None, chosen=providers.CHOSEN_OPTIONS)
    ready = opening.Ready(plan, load_runtime(), CudaState(0, None, None))
    opened = opening.open_with_choices(session, session.__init__, ready, GraphOutline(path))
    return session, opened and opened.plan.chosen


def what_a_handler_of_a_signal_raises_is_not_lost() -> None:
    class TimeLimit(vars(builtins)[sys.argv[2]]):
        pass

    def limit(*_):
        raise TimeLimit("of the job")

    signal.signal(signal.SIGALRM, limit)

    def slow(*_, **__):
        signal.raise_signal(signal.SIGALRM)

    collection.C.InferenceSession = slow
    report(outcome(construct))


def a_log_that_keeps_its_records_keeps_nothing_of_a_session() -> None:
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


def what_is_chosen_for_a_file_is_not_for_the_one_that_replaces_it() -> None:
    from pathlib import Path

    from ortgpu.provider.records import Choice, Record, key_of

    new, record = sys.argv[2:4]
    best = Choice({"layout": "channels-last, biases fused", "search": "exhaustive"}, 0.6)
    Record(key_of(GraphOutline(path), None), best, best).write(Path(record))

    def replacing(plan, release, outline, record, plain=opening.fit_to_model):  # type: ignore[attr-defined]  # its name in there
        chosen = plain(plan, release, outline, record)
        if sys.argv[4] == "replaced":
            os.replace(new, outline.model)
        return chosen

    opening.fit_to_model = replacing  # type: ignore[attr-defined]  # its name in there
    session, chosen = construct(tuned=record)
    report([chosen is not None and "prefer_nhwc" in chosen, hasattr(session, "_sess")])


def capturing() -> None:
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
    best, gpu = Choice({"graph": "captured"}, 0.6), CudaDevice(0, None, None, None, None, None)
    Record(key_of(GraphOutline(path), gpu), Choice({}, 1.0), best).write(Path(record))
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
