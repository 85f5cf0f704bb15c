"""Programs of ``tests/session/test_isolated.py``."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError

import numpy as np

from ortgpu import GPUError, GPUSessionPool
from ortgpu.diagnosis.probe.probing import RELU
from ortgpu.environment import child_process
from ortgpu.process import channel
from ortgpu.provider import lifetime
from ortgpu.session.pool import isolated, shared_memory
from ortgpu.session.pool.workers import NotBegunError
from tests.programs.pools import ECC, Watched, feed, open_pool, outcome, raising, value_of
from tests.support.children import report

isolated.SERVE = "tests.support.deadly_worker:serve_on_cpu"


def isolated_pool(devices=2, model=RELU, **options):
    return GPUSessionPool(model, range(devices), isolate=True, allow_cpu=True, **options)


def deadly():
    isolated.SERVE = "tests.support.deadly_worker:serve_deadly_on_cpu"
    isolated._BACK_OFF = (0.01, 0.02)  # most of these workers die before a first result


def model_of(text):
    import onnx.parser

    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> ' + text).SerializeToString()


def of_any_rank(model):
    import onnx

    made = onnx.load_from_string(model)
    for each in (*made.graph.input, *made.graph.output):
        each.type.tensor_type.ClearField("shape")
    return made.SerializeToString()


def until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def ready(pool):
    until(lambda: all(each.state == "ready" for each in pool.health()))


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid))


def stop(pid):
    os.kill(pid, signal.SIGSTOP)

    def is_stopped():
        states = [
            open(f"/proc/{pid}/task/{task}/stat").read().rpartition(")")[2].split()[0]
            for task in os.listdir(f"/proc/{pid}/task")
        ]
        return set(states) == {"T"}

    until(is_stopped)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def shared_bytes(pid="self"):
    with open(f"/proc/{pid}/maps") as maps:
        lines = [line.split()[0].split("-") for line in maps if "memfd:ortgpu-" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in lines)


def threads():
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("ortgpu"))


def results_are_those_of_a_session_and_the_caller_needs_no_onnxruntime() -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        del sys.modules[module]  # which the prelude imports
    with isolated_pool(sessions_per_device=2) as made:
        report("sizes", [len(made), len(made.sessions), len(made.devices), len(made.lost), made.queued])
        report("run", value_of(made.run(None, feed(3))))
        report("named", value_of(made.run(output_names=["y"], input_feed=feed(4))))
        report("futures", [value_of(made.submit(None, feed(n)).result()) for n in range(20)])
        report("map", [value_of(outputs) for outputs in made.map(feed(n) for n in range(200))])
        report("list", [value_of(outputs) for outputs in made.map([feed(n) for n in range(9)], in_flight=2)])
        report("imported", "onnxruntime" in sys.modules)
        report("pids", len({each.pid for each in made.health()} - {os.getpid()}))
    report("left", threads())


def a_python_that_was_built_without_memfd_create_has_isolated_pools_too() -> None:
    del os.memfd_create
    isolated.SERVE = "tests.support.deadly_worker:serve_without_memfd"
    before = descriptors()
    with isolated_pool(2) as made:
        report("map", [value_of(outputs) for outputs in made.map(feed(n) for n in range(50))])
        kill(made.health()[0].pid)
        ready(made)
        report("again", [value_of(outputs) for outputs in made.map(feed(n) for n in range(50))])
    file = channel.memory_file("x")
    report("inherited", os.get_inheritable(file))
    os.close(file)
    report("left", descriptors() - before)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    told = outcome(lambda: channel.memory_file("x"))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    report("too many", told)


def results_and_feeds_are_the_callers_own() -> None:
    same = model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")
    with isolated_pool(1, same) as made:
        for size in (4, 3 << 20):
            array = np.zeros(size, np.float32)
            kept = []
            for number in range(8):
                array[:] = number
                kept.append(made.submit(None, {"x": array}))
            array[:] = -1
            results = [future.result()[0] for future in kept]
            for _ in range(4):
                made.run(None, {"x": array})
            report(str(size), [[float(each.min()), float(each.max())] for each in results])
            results[0][:] = 5
            assert results[1][0] == 1
    report("a generator", [float(outputs[0][-1]) for outputs in ()])


def what_cannot_go_to_another_process_is_refused_with_the_reason() -> None:
    import onnxruntime

    class OnGPU:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_):
            raise AssertionError

    class OnCPU:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **arguments):
            return np.full(4, 7, np.float32).__dlpack__()

    given = {
        "text": np.array(["a"]),
        "objects": np.array(["a", None]),
        "list": [1.0, 2.0],
        "number": 1.0,
        "none": None,
        "map": {1: 2.0},
        "on a GPU": OnGPU(),
        "OrtValue": onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(4, np.float32)),
    }
    with isolated_pool(1) as made:
        for name, value in given.items():
            report(name, [outcome(lambda: ask(None, {"x": value})) for ask in (made.run, made.submit)])
        report("in map", outcome(lambda: list(made.map([{"x": given["text"]}]))))
        report("on the CPU", outcome(lambda: value_of(made.run(None, {"x": OnCPU()}))))
        report("no feed", outcome(lambda: made.run(None, None)))
        report("wrong name", outcome(lambda: made.run(None, {"z": np.ones(4, np.float32)})))
        report("wrong output", outcome(lambda: made.submit(["nothing"], feed(1)).result()))
        report("word", outcome(lambda: made.run("warm", feed(1))))
        report("wrong type", outcome(lambda: made.run(None, {"x": np.ones(4)})))
        report("wrong shape", outcome(lambda: made.run(None, {"x": np.ones(5, np.float32)})))
        report("after", [value_of(made.run(None, feed(7))), made.health()[0].restarts])
    lists = model_of("t (float[n] x) => (seq(float[n]) s, float[n] y) { s = SequenceConstruct(x, x) y = Relu(x) }")
    with isolated_pool(1, lists) as made:
        report("list out", outcome(lambda: made.run(None, feed(1))))
        report("other output", outcome(lambda: value_of(made.run(["y"], feed(1)))))


def what_no_pool_with_processes_can_do_is_refused_before_it_opens() -> None:
    def attempt(*arguments, **options):
        return outcome(lambda: len(GPUSessionPool(RELU, *arguments, isolate=True, **options)))

    report(
        "refused",
        {
            "a word": attempt("cuda:1", allow_cpu=True),
            "none at all": attempt([], allow_cpu=True),
            "twice": attempt([1, "cuda:1"], allow_cpu=True),
            "no sessions": attempt([0], 0, allow_cpu=True),
            "graphs": attempt([0], cuda_graph=True),
            "misspelt": attempt([0], isolated=True),
            "no pickle": attempt([0], providers=[lambda: None]),
            "deadline": attempt([0], deadline=0),
            "endless": attempt([0], deadline=float("inf")),
            "cpu_nodes": attempt([0], cpu_nodes="maybe"),
            "no GPU": attempt(),
        },
    )
    report("no model", outcome(lambda: GPUSessionPool("no/such/model.onnx", [0, 1], isolate=True, allow_cpu=True)))
    report("no isolation", outcome(lambda: GPUSessionPool(RELU, deadline=1.0)))
    only_there = {name: getattr(os, name) for name in ("memfd_create", "sched_getaffinity", "posix_fallocate")}
    for name in only_there:
        delattr(os, name)
    sys.platform = "darwin"
    report("macOS", attempt([0], allow_cpu=True))
    sys.platform = "linux"
    for name, function in only_there.items():
        setattr(os, name, function)
    report("left", [threads(), descriptors()])
    with isolated_pool(1):
        pass
    report("everywhere", [threads(), descriptors()])


def a_path_options_and_warnings_arrive() -> None:
    import tempfile

    from tests.programs.worker_options import make_options

    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)
    with open("model.onnx", "wb") as file:
        file.write(RELU)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = GPUSessionPool("model.onnx", range(2), isolate=True, allow_cpu=True, sess_options=make_options)
    os.chdir("/")
    report("run", value_of(made.run(None, feed(3))))
    kill(made.health()[0].pid)
    ready(made)
    report("again", [value_of(made.run(None, feed(n))) for n in range(9)])
    made.close()
    report("warned", [[type(each.message).__name__, each.filename] for each in caught])
    with open(os.path.join(folder.name, "carried"), "w"):
        pass


def requests_are_joined_for_worker_processes_too() -> None:
    same = model_of("same (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
    for module in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        del sys.modules[module]  # which the prelude imports
    with isolated_pool(2, same) as made, made.batched(16) as joined:
        kill(made.health()[0].pid)
        asked = [joined.submit(None, {"x": np.full((1 + n % 3, 4), n, np.float32)}) for n in range(60)]
        report("results", [[*future.result(60)[0].shape, float(future.result()[0].max())] for future in asked])
        report("imported", "onnxruntime" in sys.modules)
        report("wrong", outcome(lambda: joined.run(None, {"x": np.ones((1, 3), np.float32)}))["type"])


def requests_that_were_joined_with_a_deadly_one_end_no_further_worker() -> None:
    deadly()
    same = model_of("same (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")

    def rows(value):
        return {"x": np.full((1, 4), value, np.float32)}

    with isolated_pool(2, same) as made, made.batched(max_batch=4, max_wait=5) as joined:
        joined._joining._last = 4  # so that they run together
        asked = [joined.submit(None, rows(value)) for value in (-9, 1, 2, 3)]
        report("joined", [outcome(each.result) for each in asked])
        ready(made)
        joined._joining._last = 1  # else the next one waits for three more
        report("again", [float(joined.run(None, rows(n))[0].max()) for n in range(3)])
        report("restarts", sum(each.restarts for each in made.health()))


def a_worker_that_is_killed_while_idle_is_replaced() -> None:
    with isolated_pool() as made:
        victim, other = made.health()
        os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        until(lambda: made.health()[0].state != "ready")
        report("noticed", time.monotonic() - started)
        report("meanwhile", [value_of(made.run(None, feed(n))) for n in range(5)])
        ready(made)
        now = made.health()
        report("health", [[each.state, each.restarts, each.in_flight] for each in now])
        report("error", [type(now[0].last_error).__name__, now[0].last_error.cause, now[1].last_error])
        report("new", [now[0].pid != victim.pid, now[1].pid == other.pid])
        report("after", [value_of(outputs) for outputs in made.map(feed(n) for n in range(50))])
        report("lost", len(made.lost))


def a_request_that_was_running_runs_once_more() -> None:
    gc.disable()
    with isolated_pool() as made:
        made.run(None, feed(1))
        for each in made.health():
            stop(each.pid)  # so that it is certainly running
        future = made.submit(None, feed(5))
        until(lambda: any(each.in_flight for each in made.health()))
        for each in made.health():
            os.kill(each.pid, signal.SIGKILL if each.in_flight else signal.SIGCONT)
        report("value", value_of(future.result(60)))
        ready(made)
        report("restarts", sorted(each.restarts for each in made.health()))
        until(lambda: sum(isinstance(each, isolated.WorkerProcess) for each in gc.get_objects()) == 2)


def a_request_that_kills_two_workers_fails_and_the_others_do_not() -> None:
    deadly()
    with isolated_pool() as made:
        made.run(None, feed(1))
        ways = {
            "killed": lambda: made.run(None, feed(-9)),
            "crashed": lambda: made.submit(None, feed(-11)).result(),
            "ended": lambda: [value_of(outputs) for outputs in made.map([feed(1), feed(-3), feed(2)])],
            "poisoned": lambda: made.run(None, feed(-700)),
        }
        for name, ask in ways.items():
            report(name, outcome(ask))
            ready(made)
        report("after", [value_of(outputs) for outputs in made.map(feed(n) for n in range(20))])
        ready(made)
        report("restarts", sum(each.restarts for each in made.health()))
        report("lost", len(made.lost))


def a_failure_of_one_worker_that_another_does_not_have_replaces_it() -> None:
    deadly()
    with isolated_pool() as made:
        report("both", outcome(lambda: made.run(None, feed(-4000))))
        report("restarts", sum(each.restarts for each in made.health()))
        sound = made._workers[1]
        run = sound.run
        sound.run = lambda names, given: run(names, feed(6))
        sound.runs["another"] = 0.0  # so that the other one is asked first
        report("one", outcome(lambda: value_of(made.run(None, feed(-4000)))))
        del sound.runs["another"]
        until(lambda: made.health()[0].restarts == 1)
        report("why", made.health()[0].last_error.cause)


def a_worker_that_takes_longer_than_the_deadline_is_replaced() -> None:
    deadly()
    isolated._FIRST_RUN = 2.0
    with isolated_pool(1, deadline=0.5) as made:
        made.warm([feed(1)])
        stop(made.health()[0].pid)
        started = time.monotonic()
        report("stopped", value_of(made.run(None, feed(5))))
        report("seconds", time.monotonic() - started)
        report("why", made.health()[0].last_error.cause)
        report("hangs", outcome(lambda: made.run(None, feed(-1))))
        report("after", value_of(made.run(None, feed(7))))


def a_process_that_cannot_be_killed_is_left_and_replaced() -> None:
    isolated._DEATH = child_process._DEATH = 0.5
    isolated._FIRST_RUN = 1.0
    with isolated_pool(1, deadline=0.5) as made:
        made.run(None, feed(1))
        stuck = made.health()[0].pid
        stop(stuck)
        kill_group, child_process.kill_group = child_process.kill_group, lambda child: None  # type: ignore[attr-defined]  # its name in there
        report("value", outcome(lambda: value_of(made.submit(None, feed(5)).result(30))))
        child_process.kill_group = kill_group  # type: ignore[attr-defined]  # its name in there
        ready(made)
        (now,) = made.health()
        report("replaced", [now.pid != stuck, now.restarts, now.last_error.cause, lives(stuck)])
    report("left", threads())
    os.kill(stuck, signal.SIGKILL)


def a_process_that_lets_go_of_its_channel_and_does_not_end_is_replaced() -> None:
    deadly()
    isolated._DEATH = child_process._DEATH = 0.5
    with isolated_pool(1) as made:
        pid = made.health()[0].pid
        made.run(None, feed(1))
        future = made.submit(None, feed(-800))
        until(lambda: made.health()[0].state != "ready")
        report("others", [outcome(lambda: value_of(made.submit(None, feed(n)).result(30))) for n in range(6)])
        report("future", outcome(lambda: future.result(30)))
        report("left", lives(pid))


def an_error_of_a_run_or_an_opening_is_no_death() -> None:
    deadly()
    for name, deadline in (("with a deadline", 30), ("without", None)):
        with isolated_pool(1, deadline=deadline) as made:
            told = [outcome(lambda: made.run(None, feed(value))) for value in (-900, -901, -902)]
            report(
                name, [[each["type"] for each in told], value_of(made.run(None, feed(4))), made.health()[0].restarts]
            )
    for name in ("TimeoutError", "EOFError", "ConnectionResetError"):
        isolated.SERVE = f"tests.support.deadly_worker:fail_by_{name}"
        report(name, outcome(lambda: isolated_pool(1)))


def deaths_before_a_first_result_are_delayed_and_others_are_not() -> None:
    isolated._BACK_OFF = (1.5, 3.0)
    starts = []
    start = isolated.WorkerProcess
    isolated.WorkerProcess = lambda launch: (starts.append(time.monotonic()), start(launch))[1]

    def dies():
        before, died = len(starts), time.monotonic()
        kill(made.health()[0].pid)
        until(lambda: len(starts) > before)
        ready(made)
        return starts[-1] - died

    with isolated_pool(1) as made:
        fruitless = [dies() for _ in range(3)]
        made.run(None, feed(1))
        report("delays", [*fruitless, dies()])
        report("restarts", made.health()[0].restarts)


def a_worker_that_cannot_be_replaced_is_given_up_and_all_are_told() -> None:
    import tempfile

    isolated._BACK_OFF = (0.01, 0.02)
    isolated._GIVEN_UP = 0.05
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        with open(path, "wb") as file:
            file.write(RELU)
        made = isolated_pool(2, path)
        with open(path, "ab") as file:  # not renamed over it: the content that the pool opened is gone
            file.write(b"more")
    made.run(None, feed(1))
    kill(made.health()[0].pid)
    until(lambda: made.health()[0].state == "lost")
    report("one", [len(made), len(made.devices), len(made.lost), value_of(made.run(None, feed(2)))])
    report("error", [type(made.lost[0].error).__name__, str(made.lost[0].error)])
    stop(made.health()[1].pid)
    waiting = [made.submit(None, feed(n)) for n in range(6)]
    kill(made.health()[1].pid)
    report("waiting", [outcome(future.result) for future in waiting])
    report("later", outcome(lambda: made.run(None, feed(1))))
    report("states", [each.state for each in made.health()])
    made.close()
    report("left", threads())


def a_worker_that_dies_while_it_opens_is_an_error_of_the_constructor() -> None:
    isolated.SERVE = "tests.support.deadly_worker:crash"
    report("crash", outcome(lambda: isolated_pool()))
    isolated.SERVE = "tests.support.deadly_worker:hang"
    isolated._OPENING = 0.5
    report("hang", outcome(lambda: isolated_pool()))
    sys.frozen = True  # type: ignore[attr-defined]  # set here, or of the type that it is
    report("no interpreter", outcome(lambda: isolated_pool()))
    report("left", threads())


def without_room_a_request_fails_and_the_pool_goes_on() -> None:
    grows = model_of("grows (float[n] x, int64[1] times) => (float[m] y) { y = Tile(x, times) }")

    def given(size, times=1):
        return {"x": np.full(size, 2, np.float32), "times": np.array([times])}

    with isolated_pool(1, grows) as made:
        assert value_of(made.run(None, given(4))) == 2
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        report("feed", outcome(lambda: made.run(None, given(1 << 20))))
        report("next", value_of(made.run(None, given(9))))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        pid = made.health()[0].pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        report("result", outcome(lambda: made.run(None, given(4, 1 << 20))))
        report("small", made.run(None, given(4, 2))[0].shape)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        report("large", [made.run(None, given(1 << 20, times))[0].shape for times in (1, 3)])
        report("same", [made.health()[0].pid == pid])


def without_descriptors_requests_go_on_and_no_pool_opens() -> None:
    same = model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")

    def run(size):
        return value_of(made.run(None, {"x": np.full(size, 2, np.float32)}))

    def exhausted(pid):
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        return limits

    with isolated_pool(1, same) as made:
        for name, size, pid in (("here", 1 << 20, os.getpid()), ("there", 3 << 20, made.health()[0].pid)):
            assert run(4) == 2
            limits = exhausted(pid)
            told = [outcome(lambda: run(each)) for each in (size, 4, size + 1)]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            report(name, told)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    told = []
    for more in (4, 8, 13):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, limits[1]))
        told.append(outcome(lambda: isolated_pool()).get("type"))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    report("opening", told)
    report("left", [descriptors() - before, threads()])


def a_feed_larger_than_most_leaves_no_memory_behind() -> None:
    shared_memory.KEPT = 1 << 20
    isolated.SERVE = "tests.support.deadly_worker:serve_and_keep_little"
    same = model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")
    with isolated_pool(1, same) as made:
        large = np.arange(100 << 18, dtype=np.float32)  # 100 MiB
        (result,) = made.run(None, {"x": large})
        report("right", bool((result == large).all()))
        made.run(None, {"x": large[:9]})
        exchanges = made._workers[0].process.exchanges
        files = [os.fstat(each.descriptor).st_size for each in exchanges]
        report("kept", [shared_bytes(), shared_bytes(made.health()[0].pid), sum(files)])


def the_request_after_a_large_one_that_failed_succeeds() -> None:
    with isolated_pool(1, model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")) as made:
        wrong = np.zeros(shared_memory.KEPT // 8 + (1 << 22))
        report(
            "json",
            [
                outcome(lambda: made.run(None, {"x": wrong}))["type"],
                [float(made.run(None, {"x": np.full(9, n, np.float32)})[0][-1]) for n in range(4)],
            ],
        )


def large_arrays_travel_in_huge_pages_where_the_system_has_some() -> None:
    import ctypes
    import mmap

    def huge_pages():
        with open("/proc/self/smaps") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("ShmemPmdMapped:")) >> 11

    # What the system can do: a file in memory, mapped at an address and an offset that go together.
    file, length = os.memfd_create("x"), 8 << 20
    os.posix_fallocate(file, 0, 2 * length)
    address = np.frombuffer(mmap.mmap(file, length), np.uint8).ctypes.data
    mapping = mmap.mmap(file, length, offset=address % (2 << 20))
    place = ctypes.c_void_p(np.frombuffer(mapping, np.uint8).ctypes.data)
    collapsed = ctypes.CDLL(None).madvise(place, ctypes.c_size_t(length), 25)
    can = collapsed == 0 and huge_pages() >= 3
    del mapping
    same = model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")
    with isolated_pool(1, same) as made:
        sizes = [100, 4 << 20, 5 << 20, (5 << 20) + 1, 100, 1 << 20, 9 << 20]
        arrays = [np.arange(size, dtype=np.float32) for size in sizes]
        report("right", [bool((made.run(None, {"x": array})[0] == array).all()) for array in arrays])
        report("pages", [huge_pages(), can])


def large_arrays_are_copied_in_threads_and_the_program_may_fork() -> None:
    from ortgpu.running import copying

    copying.copy_threads = lambda: 3
    same = model_of("same (float[n] x) => (float[n] y) { y = Identity(x) }")
    for module in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        del sys.modules[module]  # which the prelude imports
    arrays = [np.random.default_rng(n).random((4 << 20) + n, np.float32) for n in range(3)]

    def refilled():
        array = np.empty_like(arrays[0])
        for n in range(12):
            array[:] = n
            yield {"x": array}

    with isolated_pool(2, same) as made:
        before = set(os.listdir("/proc/self/task"))
        report("right", [bool((made.run(None, {"x": array})[0] == array).all()) for array in arrays])
        report("gaps", bool((made.run(None, {"x": arrays[0][::2]})[0] == arrays[0][::2]).all()))
        report("threads", len(set(os.listdir("/proc/self/task")) - before))
        futures = [made.submit(None, {"x": array}) for array in arrays * 4]
        report("futures", [bool((each.result()[0] == arrays[n % 3]).all()) for n, each in enumerate(futures)])
        report("refilled", [sorted({float(y.min()), float(y.max())}) for (y,) in made.map(refilled())])
        pid = os.fork()
        if not pid:
            sys.exit(3)
        report("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        report("after", bool((made.run(None, {"x": arrays[0]})[0] == arrays[0]).all()))


def cancelled_requests_leave_no_trace_and_interrupts_end_nothing() -> None:
    deadly()
    with isolated_pool(1) as made:
        made.run(None, feed(1))
        pid = made.health()[0].pid
        stop(pid)
        capacity = made._service.most
        running = [made.submit(None, feed(n)) for n in range(capacity)]
        until(lambda: made.health()[0].in_flight == capacity)
        waiting = [made.submit(None, feed(n)) for n in range(capacity)]
        report("cancelled", [future.cancel() for future in (running[0], *waiting)])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        report("interrupted", outcome(lambda: made.run(None, feed(3)))["type"])
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        report("values", [value_of(future.result(30)) for future in running])
        report("after", [value_of(outputs) for outputs in made.map(feed(n) for n in range(30))])
        report("same", [made.health()[0].pid == pid, made.queued, made.health()[0].in_flight])


def health_of_a_pool_without_isolation() -> None:
    made = open_pool(2)
    made.run(None, feed(1))
    health = made.health()
    report("before", [[each.state, each.pid == os.getpid(), each.restarts, each.in_flight] for each in health])
    Watched(made.sessions[0], raising(*ECC))
    lifetime.gpu_works = lambda ordinal: False
    report("run", [outcome(lambda: value_of(made.run(None, feed(2)))) for _ in range(4)])
    report("after", [[each.state, str(each.last_error)] for each in made.health()])


def close_waits_for_what_runs_and_leaves_nothing() -> None:
    before = descriptors()
    made = isolated_pool(2)
    pids = [each.pid for each in made.health()]
    made.run(None, feed(1))
    for pid in pids:
        stop(pid)
    running = [made.submit(None, feed(n)) for n in range(made._service.most)]
    until(lambda: sum(each.in_flight for each in made.health()) == made._service.most)
    waiting = [made.submit(None, feed(n)) for n in range(3)]
    closing = threading.Thread(target=made.close)
    closing.start()
    report("waiting", [outcome(future.result) for future in waiting])
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    closing.join()
    report("running", [value_of(future.result()) for future in running])
    made.close()
    report("left", [[lives(pid) for pid in pids], threads(), descriptors() - before, shared_bytes()])
    report("later", outcome(lambda: made.run(None, feed(1))))


def a_stopped_worker_and_one_that_is_being_replaced_do_not_keep_close_waiting() -> None:
    isolated._DEATH = child_process._DEATH = 0.5
    made = isolated_pool(2)
    one, two = [each.pid for each in made.health()]
    stop(one)
    kill(two)
    until(lambda: made.health()[1].state == "replacing")
    started = time.monotonic()
    made.close()
    report("seconds", time.monotonic() - started)
    report("left", [lives(one), threads()])


def a_pool_that_is_dropped_is_closed() -> None:
    made = isolated_pool(1)
    pid = made.health()[0].pid
    kill(pid)
    ready(made)
    made.run(None, feed(1))
    pid = made.health()[0].pid
    del made
    gc.collect()
    until(lambda: not lives(pid) and not threads())


def a_request_whose_worker_dies_during_close_is_answered() -> None:
    made = isolated_pool(1)
    made.run(None, feed(1))
    (worker,) = made._workers
    with made._service._lock:  # so that no thread takes it
        future = made.submit(None, feed(2))
        worker.process.is_lost = True
        threading.Thread(target=made.close).start()
        until(lambda: made._service.is_closed)  # else a successor may run the request before
    report("future", outcome(lambda: future.result(10)))


def a_worker_that_ends_has_no_plans_to_make() -> None:
    isolated._BACK_OFF = (60, 60)
    made = isolated_pool(1)
    kill(made.health()[0].pid)
    until(lambda: made.health()[0].state == "replacing")
    report("replacing", outcome(lambda: made.warm([feed(1)])))

    def end(feeds):
        made.close()
        raise NotBegunError

    made._workers[0].warm = end
    report("closed", outcome(lambda: made.warm([feed(1)])))


def a_pool_that_is_dropped_while_requests_wait_for_a_worker_answers_them() -> None:
    isolated._BACK_OFF = (60, 60)
    made = isolated_pool(1)
    kill(made.health()[0].pid)
    until(lambda: (made.health()[0].state, made.health()[0].pid) == ("replacing", None))
    future = made.submit(None, feed(2))
    del made
    gc.collect()
    report("future", outcome(lambda: future.result(10)))
    until(lambda: not threads())


def a_forked_child_is_told_and_the_parent_goes_on() -> None:
    made = isolated_pool(1)
    made.run(None, feed(1))
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with made._service._lock:
            is_held.set()
            is_over.wait(30)

    threading.Thread(target=hold).start()
    is_held.wait(30)
    pid = os.fork()
    is_over.set()
    if pid == 0:
        signal.alarm(30)
        report("facts", [made.queued, len(made), len(made.devices), len(made.lost)])
        report("run", outcome(lambda: made.run(None, feed(1))))
        report("submit", outcome(lambda: made.submit(None, feed(1))))
        report("map", outcome(lambda: list(made.map([feed(1)]))))
        report("health", outcome(made.health))
        report("drain", outcome(made.drain))
        report("close", outcome(made.close))
        sys.exit(7)
    report("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    report("after", [value_of(made.run(None, feed(n))) for n in range(3)])
    report("restarts", made.health()[0].restarts)
    made.close()


def everything_resolves_while_workers_are_killed() -> None:
    deadly()
    made = isolated_pool(2)
    stopped = threading.Event()

    def murder():
        while not stopped.wait(0.7):
            pids = [each.pid for each in made.health() if each.state == "ready"]
            if pids:
                os.kill(pids[int(time.time() * 1000) % len(pids)], signal.SIGKILL)

    ended = []

    def ask(start):
        for n in range(start, start + 75):
            future = made.submit(None, feed(-11 if n % 97 == 36 else n))
            if n % 5 == 0:
                future.cancel()
            try:
                ended.append("right" if value_of(future.result(60)) == n else "wrong")
            except (CancelledError, GPUError) as error:
                ended.append(type(error).__name__)
            time.sleep(0.01)

    asking = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(4)]
    murderer = threading.Thread(target=murder)
    for thread in (*asking, murderer):
        thread.start()
    for thread in asking:
        thread.join()
    stopped.set()
    murderer.join()
    made.drain(30)
    report("ended", ended)
    report("restarts", sum(each.restarts for each in made.health()))
    made.close()
    report("left", threads())


def what_workers_log() -> None:
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append([record.name, record.levelname, record.getMessage()])

    logging.getLogger("ortgpu").addHandler(Keep())
    logging.getLogger("ortgpu").setLevel(logging.INFO)
    with isolated_pool() as made:
        opened = len([text for _, _, text in records if "is running on the CPU" in text])
        kill(made.health()[0].pid)
        until(lambda: made.health()[0].restarts == 1)
        ready(made)
        report("opened", [opened, len([text for _, _, text in records if "is running on the CPU" in text])])
    report("kinds", sorted({(name, level) for name, level, _ in records}))


def workers_end_with_their_parent() -> None:
    made = isolated_pool(2)
    made.run(None, feed(1))
    with open(sys.argv[1], "w") as file:
        file.write(" ".join(str(each.pid) for each in made.health()))
    end = sys.argv[2]
    if end == "exception":
        raise SystemError
    if end == "forked child" and os.fork() == 0:
        signal.alarm(60)
        time.sleep(60)
    if end == "spawned child":
        import subprocess

        subprocess.Popen(["sleep", "60"], close_fds=False)
    if end != "exit":
        os.kill(os.getpid(), signal.SIGKILL)
