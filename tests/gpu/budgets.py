"""Programs about GPU memory that runs out; see programs.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.children import report

MIB = 1 << 20
KINDS = ("Conv", "ConvTranspose", "channels-last", "fixed", "graph")
ARENA = 256 * MIB


def convolution(operator: str = "Conv", *, fixed: bool = False) -> bytes:
    """One convolution of 16 to 64 channels, which keeps the size of the image."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    shape = (16, 64, 3, 3) if operator == "ConvTranspose" else (64, 16, 3, 3)
    kernel = (np.random.default_rng(0).standard_normal(shape) * 0.1).astype(np.float32)
    nodes = [
        helper.make_node(operator, ["x", "w"], ["c"], "convolution", pads=[1] * 4),
        helper.make_node("Neg", ["c"], ["y"], "negate"),
    ]
    size: list[int | str | None] = [1, 16, 512, 512] if fixed else ["batch", 16, "height", "width"]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(kernel, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


def by_binding(session: Any, feed: Any) -> Any:
    binding = session.io_binding()
    binding.bind_cpu_input("x", feed["x"])
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


def by_values(session: Any, feed: Any) -> Any:
    import onnxruntime

    return session.run_with_ort_values(None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(feed["x"])})[0].numpy()


def by_async(session: Any, feed: Any) -> Any:
    from ortgpu import GPUOutOfMemoryError

    done, answer = threading.Event(), list[Any]()

    def keep(results: Any, _: None, text: str) -> None:
        answer.append(results or text)
        done.set()

    session.run_async(None, feed, keep, None)
    done.wait(60)
    if isinstance(answer[0], str):  # No test of this module expects another error there.
        raise GPUOutOfMemoryError(answer[0])
    return answer[0][0]


WAYS_TO_RUN: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda session, feed: session.run(None, feed)[0],
    "run_on_device": lambda session, feed: session.run_on_device(None, feed)[0].numpy(),
    "run_with_iobinding": by_binding,
    "run_with_ort_values": by_values,
    "map": lambda session, feed: next(iter(session.map([feed])))[0],
    "run_async": by_async,
}
WAYS = tuple(WAYS_TO_RUN)


