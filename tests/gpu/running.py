"""Programs about what happens to sessions while they run; see programs.py."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from tests.gpu.programs import CPU, CUDA, attempt, cpu_reference, relative_error
from tests.programs.worker_options import make_options
from tests.support.children import report


def elementwise(size: int | str) -> bytes:
    """y = -x over one axis."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "neg",
        [value("x", TensorProto.FLOAT, [size])],
        [value("y", TensorProto.FLOAT, [size])],
    )
    opset = helper.make_opsetid("", 17)
    data: bytes = helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()
    return data


def negated(session: Any) -> list[float]:
    import numpy as np

    result: list[float] = session.run(None, {"x": np.array([1, -2], dtype=np.float32)})[0].tolist()
    return result


def out_of_memory() -> None:
    import numpy as np

    from ortgpu import GPUSession

    limit = str(64 << 20)
    session = GPUSession(elementwise("n"), providers=[("CUDAExecutionProvider", {"gpu_mem_limit": limit})])
    big = np.zeros(64 << 20, dtype=np.float32)
    attempt("run", lambda: session.run(None, {"x": big})[0].shape)
    attempt("next run", lambda: negated(session))

    def wrap_arrays() -> object:
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy(big)
        return session.run_with_ort_values(None, {"x": value})[0].shape()

    attempt("run_with_ort_values", wrap_arrays)
    attempt("bind_cpu_input", lambda: session.io_binding().bind_cpu_input("x", big))
    attempt("next run with values", lambda: negated(session))
    attempt("new session", lambda: negated(GPUSession(elementwise("n"))))


SAYS_POISONED = "CUDA failure 700: an illegal memory access was encountered"


def named_by_a_client(session: Any) -> None:
    """A name that would end the process, if the driver were not asked, by each way that quotes it."""
    import threading

    import numpy as np

    x = np.ones(2, dtype=np.float32)
    attempt("name: feed", lambda: session.run_on_device(None, {"x": x, SAYS_POISONED: x}))
    attempt("name: output", lambda: session.run_on_device([SAYS_POISONED], {"x": x}))
    attempt("name: binding", lambda: session.io_binding().bind_cpu_input(SAYS_POISONED, x))

    def tuned() -> None:  # in words that nothing here knows: the driver alone decides
        results = [{"ep": SAYS_POISONED, "validators": {}, "results": {}}]
        session.set_tuning_results(results, error_on_invalid=True)

    attempt("name: tuning results", tuned)
    ended = threading.Event()
    session.run_async([SAYS_POISONED], {"x": x}, lambda *_: ended.set(), None)
    report("name: asynchronous", ended.wait(30))


def answers_of_the_driver(session: Any) -> dict[str, int | None]:
    """What calls in the context of a session return, each by itself."""
    import ctypes

    from ortgpu.environment.gpu.cuda import context_error

    driver, context, word = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p
    device, ordinal = ctypes.c_int(), session.device.ordinal
    found: dict[str, int | None] = {"context_error": context_error(ordinal)}
    found["cuDeviceGet"] = driver.cuDeviceGet(ctypes.byref(device), ordinal)
    found["cuDevicePrimaryCtxRetain"] = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    found["cuCtxPushCurrent"] = driver.cuCtxPushCurrent_v2(context)
    found["cuMemGetInfo"] = driver.cuMemGetInfo_v2(ctypes.byref(ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t()))
    stream = word()
    found["cuStreamCreate"] = driver.cuStreamCreate(ctypes.byref(stream), 1)
    found["cuStreamQuery"] = driver.cuStreamQuery(stream) if stream.value else None
    found["cuCtxSynchronize"] = driver.cuCtxSynchronize()
    found["cuCtxPopCurrent"] = driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    found["cuDevicePrimaryCtxRelease"] = driver.cuDevicePrimaryCtxRelease_v2(device)
    return found


