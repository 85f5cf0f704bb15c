"""Programs of ``tests/running/test_one_stream.py``."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from ortgpu import GPUSession
from ortgpu.running import one_stream
from tests.programs import no_search  # noqa: F401
from tests.programs.on_cpu import NEG, report

FEED = {"x": np.ones(2, np.float32)}


def watched(option: str, session: GPUSession) -> list[int]:
    """The threads that set the device. The session has ``option`` in its provider options, as ONNX Runtime tells."""
    set_by: list[int] = []
    one_stream.device_setter = lambda _: lambda: set_by.append(threading.get_ident())  # type: ignore[attr-defined]  # a stand-in
    options = {"CUDAExecutionProvider": {option: "1", "has_user_compute_stream": "0"}}
    one_stream.InferenceSession = SimpleNamespace(get_provider_options=lambda _: options)  # type: ignore[misc,assignment,attr-defined]  # a stand-in
    one_stream.set_device_in_runs(session, session._gpu_runner, session.device)  # type: ignore[arg-type]  # a GPUSession runs
    return set_by


class Native:
    """The C++ session, which notes the threads of its runs."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.ran_in = inner, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, *arguments: Any) -> Any:
        self.ran_in.append(threading.get_ident())
        return self.inner.run(*arguments)


def each_way_to_run_sets_the_device_first() -> None:
    session = GPUSession(NEG)
    set_by = watched(sys.argv[1], session)

    def by_binding() -> Any:
        binding = session.io_binding()
        binding.bind_cpu_input("x", FEED["x"])
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0]

    def by_async() -> Any:
        done, answer = threading.Event(), list[Any]()

        def keep(results: Any, _: None, text: str) -> None:
            answer.append(results[0] if not text else text)
            done.set()

        session.run_async(None, FEED, keep, None)
        done.wait(60)
        return answer[0]

    def by_requests() -> Any:
        with session.batched() as service:
            return service.run(None, FEED)[0]

    value = onnxruntime.OrtValue.ortvalue_from_numpy(FEED["x"])
    ways = {
        "run": lambda: session.run(None, FEED)[0],
        "run_on_device": lambda: session.run_on_device(None, FEED)[0].numpy(),
        "run_with_iobinding": by_binding,
        "run_with_ort_values": lambda: session.run_with_ort_values(None, {"x": value})[0].numpy(),
        "map": lambda: next(iter(session.map([FEED])))[0],
        "run_async": by_async,
        "batched": by_requests,
    }
    found = {}
    for name, way in ways.items():
        set_by.clear()
        found[name] = [np.array_equal(way(), -FEED["x"]), bool(set_by)]
    native = Native(session._sess)
    session._sess = native
    set_by.clear()
    by_async()
    found["run_async"].append(native.ran_in == set_by)
    found["run_async"] = [found["run_async"][0], all(found["run_async"][1:])]
    report(found)


def other_sessions_are_left_alone() -> None:
    session = GPUSession(NEG)
    if sys.argv[1] == "none":
        set_by = watched("arena_extend_strategy", session)
    else:
        set_by = watched("use_ep_level_unified_stream", GPUSession(NEG))
        one_stream.device_setter = lambda _: None  # type: ignore[attr-defined]  # a stand-in
        one_stream.set_device_in_runs(session, session._gpu_runner, session.device)  # type: ignore[arg-type]  # a GPUSession runs
    session.run(None, FEED)
    report([type(session._gpu_runner).__name__, session._gpu_runner.use_device, not set_by])


def an_error_of_run_async_reaches_the_callback() -> None:
    session = GPUSession(NEG)
    watched("use_ep_level_unified_stream", session)
    inner = session._sess

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def run(self, *_: Any) -> None:
            raise RuntimeError("as a run may")

    session._sess = Failing()
    done, texts = threading.Event(), list[str]()

    def keep(results: Any, _: None, text: str) -> None:
        texts.append(text)
        done.set()

    session.run_async(None, FEED, keep, None)
    done.wait(60)
    try:
        session.run_async(None, {}, keep, None)
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    report([texts[0], raised])


def runs_with_the_plans_of_further_shapes_set_the_device() -> None:
    from ortgpu.running.shape_plans import OneAtATime

    order: list[str] = []

    class Counted:
        def run(self) -> None:
            order.append("run")

        run_with_ortvaluevector = run

    native = OneAtATime(Counted(), lambda: order.append("set"))
    native.run()
    native.run_with_ortvaluevector()
    native.take_turn(Counted().run)
    report(order)


def a_handler_amid_a_run_makes_its_run_async_itself() -> None:
    from ortgpu.process.threads import Turns
    from ortgpu.running.memory import Holdings
    from ortgpu.running.turns import take_turns

    session, turns, order = GPUSession(NEG), Turns(), list[str]()
    session._holdings = Holdings(1 << 30, turns, 0)
    take_turns(session._gpu_runner, turns)
    inner = session._sess

    def keep(results: Any, _: None, text: str) -> None:
        order.append(text or str(results[0].tolist()))

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def run(self, *arguments: Any) -> Any:
            if not order:
                order.append("amid a run")
                session.run_async(None, FEED, keep, None)
                order.append("after it")
            return inner.run(*arguments)

    session._sess = Interrupted()
    order.append(str(session.run(None, FEED)[0].tolist()))
    done = threading.Event()
    session.run_async(None, FEED, lambda *_: done.set(), None)
    order.append("later" if done.wait(60) else "never")
    report(order)
