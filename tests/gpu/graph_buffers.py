"""Programs about what captured graphs copy through pinned memory, in threads, and beside; see programs.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import attempt
from tests.gpu.staging import native_threads
from tests.gpu.throughput import address_of, memory_type
from tests.support.children import report

SMALL, LARGE = 16384, 16385  # floats: 64 KiB, the most that is copied through pinned memory of its own, and more
HUGE = 1 << 19  # floats: 2 MiB, which threads copy
SIZES = [1 << bits for bits in range(8, 25, 2)]  # floats: 1 KiB to 64 MiB


def model(text: str) -> bytes:
    import onnx.parser

    data: bytes = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()
    return data


def pair() -> bytes:
    return model("pair (float[n] x, float[m] w) => (float[n] y, float[m] z) { y = Neg(x) z = Neg(w) }")


def is_right(results: list[Any], value: float, sizes: tuple[int, int]) -> bool:
    y, z = results
    of_values = bool((y == -value).all() and (z == -value - 1).all())
    return (y.shape, z.shape) == ((sizes[0],), (sizes[1],)) and of_values


def graph_buffers() -> None:
    import numpy as np

    from ortgpu import GPUSession

    sizes = [(1, 1), (SMALL, SMALL), (SMALL, LARGE), (LARGE, 7), (LARGE, LARGE), (HUGE, 5), (HUGE + 77, HUGE)]
    session = GPUSession(pair(), cuda_graph=True)

    def feed_of(value: float, size: tuple[int, int]) -> dict[str, Any]:
        return {"x": np.full(size[0], value, np.float32), "w": np.full(size[1], value + 1, np.float32)}

    def run(value: float, size: tuple[int, int]) -> Any:
        feed = feed_of(value, size)
        results = session.run(None, feed)
        feed["x"][:] = feed["w"][:] = 0  # which nothing reads any more
        return results

    def wrong(first: int, repeats: int) -> list[float]:
        """Values whose results were not right, looked at after all runs: none may be in memory that is used again."""
        runs = [(value, sizes[value % len(sizes)]) for value in range(first, first + repeats)]
        held = [(value, size, run(value, size)) for value, size in runs]
        return [value for value, size, results in held if not is_right(results, value, size)]

    attempt("captured", lambda: wrong(0, len(sizes)))
    attempt("replayed", lambda: wrong(100, 500))

    def one_buffer_again_and_again() -> list[float]:
        feed = feed_of(0, sizes[1])
        found = list[float]()
        for value in range(1, 2000):
            feed["x"][:], feed["w"][:] = value, value + 1
            if not is_right(session.run(None, feed), value, sizes[1]):
                found.append(value)
        return found

    attempt("one feed, written to after each run", one_buffer_again_and_again)

    def all_sizes() -> list[int]:
        """Sizes with a wrong result among those that the caller keeps, and whose memory is then used again."""
        found = []
        for size in SIZES:
            for _ in range(2):
                held = [(value, run(value, (size, 3))) for value in range(8)]
                found += [size for value, results in held if not is_right(results, value, (size, 3))]
        return found

    attempt("wrong sizes", all_sizes)

    def after_an_error() -> list[object]:
        feed = feed_of(4, (HUGE, HUGE))
        try:
            session.run(None, {**feed, "x": feed["x"].astype(np.float64)})
        except Exception as error:  # noqa: BLE001 - its type is the fact
            return [type(error).__name__, is_right(session.run(None, feed), 4, (HUGE, HUGE))]
        return []

    attempt("after an error", after_an_error)

    def orders() -> list[bool]:
        """Large arrays whose memory is pinned, in another order, or backwards."""
        pinned = session.pinned_empty(HUGE)
        pinned[:] = np.arange(HUGE)
        found = []
        for x in (pinned, np.repeat(pinned, 2)[::2], pinned[::-1], pinned):
            y = session.run(["y"], {"x": x, "w": np.ones(3, np.float32)})[0]
            found.append(bool((y == -x).all()))
        return found

    attempt("orders", orders)

    def single_outputs() -> list[float]:
        feed = feed_of(3, sizes[2])
        return [float(session.run([name], feed)[0][-1]) for name in ("z", "y")]

    attempt("single outputs", single_outputs)
    attempt("type of a result", lambda: [memory_type(address_of(each)) for each in run(1, sizes[1])])
    attempt("pinned", lambda: session._pinned.bytes_in_use > 0 if session._pinned else None)

    found: list[list[float]] = []
    workers = [threading.Thread(target=lambda n=n: found.append(wrong(n * 10_000, 200))) for n in range(1, 5)]
    for worker in workers:
        worker.start()
    attempt("main thread beside others", lambda: wrong(0, 200))
    for worker in workers:
        worker.join()
    report("threads", found)

    pinned, before = session._pinned, native_threads()
    session.close()
    report("threads that ended with it", before > native_threads())
    report("pinned after close", pinned.bytes_held if pinned else None)

    with GPUSession(pair(), cuda_graph=True, pinned_memory_limit=0) as without:

        def unpinned() -> list[bool]:
            runs = [(value, sizes[value % len(sizes)]) for value in range(50)]
            return [is_right(without.run(None, feed_of(value, size)), value, size) for value, size in runs]

        attempt("without pinned memory", unpinned)

    shape = model("shape (float[n] x) => (float[n] y, int64[1] s) { y = Neg(x) s = Shape(x) }")
    with GPUSession(shape, cuda_graph=True) as both:

        def shapes() -> list[object]:
            runs = [both.run(None, {"x": np.full(3 + value % 2, value, np.float32)}) for value in range(6)]
            return [[y.tolist() == [-value] * (3 + value % 2), s.tolist()] for value, (y, s) in enumerate(runs)]

        attempt("an output computed on the CPU", shapes)


PROGRAMS: dict[str, Callable[..., None]] = {"graph_buffers": graph_buffers}