def poisoned() -> None:
    import time

    import numpy as np

    from ortgpu import GPUSession
    from ortgpu.environment.gpu.cuda import context_error

    session, other = GPUSession(elementwise(2)), GPUSession(elementwise(2))
    named_by_a_client(session)
    attempt("before", lambda: negated(session))
    report("driver before", answers_of_the_driver(session))
    started = time.perf_counter()
    for _ in range(100):
        context_error(0)
    report("microseconds to ask the driver", (time.perf_counter() - started) * 1e4)

    def read_what_is_not_there() -> object:
        binding = session.io_binding()
        binding.bind_input("x", "cuda", 0, np.float32, (2,), 0x7000)  # no such address on any GPU
        binding.bind_output("y", "cuda")
        session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0].tolist()

    attempt("poison", read_what_is_not_there)
    report("driver after", answers_of_the_driver(other))
    attempt("same session", lambda: negated(session))
    attempt("other session", lambda: negated(other))
    attempt("io_binding", session.io_binding)
    attempt("new session", lambda: negated(GPUSession(elementwise(2))))
    attempt("new session, cpu allowed", lambda: str(GPUSession(elementwise(2), allow_cpu=True).device))
    attempt("close", session.close)


def forked() -> None:
    from ortgpu import GPUSession

    read, write = os.pipe()

    def in_child(name: str, action: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)  # a deadlock ends here
            attempt(name, action)
            os.write(write, b".")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        report(f"{name}: status", os.waitstatus_to_exitcode(status))

    in_child("child before CUDA", lambda: negated(GPUSession(elementwise(2))))
    session = GPUSession(elementwise(2))
    binding = session.io_binding()
    in_child("run", lambda: negated(session))
    in_child("run_with_iobinding", lambda: session.run_with_iobinding(binding))
    in_child("io_binding", session.io_binding)
    in_child("new session", lambda: negated(GPUSession(elementwise(2))))
    in_child("close", session.close)
    attempt("parent", lambda: negated(session))
    os.close(write)
    report("children that came to their end", len(os.read(read, 100)))


def forked_unseen() -> None:
    import ctypes

    from ortgpu import GPUSession

    session = GPUSession(elementwise(2))
    pid = ctypes.PyDLL(None).fork()  # nothing that was registered with os.register_at_fork is called, as under uWSGI
    if pid == 0:
        signal.alarm(30)
        attempt("run", lambda: negated(session))
        os._exit(0)
    report("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def forked_after_torch() -> None:
    import torch

    report("torch", torch.ones(1, device="cuda").item())
    _new_session_in_a_child()


def forked_after_another_library() -> None:
    import ctypes

    report("cuInit", ctypes.CDLL("libcuda.so.1").cuInit(0))
    _new_session_in_a_child()


def _new_session_in_a_child() -> None:
    import ctypes

    from ortgpu import GPUSession

    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        report("cuInit in the child", ctypes.CDLL("libcuda.so.1").cuInit(0))
        attempt("new session", lambda: negated(GPUSession(elementwise(2))))
        os._exit(0)
    os.waitpid(pid, 0)


def pickled() -> None:
    from ortgpu import GPUSession

    session = GPUSession(elementwise(2), make_options, device="cuda:0", cpu_nodes="forbid")
    data = pickle.dumps(session)
    report("device", [session.device.uuid, session.device.ordinal])
    code = (
        "import pickle, sys; session = pickle.loads(sys.stdin.buffer.read()); import numpy as np; "
        "print(session.run(None, {'x': np.array([1, -2], dtype=np.float32)})[0].tolist(), session.device.uuid, "
        "session.get_session_options().intra_op_num_threads)"
    )
    child = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False)
    report("unpickled", child.stdout.decode().strip() or child.stderr.decode()[-2000:])
    code = code.replace("import pickle, sys;", "import pickle, sys, os; os.environ['CUDA_VISIBLE_DEVICES'] = '';")
    child = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False)
    report("unpickled without a GPU", child.stderr.decode().strip().splitlines()[-12:])


