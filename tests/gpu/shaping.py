"""Programs about inputs of several shapes; see programs.py."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from typing import Any

from tests.gpu.programs import attempt
from tests.support.children import report

SIZES = range(64, 128, 8)


def convolutions(*, biases: bool = False, transposed: int | None = None) -> bytes:
    """24 convolutions of images of any size. ``transposed``: the number of a transposed one."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for number in range(24):
        kernel = random.standard_normal((64, 64 if number else 3, 3, 3)) * 0.05
        weights.append(numpy_helper.from_array(kernel.astype(np.float32), f"w{number}"))
        inputs = [x, f"w{number}"]
        if biases:
            weights.append(numpy_helper.from_array(random.standard_normal(64).astype(np.float32), f"b{number}"))
            inputs.append(f"b{number}")
        operator = "ConvTranspose" if number == transposed else "Conv"
        nodes.append(helper.make_node(operator, inputs, [f"c{number}"], f"conv{number}", pads=[1] * 4))
        x = f"r{number}"
        nodes.append(helper.make_node("Relu", [f"c{number}"], [x], f"relu{number}"))
    x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    graph = helper.make_graph(
        nodes, "g", [x_info], [helper.make_tensor_value_info(x, TensorProto.FLOAT, None)], weights
    )
    opset = helper.make_opsetid("", 17)
    data: bytes = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    return data


def several_shapes() -> None:
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    random, model = np.random.default_rng(1), convolutions()
    feeds = [{"x": random.standard_normal((1, 3, size, 96), np.float32)} for size in SIZES]
    providers: list[Any] = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]
    session = GPUSession(model)
    plain = onnxruntime.InferenceSession(model, providers=providers)
    expected = [plain.run(None, feed)[0] for feed in feeds]

    def milliseconds(feed: Any) -> float:
        start = time.perf_counter()
        session.run(None, feed)
        return 1e3 * (time.perf_counter() - start)

    first = [session.run(None, feed)[0] for feed in feeds]
    report("without plans", [np.array_equal(one, other) for one, other in zip(first, expected, strict=True)])
    changed = [milliseconds(feed) for feed in feeds[:3]]
    report("warm", [len(session.warm(feeds).kept), session.shapes.why_none])
    in_turn = [milliseconds(feed) for _ in range(5) for feed in feeds]
    report("times", [statistics.median(changed), statistics.median(in_turn)])
    report(
        "run",
        [np.array_equal(session.run(None, feed)[0], wanted) for feed, wanted in zip(feeds, expected, strict=True)],
    )
    on_device = [session.run_on_device(None, feed)[0].numpy() for feed in feeds]
    report("run_on_device", [np.array_equal(one, other) for one, other in zip(on_device, expected, strict=True)])
    mapped = [results[0] for results in session.map(feeds * 4)]
    report("map", all(np.array_equal(one, other) for one, other in zip(mapped, expected * 4, strict=True)))
    outcomes: list[bool] = []

    def in_thread(number: int) -> None:
        for turn in range(100):
            chosen = (number + turn // 50) % len(feeds)
            outcomes.append(np.array_equal(session.run(None, feeds[chosen])[0], expected[chosen]))

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    report("threads", [len(outcomes), all(outcomes)])
    report("plans", session.memory.plans)
    session.trim()
    report("trimmed", [session.memory.plans, np.array_equal(session.run(None, feeds[0])[0], expected[0])])


def with_lanes() -> tuple[Any, list[Any]]:
    """Return a session that serves its shapes in several lanes, and the feeds."""
    import numpy as np

    from ortgpu import GPUSession

    random = np.random.default_rng(1)
    feeds = [{"x": random.standard_normal((1, 3, size, 96), np.float32)} for size in SIZES]
    session = GPUSession(convolutions())
    session.warm(feeds)
    plans = session._gpu_runner._plans  # type: ignore[attr-defined]  # of the runner of several shapes
    end = time.monotonic() + 60

    def in_thread(number: int) -> None:
        while len(plans.lanes) < 2 and time.monotonic() < end:
            session.run(None, feeds[number])

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(len(feeds))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    report("lanes", len(plans.lanes))
    return session, feeds


def shapes_poisoned() -> None:
    import numpy as np

    session, feeds = with_lanes()
    x = feeds[0]["x"]

    def read_what_is_not_there() -> object:
        binding = session.io_binding()
        binding.bind_input("x", "cuda", 0, np.float32, x.shape, 0x7000)  # no such address on any GPU
        binding.bind_output(session.get_outputs()[0].name, "cuda")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0].shape

    attempt("poison", read_what_is_not_there)
    for number, feed in enumerate(feeds):
        attempt(f"run {number}", lambda feed=feed: session.run(None, feed)[0].shape)  # type: ignore[misc]
    attempt("run_on_device", lambda: session.run_on_device(None, feeds[0])[0].shape())
    attempt("close", session.close)


def shapes_forked() -> None:
    session, feeds = with_lanes()
    for name, action in (("run", lambda: session.run(None, feeds[0])[0].shape), ("close", session.close)):
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # a deadlock ends here
            attempt(name, action)
            os._exit(0)
        report(f"{name}: status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    attempt("parent", lambda: [session.run(None, feed)[0].shape for feed in feeds])


def channels_last() -> None:
    """A session as a record of tune opens it: whether there are plans, results are equal, and a change is cheap."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    random = np.random.default_rng(1)
    feeds = [{"x": random.standard_normal((1, 3, size, 96), np.float32)} for size in SIZES]
    for name, model, fused in (
        ("biases", convolutions(biases=True, transposed=22), "0"),
        ("fused biases", convolutions(biases=True), "1"),
        ("no biases", convolutions(transposed=22), "0"),
    ):
        options = {"cudnn_conv_algo_search": "HEURISTIC", "prefer_nhwc": "1", "fuse_conv_bias": fused}
        providers: list[Any] = [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
        with GPUSession(model, providers=providers) as session:  # loads the libraries for the other one, too
            plain = onnxruntime.InferenceSession(model, providers=providers)
            expected = [plain.run(None, feed)[0] for feed in feeds]
            kept = session.warm(feeds)
            start = time.perf_counter()
            results = [session.run(None, feed)[0] for _ in range(5) for feed in feeds]
            in_turn = time.perf_counter() - start
            equal = [np.array_equal(one, other) for one, other in zip(results, expected * 5, strict=True)]
        start = time.perf_counter()
        for feed in feeds:
            plain.run(None, feed)
        changed = time.perf_counter() - start
        report(name, [len(kept.kept), kept.why_none, all(equal), in_turn / 5 < changed / 4])


PROGRAMS = {
    "several_shapes": several_shapes,
    "channels_last": channels_last,
    "shapes_poisoned": shapes_poisoned,
    "shapes_forked": shapes_forked,
}
