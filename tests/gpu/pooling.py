"""Programs about GPUSessionPool; see programs.py."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.gpu.programs import CUDA, attempt, free_memory
from tests.gpu.running import elementwise, negated
from tests.support.children import report
from tests.support.this_machine import mapped_files


def feed_of(value: int, size: int = 2) -> dict[str, Any]:
    import numpy as np

    return {"x": np.full(size, value, dtype=np.float32)}


def answers(pool: Any, count: int, size: int = 2) -> list[float]:
    return [float(outputs[0][-1]) for outputs in pool.map(feed_of(value, size) for value in range(count))]


def pooled(sessions_per_device: int) -> None:
    import ortgpu
    from ortgpu.environment.gpu.cuda import context_is_active

    model = elementwise("n")
    with ortgpu.GPUSessionPool(model, sessions_per_device=sessions_per_device) as warm:
        answers(warm, 64)
        report("devices", [device.uuid for device in warm.devices])
        report("sessions", [[session.device.uuid, session.get_providers()[0]] for session in warm.sessions])
        report("length", len(warm))
        report("contexts", [context_is_active(device.ordinal) for device in warm.devices if device.ordinal is not None])
        report("creators", sorted({str(record.created_by) for record in ortgpu.sessions()}))
        attempt("run", lambda: warm.run(None, feed_of(7))[0].tolist())
        attempt("map, small", lambda: answers(warm, 500))
        attempt("map, staged", lambda: answers(warm, 60, size=1 << 20))
        attempt("submit", lambda: [future.result()[0].tolist() for future in [warm.submit(["y"], feed_of(3))]])
    uuids = [device.uuid for device in ortgpu.GPUSessionPool(model).devices]
    gc.collect()
    before = [free_memory(uuid) for uuid in uuids]
    for _ in range(5):
        with ortgpu.GPUSessionPool(model, sessions_per_device=sessions_per_device) as pool:
            answers(pool, 20, size=1 << 20)
    gc.collect()
    report("free", [before, [free_memory(uuid) for uuid in uuids]])
    report("threads", [thread.name for thread in threading.enumerate() if thread.name.startswith("ortgpu")])


def pool_refused() -> None:
    import ortgpu

    model = elementwise("n")

    def count(*arguments: Any, **options: Any) -> int:
        with ortgpu.GPUSessionPool(model, *arguments, **options) as pool:
            return len(pool)

    uuid = ortgpu.GPUSession(model).device.uuid
    attempt("not there", lambda: count([0, 99]))
    attempt("twice", lambda: count(["cuda:0", uuid]))
    attempt("option", lambda: count([0], 2, provider_options=[{"no_such_option": "1"}], providers=[CUDA]))
    attempt("by uuid", lambda: count([uuid], 2))
    gc.collect()
    report("left", len(ortgpu.sessions()))


def pool_out_of_memory() -> None:
    import ortgpu

    limit = [(CUDA, {"gpu_mem_limit": str(64 << 20)})]
    with ortgpu.GPUSessionPool(elementwise("n"), sessions_per_device=2, providers=limit) as pool:
        attempt("run", lambda: pool.run(None, feed_of(1, size=64 << 20))[0].shape)
        attempt("next", lambda: answers(pool, 20))
        report("sizes", [len(pool), len(pool.lost)])


def pool_poisoned() -> None:
    import numpy as np
    import onnxruntime

    import ortgpu

    model = elementwise(2)
    pool = ortgpu.GPUSessionPool(model, sessions_per_device=2)
    plain = onnxruntime.InferenceSession(model, providers=[(CUDA, {"device_id": 0})])
    plain.run(None, feed_of(1))
    attempt("before", lambda: answers(pool, 20))
    last = pool.sessions[-1]

    def read_what_is_not_there() -> object:
        binding = last.io_binding()
        binding.bind_input("x", "cuda", last.device.ordinal, np.float32, (2,), 0x7000)  # no such address on any GPU
        binding.bind_output("y", "cuda", last.device.ordinal)
        last.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0].tolist()

    attempt("poison", read_what_is_not_there)
    attempt("run", lambda: pool.run(None, feed_of(1)))
    attempt("map", lambda: answers(pool, 3))
    report("sizes", [len(pool), len(pool.lost)])
    attempt("new pool", lambda: len(ortgpu.GPUSessionPool(model)))
    attempt("close", pool.close)
    # What CUDA itself grants beyond its documentation: the test asserts nothing about it where there are two GPUs.
    attempt("plain session on the first GPU", lambda: plain.run(None, feed_of(1))[0].tolist())
    report("poisoned", last.device.ordinal)


def pool_forked() -> None:
    import ortgpu

    pool = ortgpu.GPUSessionPool(elementwise("n"))
    attempt("before", lambda: answers(pool, 20))
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        attempt("child: run", lambda: answers(pool, 1))
        attempt("child: close", pool.close)
        os._exit(0)
    report("status", os.waitpid(pid, 0)[1])
    attempt("after", lambda: answers(pool, 20))
    pool.close()


def batched(kind: str, model: str) -> None:
    """A convolutional network whose requests are joined, beside separate runs."""
    import asyncio

    import numpy as np

    import ortgpu

    opened: Any = {"session": ortgpu.GPUSession, "pool": ortgpu.GPUSessionPool}[kind](model)
    session = opened if kind == "session" else opened.sessions[0]
    (taken,) = session.get_inputs()
    shape = [each if isinstance(each, int) else 1 for each in taken.shape]
    random = np.random.default_rng(0)
    feeds = [{taken.name: random.random((1 + number % 3, *shape[1:]), np.float32)} for number in range(60)]
    expected = [session.run(None, feed)[0] for feed in feeds]

    def wrong(found: list[Any]) -> float:
        return max(
            float(abs(one[0] - right).max() / abs(right).max()) for one, right in zip(found, expected, strict=True)
        )

    with opened.batched(max_batch=16) as service:
        report("sizes", list(service._joining.sizes))

        async def ask() -> list[Any]:
            return await asyncio.gather(*[service.arun(None, feed) for feed in feeds])

        attempt("tasks", lambda: wrong(asyncio.run(ask())))
        attempt("futures", lambda: wrong([each.result() for each in [service.submit(None, feed) for feed in feeds]]))
        # Threads that wait for each other get further lanes, one after another; a leak has no end.
        for _ in range(8):
            free = free_memory(session.device.uuid)
            for _ in range(5):
                asyncio.run(ask())
            left = free_memory(session.device.uuid)
            if free is None or left is None or free - left < 64 << 20:
                break
        report("free", [free, left])
        attempt("wrong", lambda: service.run(None, {taken.name: np.zeros((1, 1), np.float32)}))
    report("threads", [thread.name for thread in threading.enumerate() if "batched" in thread.name])
    attempt("dependent", lambda: ortgpu.GPUSession(_normalised_over_items()).batched())
    attempt("closed", lambda: service.run(None, feeds[0]))
    opened.close()


def _normalised_over_items() -> bytes:
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["": 17]> m (float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis=0>(x) }'
    model: bytes = onnx.parser.parse_model(text).SerializeToString()
    return model


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def pool_isolated(sessions_per_device: int) -> None:
    """Report on worker processes, in a program that leaves CUDA to them."""
    import numpy as np

    import ortgpu
    from ortgpu.environment.gpu import cuda

    model, size = elementwise("n"), 16 << 20
    large = np.arange(size, dtype=np.float32)
    with ortgpu.GPUSessionPool(model, sessions_per_device=sessions_per_device, isolate=True) as pool:
        uuids = [device.uuid for device in pool.devices]
        report("devices", uuids)
        report("workers", [[each.device.uuid, each.state] for each in pool.health()])
        attempt("run", lambda: pool.run(None, feed_of(7))[0].tolist())
        attempt("map, small", lambda: answers(pool, 500))
        attempt("map, staged", lambda: answers(pool, 60, size=4 << 20))
        # From the second time on a channel's results are written into shared memory
        attempt("64 MB", lambda: [bool((pool.run(None, {"x": large})[0] == -large).all()) for _ in range(20)])
        report("driver", [cuda.initialised_in(), [path for path in mapped_files() if "libcuda.so" in path]])
        attempt("wrong", lambda: pool.run(None, {"x": large.astype(np.float64)}))
        pids = [each.pid for each in pool.health()]
    report("left", [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    before = [free_memory(uuid) for uuid in uuids]
    for _ in range(3):
        with ortgpu.GPUSessionPool(model, sessions_per_device=sessions_per_device, isolate=True) as pool:
            answers(pool, 20, size=1 << 20)
    report("free", [before, [free_memory(uuid) for uuid in uuids]])
    report("threads", [thread.name for thread in threading.enumerate() if thread.name.startswith("ortgpu")])


def pool_isolated_deaths() -> None:
    import ortgpu
    from ortgpu.session.pool import isolated

    isolated.SERVE = "tests.support.deadly_worker:serve"
    with ortgpu.GPUSessionPool(elementwise("n"), sessions_per_device=2, isolate=True) as pool:
        attempt("before", lambda: answers(pool, 20))
        with_sessions = {each.pid for each in pool.health()}
        attempt("poison", lambda: pool.run(None, feed_of(-700)))
        wait_until(lambda: all(each.state == "ready" for each in pool.health()))
        report("survivors", len(with_sessions & {each.pid for each in pool.health()}))
        report("restarts", [each.restarts for each in pool.health()])
        attempt("after", lambda: answers(pool, 20))
        victim = pool.health()[0]
        started = time.monotonic()
        os.kill(victim.pid or 0, signal.SIGKILL)
        wait_until(lambda: pool.health()[0].state != "ready")
        report("noticed", time.monotonic() - started)
        attempt("meanwhile", lambda: answers(pool, 20))
        wait_until(lambda: pool.health()[0].state == "ready")
        report("replaced", time.monotonic() - started)
        report("devices", [victim.device.uuid, pool.health()[0].device.uuid])
        attempt("at the end", lambda: answers(pool, 50, size=4 << 20))
        report("lost", len(pool.lost))
    attempt("a session here", lambda: negated(ortgpu.GPUSession(elementwise("n"))))


PROGRAMS: dict[str, Callable[..., None]] = {
    "pooled": pooled,
    "batched": batched,
    "pool_refused": pool_refused,
    "pool_out_of_memory": pool_out_of_memory,
    "pool_poisoned": pool_poisoned,
    "pool_forked": pool_forked,
    "pool_isolated": pool_isolated,
    "pool_isolated_deaths": pool_isolated_deaths,
}
