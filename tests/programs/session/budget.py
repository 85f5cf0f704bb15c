"""Programs of ``tests/session/test_budget.py``."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import onnx.parser
import onnxruntime

from ortgpu import GPUSession
from ortgpu.running.cudart import runtime_on
from tests.programs.machines import report

MIB = 1 << 20
text = '<ir_version: 8, opset_import: ["": 17]> two (float[n, m] x) => (float[n, m] z) { y = Neg(x) z = Abs(y) }'
model = onnx.parser.parse_model(text).SerializeToString()


def of(mebibytes):
    return {"x": np.zeros((mebibytes, MIB // 4), np.float32)}


def outcome(action):
    try:
        return {"returned": repr(action())}
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "cause": type(error.__cause__).__name__,
            "requested": getattr(error, "requested", None),
        }


GPUSession(model).close()
device_bytes = runtime_on(0)._library.stub_device_bytes
device_bytes.restype = ctypes.c_size_t


def within() -> None:
    before = device_bytes()
    session = GPUSession(model, memory="230MiB", pinned_memory_limit=0)
    option = session.options_chosen["gpu_mem_limit"][0]
    found, highest = [], 0
    for size in (1, 20, 1, 26, 8, 200, 1, 24, 26):
        found.append(outcome(lambda: session.run(None, of(size))[0].shape))
        highest = max(highest, device_bytes() - before)
    bound = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(of(26)["x"])
    bound.bind_cpu_input("x", of(24)["x"])
    bound.bind_output("z")
    by_binding = outcome(lambda: session.run_with_iobinding(bound))
    del bound
    by_value = outcome(lambda: session.run_with_ort_values(None, {"x": value})[0].shape())
    kept = [session.run_on_device(None, of(20))[0]]
    full = outcome(lambda: session.run(None, of(26)))
    del kept
    after = outcome(lambda: session.run(None, of(26))[0].shape)
    memory = session.memory
    session.close()
    report(
        {
            "option": option,
            "found": found,
            "highest": highest,
            "by_binding": by_binding,
            "by_value": by_value,
            "full": full,
            "after": after,
            "memory": [memory.budget, memory.arena],
            "left": device_bytes() - before,
        }
    )


def opening() -> None:
    import os

    from onnx import helper, numpy_helper

    w = numpy_helper.from_array(np.zeros((4 * MIB,), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [4 * MIB])],
        [helper.make_tensor_value_info("y", 1, [4 * MIB])],
        [w],
    )
    large = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()

    def limit(session):
        found = session.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"], session.memory.budget
        session.close()
        return [found[0], found[1]]

    def with_options(options, **arguments):
        return GPUSession(model, providers=[("CUDAExecutionProvider", options)], **arguments)

    shared = onnxruntime.SessionOptions()
    shared.add_session_config_entry("session.use_env_allocators", "1")
    found = {
        "none": limit(GPUSession(model)),
        "part": limit(GPUSession(model, memory=0.25)),
        "own": limit(with_options({"gpu_mem_limit": "123456789"}, memory="1GiB")),
        "small": outcome(lambda: GPUSession(large, memory="160MiB")),
        "shared": outcome(lambda: GPUSession(model, shared, memory="1GiB")),
        "external": outcome(lambda: with_options({"gpu_external_alloc": "4096"}, memory="1GiB")),
    }
    before = device_bytes()
    outcome(lambda: GPUSession(large, memory="160MiB"))
    found["left"] = device_bytes() - before
    os.environ["ORTGPU_MEMORY"] = "2GiB"
    found["variable"] = limit(GPUSession(model))
    found["argument"] = limit(GPUSession(model, memory="1GiB"))
    found["variable shared"] = limit(GPUSession(model, shared))
    import ortgpu

    with ortgpu.enforce():
        session = onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])
        found["guarded"] = session.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"]
    os.environ["ORTGPU_MEMORY"] = "plenty"
    found["wrong"] = outcome(lambda: GPUSession(model))
    report(found)


def given_back() -> None:
    from ortgpu.session import failures

    words = (
        "while running Relu node. bfc_arena.cc Available memory of 60518144 is smaller than requested bytes of 67108864"
    )

    class Kept:
        def bytes_held(self):
            return 5

        def give_back(self):
            found["given back"] = True

    found = {"given back": False}
    session = GPUSession(model, memory="1GiB")
    inner = session._sess
    session._holdings.room = 5  # as if it had plans
    session._holdings.add("plans", Kept())

    def again():
        return [session._sess is not inner, session.memory.plans, session._holdings.room]

    found["again"] = failures.call_again(session, RuntimeError(words), again)
    found["shares"] = session._request.shares_budget
    report(found)


def in_turns() -> None:
    from ortgpu.running.pinned import memory_of
    from ortgpu.session import failures

    words = (
        "while running Relu node. bfc_arena.cc Available memory of 60518144 is smaller than requested bytes of 67108864"
    )
    session = GPUSession(model, memory="230MiB")
    turns, steps = session._holdings.turns, []
    turns.start("another run", lambda: None)
    again = threading.Thread(
        target=lambda: failures.call_again(session, RuntimeError(words), lambda: steps.append("repeated"))
    )
    again.start()
    again.join(0.5)
    steps.append("the other run ends")
    turns.give("another run")
    again.join(60)
    failures._outdate(session)
    inner = session._sess
    memory = turns.run(lambda: memory_of(session))  # as a run does that copies in threads
    report([steps, session._sess is inner, memory is session._pinned])


def captured() -> None:
    session = GPUSession(model, memory="400MiB", cuda_graph=True, pinned_memory_limit=0)
    inner, found = session._sess, []
    for size in (1, 70, 1):  # Three arrays of 70 MiB are more than three quarters of 250 MiB.
        found.append(outcome(lambda: session.run(None, of(size))[0].shape).get("text", "") or "returned")
        found.append([session._sess is inner, session._holdings.room, session._sess.captures])
    report([*found, inner._inner is None])  # The budget had no room for two.
