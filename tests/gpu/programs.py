"""What the children of the GPU tests do: one function each, started as ``programs.py NAME '{"argument": value}'``.

A program reports facts, as soon as it has them; the tests judge. Everything heavy is imported inside the functions,
in the order that the program is about.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common import mapped_files, report

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
CUDA_LIBRARY = re.compile(r"(lib(?:cudart|cublasLt|cublas|curand|cufft|nvrtc|nvJitLink|cudnn\w*))\.so")


# Facts


def describe(error: BaseException) -> dict[str, Any]:
    details = getattr(error, "details", None)
    return {
        "type": type(error).__name__,
        "bases": [cls.__name__ for cls in type(error).__mro__],
        "module": type(error).__module__,
        "text": str(error),
        "fields": details() if callable(details) else {},
    }


def attempt(name: str, action: Callable[[], object]) -> None:
    """Report what `action` returned, or what it raised."""
    try:
        outcome: dict[str, Any] = {"returned": action()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the test decides
        outcome = {"error": describe(error)}
    report(name, outcome)


def device_facts(session: Any) -> dict[str, Any]:
    device = session.device
    names = ("ordinal", "uuid", "name", "compute_capability", "total_memory", "driver_version", "is_gpu")
    return {
        **{name: getattr(device, name) for name in names},
        "providers": session.get_providers(),
        "options": session.get_provider_options().get(CUDA, {}),
    }


def mapped_cuda_libraries() -> dict[str, list[str]]:
    """Paths by library, without version: two paths under one name are two copies in one process."""
    found: dict[str, list[str]] = {}
    for path in mapped_files():
        match = CUDA_LIBRARY.match(path.rpartition("/")[2])
        if match:
            found.setdefault(match[1], []).append(path)
    return found


def free_memory(uuid: str | None) -> int | None:
    """Free bytes of the GPU, through NVML; where that is missing, through the CUDA runtime that this process has."""
    from ortgpu.environment import driver

    memory = driver.read_gpu_memory(uuid) if uuid else None
    if memory is not None:
        return int(memory[0])
    import ctypes

    for path in mapped_cuda_libraries().get("libcudart", []):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if ctypes.CDLL(path).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0:
            return free.value
    return None


def random_feed(session: Any, batch: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(batch)
    feed = {}
    for entry in session.get_inputs():
        shape = [size if isinstance(size, int) else batch for size in entry.shape]
        feed[entry.name] = random.random(shape, dtype=np.float32)
    return feed


def relative_error(found: list[Any], expected: list[Any]) -> float:
    """Largest difference, in units of the largest expected value; infinite for other shapes or for no numbers."""
    import numpy as np

    worst = 0.0
    for ours, reference in zip(found, expected, strict=True):
        if ours.shape != reference.shape or not np.isfinite(ours).all():
            return float("inf")
        worst = max(worst, float(np.abs(ours - reference).max() / np.abs(reference).max()))
    return worst


def cpu_reference(model: str) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(model, providers=[CPU])


def warning_texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [f"{entry.category.__name__}: {entry.message} ({entry.filename}:{entry.lineno})" for entry in caught]


# Programs


def run_model(model: str, batches: list[int], uuids: list[str]) -> None:
    """Open, look where it is, and compare with the CPU provider: with TF32, which is the default, and without."""
    from ortgpu.environment import driver

    before = {uuid: free_memory(uuid) for uuid in uuids}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ortgpu import GPUSession

        session = GPUSession(model)
        feeds = {batch: random_feed(session, batch) for batch in batches}
        results = {batch: session.run(None, feed) for batch, feed in feeds.items()}
    report("warnings", warning_texts(caught))
    report("device", device_facts(session))
    nodes = [(node.name, node.op_type, node.provider, node.kind) for node in session.placement.nodes]
    report("placement", {"nodes": nodes, "by_provider": dict(session.placement.by_provider)})
    uuid = session.device.uuid
    holders = driver.processes_on(uuid) if uuid else {}
    held = {"pid": os.getpid(), "pids": sorted(holders), "bytes": holders.get(os.getpid())}
    report("memory", {**held, "before": before.get(uuid or ""), "after": free_memory(uuid)})
    report("libraries", mapped_cuda_libraries())
    reference = cpu_reference(model)
    expected = {batch: reference.run(None, feed) for batch, feed in feeds.items()}
    report("tf32", {str(batch): relative_error(results[batch], expected[batch]) for batch in batches})
    session.close()
    with GPUSession(model, providers=[(CUDA, {"use_tf32": "0"})]) as exact:
        results = {batch: exact.run(None, feed) for batch, feed in feeds.items()}
    report("fp32", {str(batch): relative_error(results[batch], expected[batch]) for batch in batches})


def variation(model: str, before: str | None = None, after: str | None = None) -> None:
    """Open a model after and before other users of the GPU have come into this process."""
    if before:
        try:
            USERS[before]()
        except Exception as error:  # noqa: BLE001 - that library does not work here at all
            report("unusable", f"{type(error).__name__}: {error}")
            return
    report("libraries before", mapped_cuda_libraries())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ortgpu import GPUSession

        session = GPUSession(model)
        feed = random_feed(session, 2)
        result = session.run(None, feed)
    report("warnings", warning_texts(caught))
    report("device", device_facts(session))
    report("libraries", mapped_cuda_libraries())
    report("error against the CPU", relative_error(result, cpu_reference(model).run(None, feed)))
    if after:
        USERS[after]()
        report("after", relative_error(session.run(None, feed), result))
        report("libraries after", mapped_cuda_libraries())
    session.close()
    report("closed", True)
    look_around(model)


def look_around(model: str) -> None:
    """What a diagnosis makes of this environment, and the doctor's exit status where its packages are installed."""
    import subprocess

    import ortgpu

    diagnosis = ortgpu.diagnose(model, probe=True, timeout=60)
    report("problems", [str(problem) for problem in diagnosis.problems])
    report("probe", [[step.name, step.ok, step.detail] for step in diagnosis.probe.steps] if diagnosis.probe else [])
    flags = ["-S"] if sys.flags.no_site else []
    command = [sys.executable, *flags, "-m", "ortgpu", "doctor", "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    absent = "No module named 'click'" in done.stderr or "No module named 'rich'" in done.stderr
    report(
        "doctor", None if absent else {"status": done.returncode, "output": done.stdout[-3000:] + done.stderr[-1000:]}
    )


def use_torch() -> None:
    """A product and a convolution: cuBLAS and cuDNN are loaded and initialised."""
    torch: Any = importlib.import_module("torch")  # not a dependency: absent where types are checked
    ones = torch.ones(1, 3, 8, 8, device="cuda")
    convolved = torch.nn.functional.conv2d(ones, torch.ones(4, 3, 3, 3, device="cuda")).sum().item()
    multiplied = (ones[0, 0] @ ones[0, 0]).sum().item()
    if (convolved, multiplied) != (4 * 36 * 27, 8 * 8 * 8):
        raise RuntimeError(f"torch computed {convolved} and {multiplied}")


def use_cupy() -> None:
    cupy: Any = importlib.import_module("cupy")
    if int((cupy.arange(8) * 2).sum()) != 56:
        raise RuntimeError("cupy computed something else")


def import_onnxruntime() -> None:
    import onnxruntime

    report("onnxruntime", onnxruntime.__version__)


USERS: dict[str, Callable[[], None]] = {"torch": use_torch, "cupy": use_cupy, "onnxruntime": import_onnxruntime}


def choose_devices(model: str, requests: dict[str, Any]) -> None:
    """Open one session per request; ``device`` is absent from a request that names none."""
    from ortgpu import GPUSession

    for name, request in requests.items():

        def open_and_run(arguments: dict[str, Any] = request) -> dict[str, Any]:
            with GPUSession(model, **arguments) as session:
                session.run(None, random_feed(session, 1))
                return device_facts(session)

        # JSON has no tuples, and a provider with options is one
        if "providers" in request:
            request["providers"] = [tuple(entry) for entry in request["providers"]]
        attempt(name, open_and_run)


def two_devices(model: str) -> None:
    """A session on each of the first two GPUs at once, used in turns."""
    from ortgpu import GPUSession

    with GPUSession(model, device=0) as first, GPUSession(model, device=1) as second:
        feed = random_feed(first, 2)
        results = [session.run(None, feed) for session in (first, second, first)]
        report("first", device_facts(first))
        report("second", device_facts(second))
        report("difference", max(relative_error(results[1], results[0]), relative_error(results[2], results[0])))


def make_requests(model: str, missing: str) -> None:
    """Requests that can be met, and that cannot, on a GPU that works."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    def opened(*arguments: Any, **named: Any) -> dict[str, Any]:
        with GPUSession(*arguments, **named) as session:
            session.run(None, random_feed(session, 1))
            return device_facts(session)

    attempt("unknown option", lambda: opened(model, providers=[(CUDA, {"no_such_option": "1"})]))
    attempt("bad value", lambda: opened(model, providers=[(CUDA, {"gpu_mem_limit": "plenty"})]))
    attempt("misspelt provider", lambda: opened(model, providers=["CudaExecutionProvider"]))
    attempt("lengths differ", lambda: opened(model, providers=[CUDA], provider_options=[{}, {}]))
    report("TensorRT loads", tensorrt_loads())
    attempt("TensorRT", lambda: opened(model, providers=["TensorrtExecutionProvider", CUDA]))

    limits = {"gpu_mem_limit": str(2 * 2**30), "arena_extend_strategy": "kSameAsRequested"}
    attempt("options with the provider", lambda: opened(model, providers=[(CUDA, limits)]))
    attempt("options beside the provider", lambda: opened(model, providers=[CUDA], provider_options=[limits]))
    attempt("CPU first", lambda: opened(model, providers=[CPU, CUDA]))

    def keep_session_options() -> dict[str, Any]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.intra_op_num_threads = 3
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")

        def settings(used: Any) -> dict[str, Any]:
            return {
                "graph_optimization_level": used.graph_optimization_level.name,
                "intra_op_num_threads": used.intra_op_num_threads,
                "log_severity_level": used.log_severity_level,
                "allow_spinning": used.get_session_config_entry("session.intra_op.allow_spinning"),
            }

        before = settings(options)
        with GPUSession(model, options) as session:
            inside = settings(session.get_session_options())
            session.run(None, random_feed(session, 1))
        # an options object that was made to forbid the CPU provider would no longer serve its owner
        plain = onnxruntime.InferenceSession(model, options, providers=[CPU])
        plain.run(None, random_feed(plain, 1))
        return {"before": before, "inside": inside, "after": settings(options), "plain": plain.get_providers()}

    attempt("session options", keep_session_options)

    broken = {"missing model": missing, "invalid model": b"this is no model", "empty model": b""}
    for name, content in broken.items():
        attempt(name, partial(opened, content))
        attempt(f"{name}, plain", partial(onnxruntime.InferenceSession, content, providers=[CPU]))

    wrong = {
        "wrong name": {"no_such_input": np.zeros((1, 16), np.float32)},
        "wrong type": {"x": np.zeros((1, 16), np.float64)},
        "wrong shape": {"x": np.zeros((1, 17), np.float32)},
        "wrong rank": {"x": np.zeros(16, np.float32)},
    }
    plain = cpu_reference(model)
    with GPUSession(model) as session:
        for name, feed in wrong.items():
            attempt(name, partial(session.run, None, feed))
            attempt(f"{name}, plain", partial(plain.run, None, feed))
        feed = random_feed(session, 2)
        report("still right", relative_error(session.run(None, feed), plain.run(None, feed)))


def tensorrt_loads() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


# Lifetime


def resources(uuid: str | None) -> dict[str, Any]:
    gc.collect()
    return {
        "free": free_memory(uuid),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def settled(uuid: str | None, before: dict[str, Any]) -> dict[str, Any]:
    """Resources, once threads and descriptors are back, or after five seconds: a thread takes a moment to end."""
    deadline = time.monotonic() + 5
    while True:
        now = resources(uuid)
        back = now["threads"] <= before["threads"] and now["files"] <= before["files"]
        if back or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def repeat(name: str, count: int, budget: float, uuid: str | None, step: Callable[[int], object]) -> None:
    """`step` as often as asked, or as the budget of seconds allows; what the process held before and after."""
    before = resources(uuid)
    started = time.monotonic()
    done = 0
    while done < count and time.monotonic() - started < budget:
        step(done)
        done += 1
        if done % 100 == 0:
            report("progress", done)
    seconds = time.monotonic() - started
    report(name, {"done": done, "seconds": seconds, "before": before, "after": settled(uuid, before)})


def open_and_close(model: str, count: int, budget: float) -> None:
    from ortgpu import GPUSession

    session = GPUSession(model)
    uuid, feed = session.device.uuid, random_feed(session, 2)
    session.close()

    def step(number: int) -> None:
        # each way of letting go in its turn: close(), the with block, and nothing but the end of the last reference
        session = GPUSession(model)
        session.run(None, feed)
        if number % 3 == 0:
            session.close()
        elif number % 3 == 1:
            with session:
                pass

    for number in range(30):
        step(number)
    repeat("sessions", count, budget, uuid, step)


def fail_to_open(model: str, count: int, budget: float) -> None:
    from ortgpu import GPUSession

    attempts: list[Callable[[], Any]] = [
        lambda: GPUSession(model, providers=[(CUDA, {"no_such_option": "1"})]),
        lambda: GPUSession(model, device=4096),
        lambda: GPUSession(b"this is no model"),
    ]
    with GPUSession(model) as session:
        uuid = session.device.uuid
    raised: Counter[str] = Counter()
    slowest = [0.0, 0.0, 0.0]

    def step(number: int) -> None:
        kind = number % len(attempts)
        started = time.perf_counter()
        try:
            attempts[kind]()
            raised[f"{kind}: nothing"] += 1
        except Exception as error:  # noqa: BLE001 - its type is the fact
            raised[f"{kind}: {type(error).__name__}"] += 1
        slowest[kind] = max(slowest[kind], time.perf_counter() - started)

    for number in range(9):
        step(number)
    raised.clear()
    repeat("failures", count, budget, uuid, step)
    report("raised", dict(raised))
    report("slowest", slowest)
    with GPUSession(model) as session:
        feed = random_feed(session, 2)
        report("still right", relative_error(session.run(None, feed), cpu_reference(model).run(None, feed)))


def close_large(model: str) -> None:
    """What one large session takes and gives back, after a first one has loaded every kernel that stays loaded."""
    from ortgpu import GPUSession

    with GPUSession(model) as session:
        uuid, feed = session.device.uuid, random_feed(session, 4)
        session.run(None, feed)
    del session
    gc.collect()
    before = free_memory(uuid)
    session = GPUSession(model)
    session.run(None, feed)
    during = free_memory(uuid)
    session.close()
    after = free_memory(uuid)  # the object lives on: close() alone must have given the memory back
    report("free", {"before": before, "during": during, "after": after})
    attempt("run after close", lambda: len(session.run(None, feed)))
    attempt("close again", session.close)


# Without cuDNN


def without_cudnn(conv: str, mlp: str) -> None:
    from ortgpu import GPUSession

    def opened(model: str) -> dict[str, Any]:
        with GPUSession(model) as session:
            feed = random_feed(session, 2)
            error = relative_error(session.run(None, feed), cpu_reference(model).run(None, feed))
            return {"error against the CPU": error, **device_facts(session)}

    attempt("mlp", lambda: opened(mlp))
    attempt("conv", lambda: opened(conv))
    attempt("mlp again", lambda: opened(mlp))
    report("libraries", mapped_cuda_libraries())

    import onnxruntime

    def open_plain() -> list[str]:
        plain.append(onnxruntime.InferenceSession(conv, providers=[CUDA, CPU], enable_fallback=0))
        return list(plain[0].get_providers())

    plain: list[Any] = []
    attempt("plain opens", open_plain)
    if plain:
        plain[0].disable_fallback()
        attempt("plain runs", lambda: len(plain[0].run(None, random_feed(plain[0], 1))))


PROGRAMS: dict[str, Callable[..., None]] = {
    "run_model": run_model,
    "variation": variation,
    "choose_devices": choose_devices,
    "two_devices": two_devices,
    "make_requests": make_requests,
    "open_and_close": open_and_close,
    "fail_to_open": fail_to_open,
    "close_large": close_large,
    "without_cudnn": without_cudnn,
}


if __name__ == "__main__":
    from tests.gpu import pooling, refused, running, staging, throughput

    try:
        modules = running, refused, throughput, pooling, staging
        programs = PROGRAMS | {name: program for module in modules for name, program in module.PROGRAMS.items()}
        programs[sys.argv[1]](**json.loads(sys.argv[2]))
    except BaseException:
        report("error", traceback.format_exc())
        raise