def after_out_of_memory() -> None:
    """The result of a shape whose first run had no memory for the output of the convolution."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUOutOfMemoryError, GPUSession

    random = np.random.default_rng(1)
    small, large = ({"x": random.standard_normal((1, 16, size, size), np.float32)} for size in (64, 512))
    place = onnxruntime.OrtDevice.make("cuda", 0)._get_c_device()

    def outcome(model: bytes, way: str, *, first: bool, **arguments: Any) -> str:
        options = {"gpu_mem_limit": str(ARENA), "arena_extend_strategy": "kSameAsRequested", "prefer_nhwc": "0"}
        options |= arguments.pop("options", {})
        expected = GPUSession(model, providers=[("CUDAExecutionProvider", {**options, "gpu_mem_limit": str(8 << 30)})])
        (wanted,) = expected.run(None, large)
        expected.close()
        session = GPUSession(model, providers=[("CUDAExecutionProvider", options)], **arguments)
        if first:
            session.run(None, small)
        held = session._sess.create_ortvalue_from_shape_and_type([180 * MIB // 4], np.float32, place)
        try:
            WAYS_TO_RUN[way](session, large)
            return "the first run had room"
        except GPUOutOfMemoryError:
            del held
        result = WAYS_TO_RUN[way](session, large)
        session.close()
        right = result.shape == wanted.shape and np.allclose(result, wanted, rtol=2e-2, atol=2e-2 * abs(wanted).max())
        return "right" if right else "wrong"

    for way in WAYS:
        report(way, outcome(convolution(), way, first=True))
    report("Conv", outcome(convolution(), "run", first=False))
    report("ConvTranspose", outcome(convolution("ConvTranspose"), "run", first=True))
    report("channels-last", outcome(convolution(), "run", first=True, options={"prefer_nhwc": "1"}))
    report("fixed", outcome(convolution(fixed=True), "run", first=False))
    report("graph", outcome(convolution(), "run", first=True, cuda_graph=True))


def two_gpus_in_one_thread() -> None:
    """Sessions with one stream on two GPUs, used in turn by one thread, beside those that make their own streams."""
    import numpy as np

    from ortgpu import GPUSession

    random = np.random.default_rng(3)
    feeds = [{"x": random.standard_normal((1, 16, size, size), np.float32)} for size in (64, 96, 128)]

    plain = GPUSession(convolution())
    wanted = [plain.run(None, feed)[0] for feed in feeds]
    one_stream = [("CUDAExecutionProvider", {"use_ep_level_unified_stream": "1"}), "CPUExecutionProvider"]
    arguments: dict[str, dict[str, Any]] = {"budget": {"memory": "2GiB"}, "option": {"providers": one_stream}}
    for name, given in arguments.items():
        sessions = [GPUSession(convolution(), device=ordinal, **given) for ordinal in (0, 1)]
        for way, run in WAYS_TO_RUN.items():
            outcomes = []
            for _ in range(3):
                for feed, right in zip(feeds, wanted, strict=True):
                    for session in sessions:
                        try:
                            found = run(session, feed)
                            close = np.allclose(found, right, rtol=2e-2, atol=2e-2 * abs(right).max())
                            outcomes.append("right" if close else "wrong")
                        except Exception as error:  # noqa: BLE001 - the test decides
                            outcomes.append(f"{type(error).__name__}: {error}"[:300])
            report(f"{name}, {way}", sorted(set(outcomes)))


def random_shapes() -> None:
    """Runs of random shapes within a budget, each beside plain ONNX Runtime's."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUOutOfMemoryError, GPUSession
    from tests.support.gpu_memory import used_bytes

    model, budget = convolution(), 400 * MIB
    providers: list[Any] = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]
    warm = GPUSession(model)
    warm.run(None, {"x": np.ones((1, 16, 64, 64), np.float32)})
    uuid = warm.device.uuid or ""
    warm.close()
    plain = onnxruntime.InferenceSession(model, providers=providers)
    random, outcomes, highest = np.random.default_rng(2), {"right": 0, "wrong": 0, "out of memory": 0}, 0
    feeds = [
        {"x": random.standard_normal((int(random.integers(1, 4)), 16, *random.integers(64, 800, 2)), np.float32)}
        for _ in range(40)
    ]
    wanted = [plain.run(None, feed)[0] for feed in feeds]
    del plain

    before = used_bytes(uuid)
    session = GPUSession(model, memory=budget)
    for feed, expected in zip(feeds, wanted, strict=True):
        try:
            result = session.run(None, feed)[0]
            close = np.allclose(result, expected, rtol=2e-2, atol=2e-2 * abs(expected).max())
            outcomes["right" if close else "wrong"] += 1
        except GPUOutOfMemoryError:
            outcomes["out of memory"] += 1
        highest = max(highest, used_bytes(uuid) - before)
    report("outcomes", outcomes)
    report("above", highest - budget)