def many_threads(model: str, threads: int, seconds: float) -> None:
    """Every result checked against the first of its input; construction goes on beside it."""
    import numpy as np

    from ortgpu import GPUSession

    session = GPUSession(model)
    name, shape = session.get_inputs()[0].name, [d if isinstance(d, int) else 2 for d in session.get_inputs()[0].shape]
    random = np.random.default_rng(0)
    feeds = [{name: random.standard_normal(shape, dtype=np.float32)} for _ in range(threads)]
    expected = [session.run(None, feed)[0] for feed in feeds]
    end = time.monotonic() + seconds
    wrong: list[str] = []
    counts = [0] * threads

    def work(index: int) -> None:
        try:
            while time.monotonic() < end and not wrong:
                result = session.run(None, feeds[index])[0]
                if not np.allclose(result, expected[index], rtol=1e-3, atol=1e-4):
                    wrong.append(f"thread {index}: {np.abs(result - expected[index]).max()}")
                counts[index] += 1
        except Exception as error:  # noqa: BLE001 - reported
            wrong.append(repr(error))

    def construct() -> None:
        try:
            while time.monotonic() < end and not wrong:
                with GPUSession(model) as another:
                    another.run(None, feeds[0])
        except Exception as error:  # noqa: BLE001 - reported
            wrong.append(f"construction: {error!r}")

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    workers += [threading.Thread(target=construct) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    report("threads", {"runs": sum(counts), "least": min(counts), "wrong": wrong})


def asynchronous(model: str) -> None:
    """Runs that ONNX Runtime makes in the session's own threads, all handed over at once."""
    import numpy as np
    import onnxruntime

    from ortgpu import GPUSession

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    plain = onnxruntime.InferenceSession(model, providers=[CUDA, CPU])  # and with it the threads of CUDA
    before = threads()
    another = onnxruntime.InferenceSession(model, providers=[CUDA, CPU])
    report("threads of a plain session", threads() - before)
    before = threads()
    session = GPUSession(model)
    report("threads", threads() - before)
    report("chosen", session.options_chosen.get("intra_op_num_threads"))
    name, shape = plain.get_inputs()[0].name, [d if isinstance(d, int) else 2 for d in plain.get_inputs()[0].shape]
    random = np.random.default_rng(0)
    feeds = [{name: random.standard_normal(shape, dtype=np.float32)} for _ in range(50)]
    results: SimpleQueue[tuple[int, Any, str]] = SimpleQueue()
    for number, feed in enumerate(feeds):
        session.run_async(None, feed, lambda found, given, error: results.put((given, found, error)), number)
    found = [results.get(timeout=20) for _ in feeds]
    report("errors", [error for _, _, error in found if error])
    report("error", max(relative_error(outputs, another.run(None, feeds[given])) for given, outputs, _ in found))


def asynchronous_and_dropped(model: str, count: int) -> None:
    """Sessions that go out of scope while a run is under way."""
    import numpy as np

    from ortgpu import GPUSession
    from tests.support.async_sessions import drop_sessions

    with GPUSession(model) as session:
        (taken,) = session.get_inputs()
        shape = [size if isinstance(size, int) else 2 for size in taken.shape]
    for name, found in drop_sessions(model, {taken.name: np.ones(shape, np.float32)}, count).items():
        report(name, found)


def first_sessions_in_parallel(model: str, threads: int) -> None:
    """The very first sessions of a process, made at once."""
    outcomes: list[str] = []
    barrier = threading.Barrier(threads)

    def work() -> None:
        barrier.wait()
        try:
            from ortgpu import GPUSession

            with GPUSession(model) as session:
                outcomes.append(str(session.device.ordinal))
        except Exception as error:  # noqa: BLE001 - reported
            outcomes.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    report("outcomes", outcomes)


def terminated(model: str) -> None:
    """SIGTERM while `run` is in native code, with Python's default handling of it."""
    code = (
        "import sys, numpy as np; from ortgpu import GPUSession; s = GPUSession(sys.argv[1]); i = s.get_inputs()[0]; "
        "x = np.zeros([d if isinstance(d, int) else 64 for d in i.shape], dtype=np.float32)\n"
        "print('ready', flush=True)\n"
        "while True: s.run(None, {i.name: x})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, model], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1)
    process.terminate()
    started = time.monotonic()
    try:
        returncode: int | None = process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        returncode = None
    report("ended", {"returncode": returncode, "seconds": time.monotonic() - started})


def place() -> None:
    import warnings

    from ortgpu import GPUSession
    from tests.support.known_placements import FEEDS, MODELS

    for name, make in MODELS.items():
        model, feed = make(), FEEDS[name]()

        def look(model: bytes = model, feed: dict[str, Any] = feed) -> object:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                session = GPUSession(model)
            on_cpu = [node for node in session.placement.nodes if node.provider == "CPUExecutionProvider"]
            return {
                "compute on CPU": sorted(node.name for node in on_cpu if node.kind == "compute"),
                "shape on CPU": sorted(node.name for node in on_cpu if node.kind == "shape"),
                "warnings": [str(each.message) for each in caught],
                "shapes": [list(value.shape) for value in session.run(None, feed)],
            }

        def forbid(model: bytes = model) -> str:
            GPUSession(model, cpu_nodes="forbid").close()
            return "opened"

        def explain(model: bytes = model) -> object:
            with GPUSession(model, cpu_nodes="allow") as session:
                return session.explain_placement().as_dict()

        attempt(name, look)
        attempt(f"{name}: forbid", forbid)
        attempt(f"{name}: explained", explain)


def place_versions() -> None:
    from ortgpu import GPUSession
    from tests.support.known_placements import RENEWED_IN_22, alone

    for op_type in RENEWED_IN_22:
        for opset in (21, 22):

            def look(model: bytes = alone(op_type, opset)) -> object:
                with GPUSession(model, cpu_nodes="allow") as session:
                    (node,) = session.placement.nodes
                    return node.provider

            def forbid(model: bytes = alone(op_type, opset)) -> object:
                GPUSession(model, cpu_nodes="forbid").close()
                return "opened"

            attempt(f"{op_type} {opset}", look)
            attempt(f"{op_type} {opset}: forbid", forbid)


def place_beside_shapes(folder: str) -> None:
    import zipfile

    from ortgpu import GPUSession, PlacementError
    from tests.support.logged_placement import logged

    models = os.path.join(folder, "models.zip")
    found = logged(models, os.path.join(folder, "log"))
    differing = []
    with zipfile.ZipFile(models) as archive:
        for name, (*_, refused) in found.items():
            try:
                GPUSession(archive.read(name), cpu_nodes="forbid").close()
                opened = True
            except PlacementError:
                opened = False
            if opened == refused:
                differing.append(name)
    report("differing", differing)
    with open(os.path.join(folder, "found.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)


def place_own_format(folder: str) -> None:
    import warnings

    import onnxruntime

    from ortgpu import GPUSession
    from tests.support.known_placements import FEEDS, MODELS

    def write(name: str, provider: str) -> str:
        path = os.path.join(folder, f"{name}-{provider}.ort")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = path
        onnxruntime.InferenceSession(MODELS[name](), options, providers=[provider])
        return path

    def look(model: str) -> object:
        with warnings.catch_warnings(record=True) as warned, GPUSession(model) as session:
            return {
                "known": session.placement.known,
                "is_gpu": session.device.is_gpu,
                "warned": [(type(each.message).__name__, str(each.message)) for each in warned],
            }

    def forbid(model: str) -> str:
        GPUSession(model, cpu_nodes="forbid").close()
        return "opened"

    def run(name: str, model: str) -> object:
        feed = FEEDS[name]()
        expected = cpu_reference(MODELS[name]()).run(None, feed)
        with GPUSession(model, cpu_nodes="allow") as session:
            return relative_error(session.run(None, feed), expected)

    island = write("island", CPU)
    attempt("island", lambda: look(island))
    attempt("island: forbid", lambda: forbid(island))
    attempt("run: all on CUDA", lambda: run("all_on_cuda", write("all_on_cuda", CPU)))
    attempt("run: written on CUDA", lambda: run("island", write("island", CUDA)))
    plain = (
        "import sys, onnxruntime; from tests.support.known_placements import FEEDS;"
        f"onnxruntime.InferenceSession(sys.argv[1], providers=['{CUDA}', '{CPU}']).run(None, FEEDS['island']())"
    )
    done = subprocess.run([sys.executable, "-c", plain, island], capture_output=True, timeout=60, check=False)
    report("plain run", done.returncode)


def check_placement(folder: str) -> None:
    from tests.support.known_placements import island

    model = os.path.join(folder, "island.onnx")
    with open(model, "wb") as file:
        file.write(island())
    command = [sys.executable, "-W", "ignore", "-m", "ortgpu", "check", model, "--placement"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    report("check", {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr[-2000:]})


PROGRAMS: dict[str, Callable[..., None]] = {
    "place": place,
    "place_versions": place_versions,
    "place_beside_shapes": place_beside_shapes,
    "place_own_format": place_own_format,
    "check_placement": check_placement,
    "out_of_memory": out_of_memory,
    "poisoned": poisoned,
    "forked": forked,
    "forked_after_torch": forked_after_torch,
    "forked_after_another_library": forked_after_another_library,
    "forked_unseen": forked_unseen,
    "pickled": pickled,
    "many_threads": many_threads,
    "asynchronous": asynchronous,
    "asynchronous_and_dropped": asynchronous_and_dropped,
    "first_sessions_in_parallel": first_sessions_in_parallel,
    "terminated": terminated,
}
