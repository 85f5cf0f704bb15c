"""Programs about many feeds at a time, pinned memory, CUDA graphs and arrays of other libraries; see programs.py."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gpu.programs import attempt, device_facts, free_memory, mapped_cuda_libraries, random_feed, relative_error
from tests.gpu.running import elementwise
from tests.support.children import report


def memory_type(address: int) -> int:
    """What CUDA takes an address for: 0 ordinary host memory, 1 pinned, 2 of the device, 3 managed (driver_types.h)."""
    runtime = ctypes.CDLL(mapped_cuda_libraries()["libcudart"][0])
    found = (ctypes.c_int * 64)()  # the structure begins with the type
    status = runtime.cudaPointerGetAttributes(found, ctypes.c_void_p(address))
    return found[0] if status == 0 else -status


def address_of(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def own_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if "ortgpu" in each.name]


def mapped(model: str, batches: list[int]) -> None:
    from ortgpu import GPUSession

    with GPUSession(model) as first:  # loads what CUDA keeps
        feeds = [random_feed(first, batch) for batch in batches]
        expected = [first.run(None, feed) for feed in feeds]
        assert len(list(first.map(feeds * 8))) == len(feeds) * 8  # the kernels of runs side by side, too
        uuid = first.device.uuid
    del first
    gc.collect()
    before = free_memory(uuid)
    session = GPUSession(model)

    def worst(results: Any) -> dict[str, Any]:
        errors = [relative_error(found, right) for found, right in zip(results, expected, strict=True)]
        return {"count": len(errors), "worst": max(errors)}

    attempt("ordinary", lambda: worst(session.map(feeds)))
    attempt("one in flight", lambda: worst(session.map(iter(feeds), in_flight=1)))

    def pinned_feeds() -> Any:
        for feed in feeds:
            pinned = {name: session.pinned_empty(array.shape, array.dtype) for name, array in feed.items()}
            for name, array in feed.items():
                pinned[name][:] = array
            yield pinned

    attempt("pinned", lambda: worst(session.map(pinned_feeds())))

    def staged() -> list[int]:
        from ortgpu.running.pinned import memory_of

        largest = max(feeds, key=lambda feed: sum(array.nbytes for array in feed.values()))
        return [memory_type(address_of(array)) for array in memory_of(session).staged(largest).values()]

    attempt("types of what is staged", staged)
    attempt("in use", lambda: session._pinned.bytes_in_use if session._pinned else None)
    results = session.map(feeds * 100)
    next(results)
    del results
    attempt("threads after an early end", own_threads)
    session.close()
    attempt("threads after close", own_threads)
    attempt("pinned after close", lambda: session._pinned.bytes_held if session._pinned else None)
    gc.collect()
    report("free", {"before": before, "after": free_memory(uuid)})


def refilled_feeds(kind: str, size: int, count: int) -> Any:
    """``count`` feeds with one array that is filled again for each, by a generator that says nothing of it."""
    import numpy as np
    import onnxruntime

    if kind.startswith("torch"):
        torch: Any = importlib.import_module("torch")
        tensor = torch.zeros(size, device="cuda" if kind == "torch on the GPU" else "cpu")
        for number in range(count):
            tensor.fill_(number)
            yield {"x": tensor}
    elif kind == "cupy":
        cupy: Any = importlib.import_module("cupy")
        shown = cupy.zeros(size, cupy.float32)
        for number in range(count):
            shown.fill(number)
            yield {"x": shown}
    elif kind.startswith("value"):
        device = "cuda" if kind == "value on the GPU" else "cpu"
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(size, np.float32), device, 0)
        for number in range(count):
            value.update_inplace(np.full(size, number, np.float32))
            yield {"x": value}
    else:
        array = np.zeros(size, np.float32)
        for number in range(count):
            array[:] = number
            yield {"x": array}


REFILLED = ("numpy", "torch", "torch on the GPU", "cupy", "value", "value on the GPU")
REFILLED_SIZES = (7, 1 << 18, 1 << 23)  # floats: 1 MiB is pinned, 32 MiB are copied in threads
REFILLED_COUNT = 12


def reused_feeds() -> None:
    """Results that are wrong, for each kind of array and way to run it."""
    import numpy as np

    import ortgpu

    model = elementwise("n")
    session, graphs = ortgpu.GPUSession(model), ortgpu.GPUSession(model, cuda_graph=True)
    without = ortgpu.GPUSession(model, pinned_memory_limit=0)
    pool = ortgpu.GPUSessionPool(model)

    def submitted(feeds: Any) -> Any:
        return [request.result() for request in [pool.submit(None, feed) for feed in feeds]]

    ways: dict[str, Callable[[Any], Any]] = {
        "map": session.map,
        "map, no pinned memory": without.map,
        "map, one in flight": functools.partial(session.map, in_flight=1),
        "map, captured": graphs.map,
        "pool.map": pool.map,
        "submit": submitted,
    }

    def wrong(way: Callable[[Any], Any], kind: str, size: int) -> list[int]:
        results = list(way(refilled_feeds(kind, size, REFILLED_COUNT)))
        assert len(results) == REFILLED_COUNT
        return [number for number, (result,) in enumerate(results) if (np.asarray(result) != -number).any()]

    for kind in REFILLED:
        for size in REFILLED_SIZES:
            for name, way in ways.items():
                attempt(f"{name}, {kind}, {size}", functools.partial(wrong, way, kind, size))
    gc.collect()
    report("in use", [each._pinned.bytes_in_use if each._pinned else 0 for each in (session, without, *pool.sessions)])
    pool.close()
    report("threads", [name for name in own_threads() if "pool" in name])


def pinned() -> None:
    import numpy as np

    from ortgpu import GPUSession

    session = GPUSession(elementwise("n"))
    array = session.pinned_empty((1024, 1024), "float32")
    array[:] = 2
    address = address_of(array)
    report("types", {"pinned": memory_type(address), "ordinary": memory_type(address_of(np.ones(1 << 20)))})
    report("result", float(session.run(None, {"x": array.reshape(-1)})[0].max()))
    session.close()
    report("after close, in use", {"type": memory_type(address), "value": float(array[-1, -1])})
    del array
    report("after close, collected", memory_type(address))


def second_device() -> None:
    """On the second GPU nothing may make a context on the first: that would take half a gigabyte of it."""
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.environment.gpu.cuda import context_is_active

    session = GPUSession(elementwise("n"), device=1)
    feeds = [{"x": np.full(1 << 20, n, dtype=np.float32)} for n in range(8)]
    attempt("results", lambda: [float(result[0][-1]) for result in session.map(feeds)])
    outcomes: list[int] = []
    worker = threading.Thread(target=lambda: outcomes.append(memory_type(address_of(session.pinned_empty(1 << 20)))))
    worker.start()
    worker.join()
    session.close()
    report("contexts", [context_is_active(ordinal) for ordinal in (0, 1)])
    report("type", outcomes)


def graphs(model: str, batches: list[int]) -> None:
    import onnxruntime

    from ortgpu import GPUSession
    from ortgpu.running.cuda_graph import MAX_SHAPES

    with GPUSession(model) as plain:
        feeds = [random_feed(plain, batch) for batch in batches]
        expected = [plain.run(None, feed) for feed in feeds]
        different = [{name: array + 1 for name, array in feed.items()} for feed in feeds]
        expected_of_different = [plain.run(None, feed) for feed in different]
        uuid = plain.device.uuid
    del plain
    gc.collect()
    before = free_memory(uuid)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 1  # captures and replays are logged as information
    session = GPUSession(model, options, cuda_graph=True)
    report("device", device_facts(session))

    def worst(runs: list[dict[str, Any]], right: list[Any], run: Callable[[dict[str, Any]], Any]) -> float:
        return max(relative_error(run(feed), result) for feed, result in zip(runs, right, strict=True))

    def run(feed: dict[str, Any]) -> Any:
        return session.run(None, feed)

    attempt("first", lambda: worst(feeds, expected, run))
    attempt("replayed", lambda: worst(feeds, expected, run))
    attempt("replayed with other values", lambda: worst(different, expected_of_different, run))
    attempt("first again", lambda: worst(feeds, expected, run))

    errors: list[Any] = []

    def work() -> None:
        try:
            errors.append(max(worst(feeds, expected, run), worst(different, expected_of_different, run)))
        except Exception as error:  # noqa: BLE001 - reported
            errors.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    attempt("main thread beside others", lambda: worst(feeds, expected, run))
    for worker in workers:
        worker.join()
    report("threads", errors)
    results = session.map(feeds * 3)
    attempt(
        "mapped", lambda: max(relative_error(found, right) for found, right in zip(results, expected * 3, strict=True))
    )

    def many_shapes() -> float:
        error = 0.0
        for batch in [*range(1, MAX_SHAPES + 6), 1, 2, 3]:
            feed = random_feed(session, batch)
            uncaptured = onnxruntime.RunOptions()
            uncaptured.add_run_config_entry("gpu_graph_id", "-1")
            error = max(error, relative_error(session.run(None, feed), session.run(None, feed, uncaptured)))
        return error

    attempt("many shapes", many_shapes)
    session.close()
    gc.collect()
    report("free", {"before": before, "after": free_memory(uuid)})
    attempt("threads after close", own_threads)
    attempt("run after close", lambda: run(feeds[0]))


def graph_order() -> None:
    """Copies and replays of 64 MB each, with one pinned array that is written to again as soon as run returns."""
    import numpy as np

    from ortgpu import GPUSession

    size = 16 << 20
    session = GPUSession(elementwise("n"), cuda_graph=True)
    pinned = session.pinned_empty(size)
    ordinary = np.empty(size, np.float32)
    report("type", memory_type(address_of(pinned)))
    for name, array in {"pinned": pinned, "ordinary": ordinary}.items():

        def wrong(array: Any = array) -> list[int]:
            found = []
            for value in range(1, 25):
                array[:] = value
                (result,) = session.run(None, {"x": array})
                array[:] = 0
                found += [value] if (result != -value).any() else []
            return found

        attempt(name, wrong)
    session.close()


def captures_beside_others() -> None:
    """Shapes are captured while another thread pins and frees memory, and replays what another session captured."""
    import numpy as np

    from ortgpu import GPUSession

    session, other = (GPUSession(elementwise("n"), cuda_graph=True) for _ in range(2))
    usual = GPUSession(elementwise("n"), pinned_memory_limit=16 << 20)  # so that some is freed for what comes next
    begun, ended = threading.Event(), threading.Event()
    rounds: list[bool] = []

    def disturb() -> int:
        while not ended.is_set():
            pinned = usual.pinned_empty((1 << 20) * (1 + len(rounds) % 3))
            pinned[:] = 3
            rounds.append(bool((other.run(None, {"x": pinned[:1000]})[0] == -3).all()))
            del pinned
            begun.set()
        return len(rounds)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(other.run, None, {"x": np.ones(1000, np.float32)}).result()  # captured in the thread it keeps
        disturbing = executor.submit(disturb)
        begun.wait(30)
        try:
            attempt(
                "captured",
                lambda: [
                    float(session.run(None, {"x": np.full(size, size, np.float32)})[0][-1]) for size in range(1, 41)
                ],
            )
        finally:
            ended.set()
        attempt("disturbed", lambda: disturbing.result() > 0 and all(rounds))


def uncapturable() -> None:
    import numpy as np
    import onnx.parser

    from ortgpu import GPUSession
    from tests.support.known_placements import FEEDS, MODELS

    def model(text: str) -> bytes:
        data: bytes = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()
        return data

    branch = model(
        "branch (bool c, float[n] x) => (float[n] y) { y = If(c) <"
        "then_branch = then () => (float[n] z) { z = Neg(x) }, else_branch = other () => (float[n] z) { z = Abs(x) }> }"
    )
    attempt("control flow", lambda: GPUSession(branch, cpu_nodes="allow", cuda_graph=True).close())
    reshape = model("reshape (float[n, 4] x, int64[1] s) => (float[m] y) { y = Reshape(x, s) }")
    attempt("input on the CPU", lambda: GPUSession(reshape, cuda_graph=True).close())
    unused = model("unused (float[n] x, float[n] u) => (float[n] y) { y = Neg(x) }")
    attempt("input of no node", lambda: GPUSession(unused, cuda_graph=True).close())
    handed_on = model("handed_on (float[n] x) => (float[n] y, float[n] x) { y = Neg(x) }")
    attempt("output that is an input", lambda: GPUSession(handed_on, cuda_graph=True).close())
    island, feed = MODELS["island"](), FEEDS["island"]()
    attempt("nodes on the CPU", lambda: GPUSession(island, cpu_nodes="allow", cuda_graph=True).close())
    attempt("the same without", lambda: len(GPUSession(island, cpu_nodes="allow").run(None, feed)))
    usual = GPUSession(elementwise("n"))

    def pinned_type() -> int:
        return memory_type(address_of(usual.pinned_empty(1 << 20)))

    counting = model("counting (float[n] x) => (int64[r, m] y) { y = NonZero(x) }")

    def count() -> list[list[int]]:
        session = GPUSession(counting, cuda_graph=True)
        ones: list[list[int]] = session.run(None, {"x": np.array([0, 1, 1], np.float32)})[0].tolist()
        return ones

    attempt("shape that depends on data", count)
    # A capture that was left open would keep every thread from memory
    attempt("memory in another thread", lambda: ThreadPoolExecutor(1).submit(pinned_type).result())
    attempt(
        "another session", lambda: float(GPUSession(elementwise("n")).run(None, {"x": np.ones(4, np.float32)})[0][0])
    )


def arrays() -> None:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        report("without torch", str(error))
        return
    if not torch.cuda.is_available():
        report("without torch", "the installed PyTorch has no CUDA, or another than works here")
        return
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.running.device_arrays import wrap_arrays

    session = GPUSession(elementwise("n"))
    tensor = torch.arange(1 << 20, device="cuda:0", dtype=torch.float32)
    value = (wrap_arrays(session, {"x": tensor}) or {})["x"]
    report(
        "same memory in", [value.data_ptr() == tensor.data_ptr(), value.device_name(), memory_type(value.data_ptr())]
    )
    attempt("run", lambda: bool((session.run(None, {"x": tensor})[0] == -np.arange(1 << 20, dtype=np.float32)).all()))
    attempt(
        "map",
        lambda: [
            float(r[0][-1]) for r in session.map({"x": torch.full((8,), n, device="cuda").float()} for n in range(5))
        ],
    )

    def on_device() -> list[object]:
        (result,) = session.run_on_device(None, {"x": tensor})
        back = torch.from_dlpack(result)
        same = back.data_ptr() == result.data_ptr()
        return [
            str(back.device),
            same,
            bool((back == -tensor).all().item()),
            session.run(None, {"x": back})[0][-1].item(),
        ]

    attempt("on device", on_device)

    def producer_is_waited_for() -> list[bool]:
        right = []
        for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
            with torch.cuda.stream(stream):
                big = torch.ones(4096, 4096, device="cuda")
                for _ in range(50):
                    big = torch.tanh(big @ big)  # ones; tens of milliseconds that are queued, not done
                late = torch.full((1 << 20,), 7.0, device="cuda") + big.flatten()[: 1 << 20] * 0
                found = session.run(None, {"x": late})[0]
            right.append(bool((found == -7).all()))
        return right

    attempt("producer is waited for", producer_is_waited_for)

    def producers_of_a_map_are_waited_for() -> list[float]:
        def late() -> Any:
            big = torch.ones(4096, 4096, device="cuda")
            for number in range(4):
                for _ in range(20):
                    big = torch.tanh(big @ big)
                yield {"x": torch.full((1 << 20,), float(number), device="cuda") + big.flatten()[: 1 << 20] * 0}

        with torch.cuda.stream(torch.cuda.Stream()):  # which only this thread uses
            return [float(found[0].max()) for found in session.map(late())]

    attempt("producers of a map are waited for", producers_of_a_map_are_waited_for)
    attempt("pinned tensor", lambda: float(session.run(None, {"x": torch.ones(1 << 20).pin_memory()})[0][0]))
    attempt("tensor with gaps", lambda: session.run(None, {"x": tensor[::2]})[0].shape)

    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 99)

        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("not asked for: the device is wrong")

    attempt("wrong device", lambda: session.run(None, {"x": Elsewhere()}))
    graphed = GPUSession(elementwise("n"), cuda_graph=True)
    attempt("captured", lambda: [graphed.run(None, {"x": tensor + n})[0][0].item() for n in range(3)])


def chosen_options(model: str) -> None:
    from ortgpu import GPUSession

    exhaustive = [("CUDAExecutionProvider", {"cudnn_conv_algo_search": "EXHAUSTIVE"})]
    for name, providers in {"alone": None, "chosen": exhaustive}.items():
        with GPUSession(model, providers=providers) as session:
            report(name, {"chosen": dict(session.options_chosen), **device_facts(session)})


PROGRAMS: dict[str, Callable[..., None]] = {
    "mapped": mapped,
    "pinned": pinned,
    "reused_feeds": reused_feeds,
    "second_device": second_device,
    "graphs": graphs,
    "graph_order": graph_order,
    "captures_beside_others": captures_beside_others,
    "uncapturable": uncapturable,
    "arrays": arrays,
    "chosen_options": chosen_options,
}