def plans_within_a_budget() -> None:
    """Plans for further shapes count in the budget, and are given back when a run needs their part."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession
    from tests.gpu.shaping import SIZES, convolutions
    from tests.support.gpu_memory import used_bytes

    model, budget, random = convolutions(), 1024 * MIB, np.random.default_rng(1)
    providers: list[Any] = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]
    feeds = [{"x": random.standard_normal((1, 3, size, 96), np.float32)} for size in SIZES]
    # Two arrays of 224 MiB: more than half of the arena, and less than all of it
    large = {"x": random.standard_normal((2, 3, 448, 512), np.float32)}
    with GPUSession(model) as warm:  # the kernels
        for feed in feeds[:2]:
            warm.run(None, feed)
        uuid = warm.device.uuid or ""
    plain = onnxruntime.InferenceSession(model, providers=providers)
    wanted, (large_wanted,) = [plain.run(None, feed)[0] for feed in feeds], plain.run(None, large)
    del plain

    before = used_bytes(uuid)
    session = GPUSession(model, memory=budget)
    report("kept", [len(session.warm(feeds).kept), session.shapes.why_none])
    report(
        "right", [np.array_equal(session.run(None, feed)[0], each) for feed, each in zip(feeds, wanted, strict=True)]
    )
    report("plans", session.memory.plans)
    highest = used_bytes(uuid) - before
    (result,) = session.run(None, large)
    report("large", bool(np.allclose(result, large_wanted, rtol=2e-2, atol=2e-2 * abs(large_wanted).max())))
    report("given back", session.memory.plans)
    report("above", max(highest, used_bytes(uuid) - before) - budget)
    report("then", [np.allclose(session.run(None, feeds[0])[0], wanted[0], rtol=2e-2, atol=2e-2), str(session.memory)])


def graphs_within_a_budget() -> None:
    """Captured graphs and their buffers count in a budget, and a run that needs their part gets it."""
    import numpy as np
    import onnx.parser
    import onnxruntime

    from ortgpu import GPUSession
    from tests.gpu.shaping import convolutions
    from tests.support.gpu_memory import used_bytes

    model, budget, random = convolutions(), 700 * MIB, np.random.default_rng(1)
    providers: list[Any] = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]
    feeds = [{"x": random.standard_normal((1, 3, 64 + 8 * number, 96), np.float32)} for number in range(12)]
    with GPUSession(model, cuda_graph=True) as warm:  # the kernels
        for feed in feeds[:2]:
            warm.run(None, feed)
        uuid = warm.device.uuid or ""
    plain = onnxruntime.InferenceSession(model, providers=providers)
    wanted = [plain.run(None, feed)[0] for feed in feeds]
    del plain

    def is_close(result: Any, expected: Any) -> bool:
        return bool(np.allclose(result, expected, rtol=2e-2, atol=2e-2 * abs(expected).max()))

    before = used_bytes(uuid)
    session, right, highest = GPUSession(model, memory=budget, cuda_graph=True), list[bool](), 0
    for _ in range(3):
        for feed, expected in zip(feeds, wanted, strict=True):
            right.append(is_close(session.run(None, feed)[0], expected))
            highest = max(highest, used_bytes(uuid) - before)
    report("graphs", session.memory.graphs)
    report("captures", session._sess.captures)
    report("outside", highest - (session.memory.arena or 0) - (session.memory.graphs or 0))
    others: list[bool] = []
    threads = [
        threading.Thread(target=lambda: others.append(is_close(session.run(None, feeds[0])[0], wanted[0])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report("above", max(highest, used_bytes(uuid) - before) - budget)
    report("right", [*right, *others])
    report("memory", str(session.memory))
    session.close()

    # Three arrays are more than three quarters of the arena, and less than all of it.
    small, large = ({"x": np.full(mebibytes * MIB // 4, 2, np.float32)} for mebibytes in (1, 160))
    chain = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> two (float[n] x) => (float[n] z) { y = Neg(x) z = Abs(y) }'
    )
    session = GPUSession(chain.SerializeToString(), memory=budget, cuda_graph=True)
    captured, results = list[Any](), list[bool]()
    for feed in (small, large, small):
        results.append(np.array_equal(session.run(None, feed)[0], feed["x"]))
        captured.append(session._sess.captures)
        highest = max(highest, used_bytes(uuid) - before)
    report("large", [results, captured])
    report("above with a large run", highest - budget)


def pool_within_a_budget(*, isolate: bool) -> None:
    """The sessions of one GPU, in this process or in others, share the budget of a pool."""
    import numpy as np

    from ortgpu import GPUOutOfMemoryError, GPUSession, GPUSessionPool
    from tests.gpu.running import elementwise
    from tests.support.gpu_memory import used_bytes

    model, budget, sessions = elementwise("n"), 700 * MIB, 2
    feeds = [{"x": np.full(mebibytes * MIB // 4, mebibytes, np.float32)} for mebibytes in (1, 30, 8, 60, 90, 4, 400)]
    if isolate:
        from ortgpu.environment.gpu.cuda import initialise
        from ortgpu.provider.devices import choose_visible

        uuid = choose_visible(0, initialise()).uuid or ""
    else:
        with GPUSession(model) as warm:
            warm.run(None, feeds[0])
            uuid = warm.device.uuid or ""
    before = used_bytes(uuid)
    contexts, highest, outcomes = 0, 0, {"right": 0, "wrong": 0, "out of memory": 0}
    if isolate:  # Each process has a context, which no budget counts.
        with GPUSessionPool(model, [0], sessions, isolate=True) as pool:
            contexts = used_bytes(uuid) - before
    pool = GPUSessionPool(model, [0], sessions, isolate=isolate, memory=budget)
    for _ in range(4):
        futures = [(feed, pool.submit(None, feed)) for feed in feeds]
        for feed, future in futures:
            try:
                outcomes["right" if np.array_equal(future.result()[0], -feed["x"]) else "wrong"] += 1
            except GPUOutOfMemoryError:
                outcomes["out of memory"] += 1
            highest = max(highest, used_bytes(uuid) - before)
    report("outcomes", outcomes)
    report("above", highest - contexts - budget)
    report("contexts", contexts)
    report("then", bool((pool.run(None, feeds[0])[0] == -1).all()))
    pool.close()


PROGRAMS = {
    "graphs_within_a_budget": graphs_within_a_budget,
    "pool_within_a_budget": pool_within_a_budget,
    "plans_within_a_budget": plans_within_a_budget,
    "after_out_of_memory": after_out_of_memory,
    "random_shapes": random_shapes,
    "two_gpus_in_one_thread": two_gpus_in_one_thread,
}
