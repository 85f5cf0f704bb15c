"""Programs about large arrays of ``run``, which are copied in threads through pinned memory; see programs.py."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import attempt, free_memory, random_feed
from tests.gpu.running import elementwise
from tests.gpu.throughput import address_of, memory_type
from tests.support.children import report


class NotStaged(logging.Handler):
    """What was said of runs that were not staged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("ortgpu").setLevel(logging.DEBUG)
        logging.getLogger("ortgpu").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "not staged" in record.getMessage():
            self.messages.append(record.getMessage())


def parsed(text: str) -> bytes:
    import onnx.parser

    data: bytes = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()
    return data


def plainly(session: Any, names: Any, feed: Any) -> Any:
    """The same session's run without what is staged."""
    import onnxruntime

    return onnxruntime.InferenceSession.run(session, names, feed)


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


def staged() -> None:
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.model.tensor_types import DTYPES
    from ortgpu.running.staging import STAGED_FROM

    unstaged = NotStaged()
    random = np.random.default_rng(0)
    kinds = {}
    for name, dtype in DTYPES.items():
        kind = name[len("tensor(") : -1]
        text = f"t ({kind}[n, m] x, float z) => ({kind}[m, n] y, {kind}[n, m] same, float w, int64[2] s)"
        model = parsed(text + " { y = Transpose(x) same = Identity(x) w = Neg(z) s = Shape(x) }")
        session = GPUSession(model, cpu_nodes="allow")  # whatever kernels there are
        right = []
        for count in (STAGED_FROM // dtype.itemsize, 3 * STAGED_FROM // dtype.itemsize + 12345, 100):
            shape = (5, count // 5 + 1)
            x = random.integers(0, 2 if kind == "bool" else 100, shape).astype(dtype)
            for array in (x, np.asfortranarray(x), x[::-1, ::-1]):
                feed = {"z": np.full((), 2.5, np.float32), "x": array}
                calls = (None, ["w", "same"], ["s", "y"])
                right += [same(session.run(names, feed), plainly(session, names, feed)) for names in calls]
        kinds[kind] = all(right) and hasattr(session._gpu_runner, "_runs")
        session.close()
    report("kinds", kinds)
    tile = parsed("t (float[n] x) => (float[m] y, float[n] z) { k = Constant <value = int64[1] {16}> () "
                  "y = Tile(x, k) z = Neg(x) }")  # fmt: skip
    session = GPUSession(tile, cpu_nodes="allow")
    feeds = [{"x": random.standard_normal(1 << 20, np.float32)} for _ in range(6)]
    held = [session.run(None, feed) for feed in feeds]
    report("beside", all(same(found, plainly(session, None, feed)) for found, feed in zip(held, feeds, strict=True)))
    report("not staged", unstaged.messages)


def results() -> None:
    """Where results are, and whose."""
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.running.staging import STAGED_FROM

    unstaged = NotStaged()
    size = 2 * STAGED_FROM
    count = size // 4
    session = GPUSession(elementwise("n"), pinned_memory_limit=4 * size)
    feeds = [{"x": np.full(count, number, np.float32)} for number in range(8)]
    report("type", memory_type(address_of(session.run(None, feeds[1])[0])))
    report("addresses", len({address_of(session.run(None, feed)[0]) for feed in feeds}))
    kept = [session.run(None, feed)[0] for feed in feeds]
    for feed in feeds:
        session.run(None, feed)
    report("intact", [bool((array == -number).all()) for number, array in enumerate(kept)])
    report("pinned", session._pinned.bytes_held / size if session._pinned else None)
    view = kept[3][::1000]
    kept.clear()
    for feed in feeds:
        session.run(None, feed)
    report("view", bool((view == -3).all()))
    pinned = session.pinned_empty(count)
    pinned[:] = 5
    report("pinned input", float(session.run(None, {"x": pinned})[0].max()))
    (result,) = session.run(None, feeds[6])
    report(
        "in a forked child", in_a_forked_child(lambda: bool((result == -6).all()), lambda: session.run(None, feeds[7]))
    )
    del pinned, view
    session.close()
    report("pinned after close", session._pinned.bytes_held if session._pinned else None)
    report("not staged", unstaged.messages)


def in_a_forked_child(check: Callable[[], bool], meanwhile: Callable[[], object]) -> bool:
    """What a child finds after its parent has done something else."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.read(read, 1)
        os._exit(0 if check() else 1)
    meanwhile()
    os.write(write, b"x")
    return os.waitpid(child, 0)[1] == 0


def errors() -> None:
    """As plain ``run`` raises them; afterwards the session works."""
    import numpy as np

    from ortgpu import GPUSession

    session = GPUSession(parsed("t (float[n, 1024] x) => (float[n, 1024] y) { y = Neg(x) }"))
    right = np.ones((8192, 1024), np.float32)
    wrong: dict[str, tuple[Any, Any]] = {
        "type": (None, {"x": right.astype(np.float64)}),
        "rank": (None, {"x": right.reshape(-1)}),
        "shape": (None, {"x": right.reshape(-1, 512)}),
        "input": (None, {"z": right}),
        "output": (["z"], {"x": right}),
        "none": (None, {}),
    }
    for name, (names, feed) in wrong.items():
        attempt(f"{name}, plain", functools.partial(plainly, session, names, feed))
        attempt(name, functools.partial(session.run, names, feed))
    attempt("afterwards", lambda: float(session.run(None, {"x": right})[0].min()))
    limited = [("CUDAExecutionProvider", {"gpu_mem_limit": str(64 << 20)})]
    small = GPUSession(elementwise("n"), providers=limited)
    attempt("out of memory", lambda: len(small.run(None, {"x": np.ones(64 << 20, np.float32)})))
    attempt("after that", lambda: float(small.run(None, {"x": np.ones(4 << 20, np.float32)})[0].min()))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads() -> None:
    """Twice the same: what CUDA keeps of the first time, for its streams, it uses again."""
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.running.staging import STAGED_FROM

    unstaged = NotStaged()
    wrong: list[int] = []

    def work(session: GPUSession, number: int) -> None:
        for step in range(60):
            value = number * 1000 + step
            array = np.full(STAGED_FROM // 4 + 4099 * ((number + step) % 500), value, np.float32)
            (result,) = session.run(None, {"x": array})
            if result.shape != array.shape or (result != -value).any():
                wrong.append(value)

    def once() -> dict[str, Any]:
        session = GPUSession(elementwise("n"))
        workers = [threading.Thread(target=work, args=(session, number)) for number in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        feeds = ({"x": np.full(STAGED_FROM // 2, n, np.float32)} for n in range(20))
        mapped = [float(r[0][-1]) for r in session.map(feeds)]
        at_work = native_threads()
        session.close()
        gc.collect()
        return {
            "mapped": mapped,
            "threads": {"at work": at_work, "after close": native_threads()},
            "free": free_memory(session.device.uuid),
        }

    first, second = once(), once()
    report("mapped", second["mapped"])
    report("threads", [first["threads"], second["threads"]])
    report("wrong", wrong)
    report("free", {"before": first["free"], "after": second["free"]})
    report("not staged", unstaged.messages)


def networks(model: str, batches: list[int]) -> None:
    """A network whose results depend on the algorithms that are chosen: compared within a tolerance."""
    from ortgpu import GPUSession
    from tests.gpu.programs import relative_error

    unstaged = NotStaged()
    session = GPUSession(model)
    worst = []
    for batch in batches:
        feed = random_feed(session, batch)
        worst.append(relative_error(session.run(None, feed), plainly(session, None, feed)))
    report("worst", max(worst))
    report("not staged", unstaged.messages)


def staged_on_second_device() -> None:
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.environment.gpu.cuda import context_is_active

    unstaged = NotStaged()
    session = GPUSession(elementwise("n"), device=1)
    report("result", float(session.run(None, {"x": np.full(8 << 20, 3, np.float32)})[0].max()))
    report("contexts", [context_is_active(ordinal) for ordinal in (0, 1)])
    report("not staged", unstaged.messages)


def beside_captures() -> None:
    """One session captures graph after graph, while the runs of another take memory, more each time."""
    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.running.staging import STAGED_FROM

    unstaged = NotStaged()
    session, capturing = GPUSession(elementwise("n")), GPUSession(elementwise("n"), cuda_graph=True)
    begun, ended, wrong, runs = threading.Event(), threading.Event(), list[str](), list[int]()

    def work() -> None:
        try:
            while not ended.is_set():
                number = len(runs)
                (result,) = session.run(None, {"x": np.full(STAGED_FROM // 4 + (number << 16), number, np.float32)})
                if (result != -number).any():
                    wrong.append(f"run {number}")
                runs.append(number)
                begun.set()
        except Exception as error:  # noqa: BLE001 - reported
            wrong.append(repr(error))
            begun.set()

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait(30)
    feeds = [{"x": np.full(1000 * (n + 1), n, np.float32)} for n in range(12)]
    attempt("captured", lambda: [float(capturing.run(None, feed)[0][-1]) for feed in feeds])
    ended.set()
    worker.join()
    report("wrong", wrong)
    report("runs", len(runs))
    report("not staged", unstaged.messages)


def traced() -> None:
    """Whoever replaces ONNX Runtime's run, as tracers do, sees each run of the sessions that are opened afterwards."""
    import numpy as np
    from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

    from ortgpu import GPUSession

    plain, seen = InferenceSession.run, list[int]()

    def tracing(self: Any, *given: Any) -> Any:
        seen.append(len(given))
        return plain(self, *given)

    session, feed = GPUSession(elementwise("n")), {"x": np.ones(8 << 20, np.float32)}
    session.run(None, feed)
    report("staged", getattr(session._gpu_runner, "_runs", None) is not None)
    InferenceSession.run = tracing
    later = GPUSession(elementwise("n"))
    report("result", float(later.run(None, feed)[0].min()))
    report("seen", len(seen))


PROGRAMS: dict[str, Callable[..., None]] = {
    "staged": staged,
    "staged_results": results,
    "staged_errors": errors,
    "staged_threads": threads,
    "staged_networks": networks,
    "staged_beside_captures": beside_captures,
    "staged_traced": traced,
    "staged_on_second_device": staged_on_second_device,
}
