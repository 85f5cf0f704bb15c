"""GPUSessionPool where there is no GPU: its sessions are real ones, on the CPU, and each stands for a device.

What fails is a session's C++ session that raises ONNX Runtime's exception with the text of an H200, as in
test_running.py; everything above it is the real thing. Each case is a child process with a deadline.
"""

from __future__ import annotations

import sys
import textwrap
import threading
from typing import Any, ClassVar

import pytest

from benchmarks.common import child_environment, run_child
from ortgpu import GPUSessionPool, pool_workers, registry
from ortgpu.devices import Device
from ortgpu.environment.cuda import CudaDevice, CudaState
from ortgpu.errors import DeviceBusyError
from tests.lab.fixtures import Lab
from tests.lab.stubs import GPU, NVML, Cuda

DEADLINE = 60

PRELUDE = """
import dataclasses, gc, itertools, logging, os, pickle, signal, sys, threading, time, warnings, weakref
from concurrent.futures import CancelledError, Future, wait
warnings.simplefilter("ignore")
import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as C
import ortgpu
from benchmarks.common import report
from ortgpu import GPUSessionPool, GPUError, lifetime
from ortgpu.diagnosis.probe_child import RELU

def open_pool(devices=2, **options):
    made = GPUSessionPool(RELU, range(devices), allow_cpu=True, **options)
    for session in made.sessions:
        session.device = dataclasses.replace(session.device, kind="cuda", ordinal=0, name=None)
        lifetime.watch(session)  # as the constructor does on a GPU
    return made

def feed(value):
    return {"x": np.full(4, value, dtype=np.float32)}

def value_of(outputs):
    return outputs[0].tolist()[0]

def outcome(action):
    try:
        return {"returned": action()}
    except BaseException as error:
        return {"type": type(error).__name__, "text": str(error), "details": getattr(error, "details", dict)(),
                "others": [type(other).__name__ for other in getattr(error, "others", ())]}

lock = threading.Lock()

class Watched:
    '''Before a session's C++ session: counts the calls, and does something first.'''
    def __init__(self, session, first=lambda: None):
        self._inner, self.first, self.calls, self.at_once, self.most = session._sess, first, 0, 0, 0
        session._sess = self
    def __getattr__(self, name):
        return getattr(self._inner, name)
    def run(self, *arguments):
        with lock:
            self.calls += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            self.first()
            return self._inner.run(*arguments)
        finally:
            with lock:
                self.at_once -= 1

class Gate:
    '''Holds every run until it is opened, and says how many it holds.'''
    def __init__(self):
        self.arrived, self.opened = threading.Semaphore(0), threading.Event()
    def __call__(self):
        self.arrived.release()
        assert self.opened.wait(30)
    def wait_for(self, count):
        for _ in range(count):
            assert self.arrived.acquire(timeout=30)

def raising(kind, text):
    def first():
        raise kind(text)
    return first

def pool_threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ortgpu-pool"))

WHERE = " ; GPU=1 ; hostname=vm ; file=/onnxruntime_src/x.cc ; line=91 ; expr=cudaMemcpyAsync(...); "
FAIL = "[ONNXRuntimeError] : 1 : FAIL : "
ECC = (C.Fail, FAIL + "CUDA failure 214: uncorrectable ECC error encountered" + WHERE)
UNKNOWN = (RuntimeError, "CudaCall CUDA failure 999: unknown error" + WHERE)
STICKY = (C.Fail, FAIL + "CUDA failure 700: an illegal memory access was encountered" + WHERE)
CUDNN = (C.Fail, FAIL + "CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR" + WHERE)
MEMORY = (C.Fail, FAIL + "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 99999")
"""


def child(code: str) -> Any:
    """What the code reported, by name."""
    environment = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    done = run_child([sys.executable, "-c", PRELUDE + textwrap.dedent(code)], env=environment, deadline=DEADLINE)
    assert done.returncode == 0, done.explain()
    return done.reports


# Work


def test_results_are_those_of_a_session_wherever_it_ran() -> None:
    found = child("""
        with open_pool(sessions_per_device=2) as made:
            watched = [Watched(session) for session in made.sessions]
            report("sizes", [len(made), len(made.sessions), len(made.devices), len(made.lost)])
            report("run", value_of(made.run(None, feed(3))))
            report("named", value_of(made.run(["y"], feed(4))))
            report("futures", [value_of(made.submit(None, feed(n)).result()) for n in range(20)])
            report("map", [value_of(outputs) for outputs in made.map(feed(n) for n in range(200))])
            report("calls", [each.calls for each in watched])
            report("most", [each.most for each in watched])
        report("left", pool_threads())
    """)
    assert found["sizes"] == [4, 4, 2, 0]
    assert (found["run"], found["named"]) == (3, 4)
    assert found["futures"] == list(range(20))
    assert found["map"] == list(range(200))
    assert sum(found["calls"]) == 222
    assert max(found["most"]) <= 2
    assert found["left"] == []


def test_a_request_goes_to_the_session_that_is_least_busy() -> None:
    found = child("""
        with open_pool(3) as made:
            gates = [Gate() for _ in made.sessions]
            watched = [Watched(session, gate) for session, gate in zip(made.sessions, gates)]
            futures = [made.submit(None, feed(n)) for n in range(6)]
            for gate in gates:
                gate.wait_for(2)
            report("spread", [each.calls for each in watched])
            gates[1].opened.set()
            wait([futures[1], futures[4]])
            gates[1].opened.clear()
            futures += [made.submit(None, feed(n)) for n in range(2)]
            gates[1].wait_for(2)
            report("then", [each.calls for each in watched])
            for gate in gates:
                gate.opened.set()
            report("values", [value_of(future.result()) for future in futures])
    """)
    assert found["spread"] == [2, 2, 2]
    assert found["then"] == [2, 4, 2]
    assert found["values"] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_what_waits_is_bounded() -> None:
    found = child("""
        with open_pool() as made:
            waiting = []
            for session in made.sessions:
                Watched(session, lambda: waiting.append(len(made._waiting)))
            futures = [made.submit(None, feed(n)) for n in range(300)]
            report("values", [value_of(future.result()) for future in futures])
            report("most", max(waiting))
    """)
    assert found["values"] == list(range(300))
    assert found["most"] <= 6  # as many as there are threads


def test_what_waits_can_be_cancelled_and_what_runs_cannot() -> None:
    found = child("""
        with open_pool(1) as made:
            gate = Gate()
            watched = Watched(made.sessions[0], gate)
            running = [made.submit(None, feed(n)) for n in range(3)]
            gate.wait_for(3)
            first, second = made.submit(None, feed(3)), made.submit(None, feed(4))
            report("cancelled", [running[0].cancel(), first.cancel()])
            gate.opened.set()
            report("values", [value_of(future.result()) for future in [*running, second]])
            report("calls", watched.calls)
    """)
    assert found["cancelled"] == [False, True]
    assert found["values"] == [0, 1, 2, 4]
    assert found["calls"] == 4


def test_what_a_request_raises_is_its_own() -> None:
    found = child("""
        with open_pool() as made:
            report("wrong input", outcome(lambda: made.run(None, {"x": np.ones(5, np.float32)})))
            report("wrong name", outcome(lambda: made.submit(["nothing"], feed(1)).result()))
            report("no feed", outcome(lambda: made.run(None, None)))
            watched = [Watched(session, raising(*MEMORY)) for session in made.sessions]
            report("memory", outcome(lambda: made.run(None, feed(1))))
            report("calls", sum(each.calls for each in watched))
            for each in watched:
                each.first = lambda: None
            report("after", [value_of(made.run(None, feed(7))), len(made.devices), len(made.lost)])
    """)
    assert found["wrong input"]["type"] == "InvalidArgument"
    assert "type" in found["wrong name"]
    assert "type" in found["no feed"]
    assert found["memory"]["type"] == "GPUOutOfMemoryError"
    assert found["calls"] == 1  # not tried elsewhere
    assert found["after"] == [7, 2, 0]


def test_arrays_on_a_gpu_are_refused() -> None:
    """A pool chooses the GPU, and its threads do not know the stream in which an array is made."""
    found = child("""
        class Tensor:
            def __init__(self, device):
                self.device = device
            def __dlpack_device__(self):
                return self.device
            def __dlpack__(self, **arguments):
                return np.full(4, 7, np.float32).__dlpack__()

        with open_pool() as made:
            report("run", outcome(lambda: made.run(None, {"x": Tensor((2, 0))})))
            report("submit", outcome(lambda: made.submit(None, {"x": Tensor((2, 1))})))
            report("map", outcome(lambda: list(made.map([{"x": Tensor((13, 0))}]))))
            report("on the CPU", outcome(lambda: value_of(made.run(None, {"x": Tensor((1, 0))}))))
    """)
    for name in ("run", "submit", "map"):
        assert found[name]["type"] == "ProviderRequestError", found
        assert "input 'x' is on a GPU, and a pool chooses the GPU itself" in found[name]["text"]
    assert found["on the CPU"] == {"returned": 7.0}


def test_a_failure_that_nobody_looks_at_holds_no_arrays() -> None:
    found = child("""
        gc.collect()
        gc.disable()
        with open_pool(1) as made:
            def fail(ask):
                wrong = np.ones(5, np.float32)
                gone = weakref.ref(wrong)
                outcome(lambda: ask({"x": wrong}))
                return gone
            gone = [fail(lambda wrong: made.run(None, wrong)), fail(lambda wrong: made.submit(None, wrong).result())]
            made.run(None, feed(1))
            for thread in range(6):
                made.submit(None, feed(1)).result()
        report("held", [each() is not None for each in gone])
    """)
    assert found["held"] == [False, False]


def test_a_callback_may_submit_and_close() -> None:
    found = child("""
        with open_pool(1) as made:
            chained = Future()
            def more(_):
                futures = [made.submit(None, feed(n)) for n in range(20)]  # more than wait, in a thread that serves
                made.submit(None, feed(20)).add_done_callback(lambda done: chained.set_result((futures, done)))
            made.submit(None, feed(0)).add_done_callback(more)
            futures, last = chained.result(30)
            report("values", [value_of(future.result(30)) for future in futures] + [value_of(last.result())])
            closed = threading.Event()
            def close(_):
                made.close()
                closed.set()
            made.submit(None, feed(0)).add_done_callback(close)
            assert closed.wait(30)
            report("closed", outcome(lambda: made.run(None, feed(0))))
        assert not [thread for thread in threading.enumerate()
                    if thread.name.startswith("ortgpu-pool") and thread.join(30) or thread.is_alive()
                    and thread.name.startswith("ortgpu-pool")]
    """)
    assert found["values"] == list(range(21))
    assert found["closed"]["type"] == "ExecutionError"


def test_everything_resolves_under_load() -> None:
    found = child("""
        made = open_pool(3)
        numbers = itertools.count()
        fails = C.Fail
        def sometimes():
            if next(numbers) % 7 == 0:
                raise MEMORY[0](MEMORY[1])
        for session in made.sessions:
            Watched(session, sometimes)
        ended = []
        def ask(start):
            for n in range(start, start + 100):
                future = made.submit(None, feed(n))
                if n % 5 == 0:
                    future.cancel()
                try:
                    ended.append("right" if value_of(future.result(30)) == n else "wrong")
                except (CancelledError, GPUError) as error:
                    ended.append(type(error).__name__)
        threads = [threading.Thread(target=ask, args=(100 * n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        report("ended", ended)
        report("idle", [worker.busy for worker in made._serving])
        made.close()
        report("left", pool_threads())
    """)
    assert len(found["ended"]) == 800
    assert set(found["ended"]) <= {"right", "CancelledError", "GPUOutOfMemoryError"}
    assert found["idle"] == [0, 0, 0]
    assert found["left"] == []


# map


def test_map_takes_no_more_feeds_than_allowed() -> None:
    found = child("""
        with open_pool() as made:
            taken = []
            def feeds():
                for n in range(50):
                    taken.append(n)
                    yield feed(n)
            ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds(), in_flight=4))]
            report("ahead", ahead)
            taken.clear()
            ahead = [len(taken) - n - 1 for n, _ in enumerate(made.map(feeds()))]
            report("ahead by itself", max(ahead))
            taken.clear()
            made.map(feeds())
            report("not asked", taken)
            report("empty", list(made.map([])))
            report("named", [outputs[0].shape for outputs in made.map([feed(1)], output_names=["y"])])
            report("bad", [outcome(lambda: made.map([], in_flight=0)), outcome(lambda: made.map([], in_flight="many"))])
    """)
    assert found["ahead"] == [3] * 47 + [2, 1, 0]
    assert found["ahead by itself"] == 11
    assert found["not asked"] == []
    assert found["empty"] == []
    assert found["named"] == [[4]]
    assert [each["type"] for each in found["bad"]] == ["ValueError", "TypeError"]


def test_map_raises_at_the_place() -> None:
    found = child("""
        with open_pool() as made:
            def feeds(wrong):
                for n in range(30):
                    if n == 5:
                        yield wrong()
                    yield feed(n)
            def collect(wrong):
                seen = []
                done = outcome(lambda: seen.extend(value_of(outputs) for outputs in made.map(feeds(wrong))))
                return [seen, done["type"], len(made._waiting), [worker.busy for worker in made._serving]]
            report("request", collect(lambda: {"x": np.ones(5, np.float32)}))
            report("feeds", collect(lambda: 1 // 0))
            report("after", value_of(made.run(None, feed(1))))
    """)
    assert found["request"] == [[0, 1, 2, 3, 4], "InvalidArgument", 0, [0, 0]]
    assert found["feeds"] == [[0, 1, 2, 3, 4], "ZeroDivisionError", 0, [0, 0]]
    assert found["after"] == 1


def test_map_that_is_left_early_leaves_nothing_running() -> None:
    found = child("""
        with open_pool(1) as made:
            watched = Watched(made.sessions[0])
            results = made.map((feed(n) for n in itertools.count()), in_flight=5)
            report("first", value_of(next(results)))
            results.close()
            report("left", [len(made._waiting), made._serving[0].busy, watched.calls <= 5])
            report("after", value_of(made.run(None, feed(1))))
    """)
    assert found["first"] == 0
    assert found["left"] == [0, 0, True]
    assert found["after"] == 1


# Its end


def test_close_waits_for_what_runs_and_refuses_what_waits() -> None:
    found = child("""
        made = open_pool(1)
        session = made.sessions[0]
        gate = Gate()
        Watched(session, gate)
        running = [made.submit(None, feed(n)) for n in range(3)]
        gate.wait_for(3)
        waiting = [made.submit(None, feed(n)) for n in range(3)]
        blocked = []
        threads = [threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1)))))
                   for _ in range(2)]
        threads.append(threading.Thread(target=made.close))
        for thread in threads: thread.start()
        report("waiting", [outcome(future.result) for future in waiting])  # before what runs is done
        gate.opened.set()
        for thread in threads: thread.join()
        report("running", [value_of(future.result()) for future in running])
        report("blocked", blocked)
        made.close()
        report("later", [outcome(lambda: made.submit(None, feed(1))), outcome(lambda: made.map([])),
                         outcome(lambda: session.run(None, feed(1)))])
        report("left", pool_threads())
    """)
    assert [each["type"] for each in found["waiting"]] == ["ExecutionError"] * 3
    assert found["running"] == [0, 1, 2]
    assert [each["type"] for each in found["blocked"]] == ["ExecutionError"] * 2
    assert [each["type"] for each in found["later"]] == ["ExecutionError"] * 3
    assert "this GPUSessionPool is closed" in found["later"][0]["text"]
    assert found["left"] == []


def test_a_pool_that_is_dropped_is_closed() -> None:
    found = child("""
        made = open_pool()
        made.run(None, feed(1))
        inner = [weakref.ref(session) for session in made.sessions]
        future = made.submit(None, feed(2))
        del made
        report("result", value_of(future.result()))
        while pool_threads() or any(each() for each in inner):
            gc.collect()
        report("done", True)
    """)
    assert found["result"] == 2
    assert found["done"] is True


@pytest.mark.parametrize("failure", ["ECC", "CUDNN", "STICKY"])
def test_a_pool_that_lost_a_gpu_and_is_dropped_is_closed(failure: str) -> None:
    found = child(f"""
        made = open_pool()
        Watched(made.sessions[0], raising(*{failure}))
        report("outcome", outcome(lambda: value_of(made.run(None, feed(2)))))
        report("lost", len(made.lost))
        del made
        while pool_threads():
            gc.collect()
    """)
    assert found["lost"] == (2 if failure == "STICKY" else 1)


def test_an_interrupt_at_any_line_leaves_no_thread_and_no_session() -> None:
    found = child("""
        import linecache
        from ortgpu import opening, pool_workers
        from ortgpu.environment.cuda import CudaState

        def no_gpu(*_):  # known beforehand: what takes long is finding out
            raise ortgpu.DriverNotFoundError("no driver")

        opening.open_verified, pool_workers.initialise = no_gpu, lambda: CudaState(None, None, None)

        def is_with(frame):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")

        def interrupted_at(number):
            # Raises KeyboardInterrupt at that line of the pool's two modules, of those that this thread runs. Not at
            # those with `with`: Python traces them once more before it leaves the block, where no signal comes.
            lines = itertools.count(1)
            def trace(frame, event, _argument):
                if not frame.f_code.co_filename.endswith(("ortgpu/pool.py", "ortgpu/pool_workers.py")):
                    return None
                if event == "line" and not is_with(frame) and next(lines) == number:
                    raise KeyboardInterrupt
                return trace
            sys.settrace(trace)
            try:
                with GPUSessionPool(RELU, range(2), allow_cpu=True) as pool:
                    pool.run(None, feed(1))
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(None)
            return False

        left, numbers = {}, itertools.count(1)
        while interrupted_at(number := next(numbers)):
            gc.collect()
            for thread in threading.enumerate():
                if thread.name.startswith("ortgpu-pool"):
                    thread.join(0.5 if left else 5)
            if pool_threads() or ortgpu.sessions():
                left[number] = [len(pool_threads()), len(ortgpu.sessions())]
        report("interrupts", number - 1)
        report("left", left)
    """)
    assert found["interrupts"] > 100
    assert found["left"] == {}


@pytest.mark.parametrize("busy", [False, True])
def test_a_program_ends_without_closing_it(busy: bool) -> None:
    found = child(f"""
        made = open_pool()
        futures = [made.submit(None, feed(n)) for n in range(6 if {busy} else 0)]
        report("came to the end", True)
    """)
    assert found["came to the end"] is True


def test_a_forked_child_is_refused_and_ends() -> None:
    found = child("""
        made = open_pool()
        made.run(None, feed(1))
        pid = os.getpid()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            report("child", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: made.map([feed(1)])),
                             outcome(made.close)])
            os._exit(0)  # as multiprocessing does: at exit plain ONNX Runtime waits for threads that are not there
        report("status", os.waitpid(child, 0)[1])
        report("parent", [value_of(made.run(None, feed(1))), pid])
        made.close()
    """)
    run, map_, close = found["child"]
    assert (run["type"], map_["type"]) == ("ForkedSessionError", "ForkedSessionError")
    assert run["details"]["creator_pid"] == found["parent"][1]
    assert "spawn" in run["text"]
    assert close == {"returned": None}
    assert found["status"] == 0
    assert found["parent"][0] == 1


def test_it_does_not_pickle() -> None:
    found = child("""
        with open_pool() as made:
            report("pickle", outcome(lambda: pickle.dumps(made)))
    """)
    assert found["pickle"]["type"] == "TypeError"
    assert "send a GPUSession" in found["pickle"]["text"]


# GPUs that are lost


@pytest.mark.parametrize("failure", ["ECC", "UNKNOWN", "CUDNN"])
def test_a_lost_gpu_is_taken_out_and_its_work_done_by_another(failure: str) -> None:
    found = child(f"""
        class Kept(logging.Handler):
            def emit(self, record): kept.append([record.levelname, record.getMessage()])
        kept = []
        logging.getLogger("ortgpu.pool").addHandler(Kept())
        made = open_pool(3, sessions_per_device=2)
        lost = [session for worker, session in zip(made._serving, made.sessions) if worker.place == 0]
        for session in lost:
            Watched(session, raising(*{failure}))
        report("values", [value_of(outputs) for outputs in made.map(feed(n) for n in range(50))])
        report("sizes", [len(made), len(made.devices), len(made.lost)])
        report("why", [str(made.lost[0].device), type(made.lost[0].error).__name__, made.lost[0].error.summary,
                       made.lost[0].error.__traceback__ is None])
        report("log", kept)
        report("session", [outcome(lambda: session.run(None, feed(1)))["type"] for session in lost])
        made.close()
        report("left", pool_threads())
    """)
    assert found["values"] == list(range(50))
    assert found["sizes"] == [4, 2, 1]
    assert found["why"][:2] == ["cuda:0", "ProviderFailureError"]
    assert found["why"][3] is True
    assert len(found["log"]) == 1
    level, text = found["log"][0]
    assert level == "WARNING"
    assert text == f"cuda:0 is out of the pool [provider-failure]: {found['why'][2]}"
    assert found["session"] == ["ProviderFailureError"] * 2
    assert found["left"] == []


def test_a_request_that_fails_on_two_gpus_takes_out_neither() -> None:
    found = child("""
        with open_pool(3) as made:
            watched = [Watched(session, raising(*CUDNN)) for session in made.sessions]
            report("raised", outcome(lambda: made.run(None, feed(1))))
            report("calls", sum(each.calls for each in watched))
            report("sizes", [len(made.devices), len(made.lost)])
    """)
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [3, 0]


def test_a_request_is_tried_again_once_only() -> None:
    found = child("""
        with open_pool(3) as made:
            watched = [Watched(session, raising(*ECC)) for session in made.sessions]
            report("raised", outcome(lambda: made.run(None, feed(1))))
            report("calls", sum(each.calls for each in watched))
            report("sizes", [len(made.devices), len(made.lost)])
            for each in watched:
                each.first = lambda: None
            report("after", value_of(made.run(None, feed(5))))
    """)
    assert found["raised"]["type"] == "ProviderFailureError"
    assert found["calls"] == 2
    assert found["sizes"] == [1, 2]
    assert found["after"] == 5


def test_without_another_gpu_the_error_is_raised_and_a_doubtful_one_takes_nothing_out() -> None:
    found = child("""
        with open_pool(1) as made:
            watched = Watched(made.sessions[0], raising(*CUDNN))
            report("doubtful", outcome(lambda: made.run(None, feed(1))))
            watched.first = lambda: None
            report("after", value_of(made.run(None, feed(5))))
    """)
    assert found["doubtful"]["type"] == "ProviderFailureError"
    assert found["after"] == 5


def test_failures_that_come_and_go_leave_one_gpu() -> None:
    found = child("""
        with open_pool(3) as made:
            ran = itertools.count()
            def now_and_then():
                if next(ran) % 3 == 2:
                    raise CUDNN[0](CUDNN[1])
            for session in made.sessions:
                Watched(session, now_and_then)
            ended = [outcome(lambda: value_of(made.run(None, feed(n)))) for n in range(30)]
            report("types", sorted({str(each.get("type")) for each in ended}))
            report("sizes", [len(made.devices), len(made.lost)])
    """)
    assert found["types"] == ["None", "ProviderFailureError"]
    assert found["sizes"] == [1, 2]


def test_when_none_is_left_everybody_is_told_the_causes() -> None:
    found = child("""
        made = open_pool()
        gates = [Gate(), Gate()]
        for session, gate, failure in zip(made.sessions, gates, [ECC, UNKNOWN]):
            def first(gate=gate, failure=failure):
                gate()
                raise failure[0](failure[1])
            Watched(session, first)
        running = [made.submit(None, feed(n)) for n in range(6)]
        for gate in gates:
            gate.wait_for(3)
        waiting = [made.submit(None, feed(n)) for n in range(6)]
        blocked = []
        thread = threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1)))))
        thread.start()
        for gate in gates:
            gate.opened.set()
        thread.join()
        report("running", [outcome(future.result)["type"] for future in running])
        report("waiting", [outcome(future.result) for future in waiting])
        report("blocked", blocked)
        report("later", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: list(made.map([feed(1)])))])
        report("sizes", [len(made), len(made.devices), len(made.lost)])
        made.close()
        report("left", pool_threads())
    """)
    assert set(found["running"]) == {"ProviderFailureError"}
    for told in (*found["waiting"], *found["blocked"], *found["later"]):
        assert told["type"] in ("ExecutionError", "ProviderFailureError"), told  # some waiting ones were begun
    assert {each["type"] for each in found["later"]} == {"ExecutionError"}
    assert found["later"][0]["others"] == ["ProviderFailureError"] * 2
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in found["later"][0]["text"]
    assert "CUDA_ERROR_UNKNOWN" in found["later"][0]["text"]
    assert found["sizes"] == [0, 0, 2]
    assert found["left"] == []


def test_a_sticky_error_ends_the_pool_as_it_ends_the_process() -> None:
    found = child("""
        made = open_pool(3)
        watched = [Watched(session) for session in made.sessions]
        watched[1].first = raising(*STICKY)
        futures = [made.submit(None, feed(n)) for n in range(3)]
        report("raised", outcome(futures[1].result))
        report("later", outcome(lambda: made.run(None, feed(1))))
        report("sizes", [len(made), len(made.lost)])
        report("session", outcome(lambda: ortgpu.GPUSession(RELU, allow_cpu=False)))
        made.close()
        report("left", pool_threads())
    """)
    assert found["raised"]["type"] == "PoisonedContextError"
    assert found["later"]["type"] == "PoisonedContextError"
    assert found["later"]["details"]["cuda_code"] == 700
    assert "restart this process" in found["later"]["text"]
    assert found["sizes"] == [0, 3]
    assert found["session"]["type"] == "PoisonedContextError"
    assert found["left"] == []


# Opening


def test_arguments_without_a_meaning_are_refused_before_anything_is_opened() -> None:
    found = child("""
        def attempt(*arguments, **options):
            return outcome(lambda: len(GPUSessionPool(RELU, *arguments, allow_cpu=True, **options)))
        report("refused", {
            "a word": attempt("cuda:1"),
            "a number": attempt(0),
            "None": attempt(None),
            "none at all": attempt([]),
            "twice": attempt([1, "cuda:1"]),
            "twice by UUID": attempt(["GPU-aa", "gpu-AA"]),
            "no device": attempt(["cpu"]),
            "negative": attempt([-1]),
            "float": attempt([1.0]),
            "device": attempt(device=0),
            "no sessions": attempt([0], 0),
            "half": attempt([0], 1.5),
            "cpu_nodes": attempt([0], cpu_nodes="maybe"),
            "unknown": attempt([0], providers=["NoSuchProvider"]),
            "graphs": attempt([0], cuda_graph=True),
            "misspelt": attempt([0], session_per_device=2),
            "misspelt, of a session": attempt([0], device_id=2),
        })
        report("numpy", attempt([np.int64(0), np.int64(1)], np.int64(2)))
        report("array", attempt(np.arange(2)))
        report("everything", attempt())
        report("left", [pool_threads(), len(ortgpu.sessions())])
    """)
    refused = {name: each["type"] for name, each in found["refused"].items()}
    assert refused == {
        "a word": "TypeError",
        "a number": "TypeError",
        "None": "TypeError",
        "none at all": "ProviderRequestError",
        "twice": "ProviderRequestError",
        "twice by UUID": "ProviderRequestError",
        "no device": "DeviceNotFoundError",
        "negative": "DeviceNotFoundError",
        "float": "TypeError",
        "device": "TypeError",
        "no sessions": "ValueError",
        "half": "TypeError",
        "cpu_nodes": "ValueError",
        "unknown": "ProviderRequestError",
        "graphs": "ProviderRequestError",
        "misspelt": "TypeError",
        "misspelt, of a session": "TypeError",
    }
    assert "as 1 and as 'cuda:1'" in found["refused"]["twice"]["text"]
    assert found["numpy"] == {"returned": 4}
    assert found["array"] == {"returned": 2}
    assert found["everything"] == {"returned": 1}
    assert found["left"] == [[], 0]


def test_without_a_gpu_the_cause_is_raised_once_and_nothing_is_left() -> None:
    found = child("""
        report("all", outcome(lambda: GPUSessionPool(RELU)))
        report("two", outcome(lambda: GPUSessionPool(RELU, [0, 1])))
        report("no model", outcome(lambda: GPUSessionPool("no/such/model.onnx", [0, 1], allow_cpu=True)))
        report("left", [pool_threads(), len(ortgpu.sessions()), threading.active_count()])
    """)
    assert found["all"]["type"] == found["two"]["type"]
    assert found["all"]["type"] in ("DriverNotFoundError", "NoDeviceError", "DriverUnusableError")
    assert found["no model"]["type"] == "NoSuchFile"
    assert found["left"] == [[], 0, 1]


def test_where_onnxruntime_cannot_be_imported_making_a_pool_raises_the_cause() -> None:
    environment = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    program = """
        import sys
        sys.modules["numpy"] = sys.modules["onnxruntime"] = None
        from benchmarks.common import report
        from ortgpu import GPUSessionPool, PackageError
        try:
            GPUSessionPool("model.onnx")
        except PackageError as error:
            report("raised", error.code)
    """
    done = run_child([sys.executable, "-c", textwrap.dedent(program)], env=environment, deadline=DEADLINE)
    assert "raised" in done.reports, done.explain()


def test_allow_cpu_warns_the_caller_of_each_session() -> None:
    found = child("""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with GPUSessionPool(RELU, [0, 1], allow_cpu=True) as made:
                report("devices", [str(device) for device in made.devices])
                report("created by", [record.created_by.partition(" ")[0] for record in ortgpu.sessions()])
        report("warned", [[type(each.message).__name__, each.filename] for each in caught])
    """)
    assert found["devices"] == ["cpu", "cpu"]
    assert found["warned"] == [["CPUExecutionWarning", "<string>"]] * 2
    assert len(set(found["created by"])) == 1


def test_a_session_that_cannot_be_opened_closes_the_others() -> None:
    found = child("""
        warned = []
        def show(message, *_):
            warned.append(message)
            if len(warned) == 3:
                raise message
        warnings.simplefilter("always")
        warnings.showwarning = show
        report("raised", outcome(lambda: GPUSessionPool(RELU, range(4), allow_cpu=True)))
        gc.collect()
        report("left", [pool_threads(), len(ortgpu.sessions()), len(warned)])
    """)
    assert found["raised"]["type"] == "CPUExecutionWarning"
    assert found["left"] == [[], 0, 3]


TWO = tuple(GPU(uuid=f"GPU-{n}0000000-0000-0000-0000-000000000000") for n in (1, 2))


def test_devices_are_those_that_the_driver_shows(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(devices=TWO), nvml=NVML(TWO))
    result = machine.run(
        """
from ortgpu.errors import GPUError
from ortgpu.pool_workers import _choose
def attempt(devices):
    try:
        return _choose(devices)
    except GPUError as error:
        return [type(error).__name__, error.summary]
asked = ["all", ["cuda:1", 0], ["GPU-2"], [2], [1, "GPU-2"], ["gpu-7"]]
report([attempt(devices) for devices in asked])
"""
    )
    everything, ordinals, by_uuid, unknown, twice, no_uuid = result.ok().json
    assert (everything, ordinals, by_uuid) == ([0, 1], [1, 0], [1])
    assert (unknown[0], no_uuid[0]) == ("DeviceNotFoundError", "DeviceNotFoundError")
    assert twice == ["ProviderRequestError", "devices names one GPU twice: as 1 and as 'GPU-2'"]


def test_a_pool_on_gpus_that_no_session_opens_on_raises_the_cause(lab: Lab) -> None:
    machine = lab.machine(cuda=Cuda(devices=TWO), nvml=NVML(TWO))
    machine.overlay.remove("nvidia/*/lib/libcurand.so.10")
    result = machine.run(
        f"""
import threading, ortgpu
try:
    ortgpu.GPUSessionPool({str(lab.models.relu)!r})
except ortgpu.GPUError as error:
    report([type(error).__name__, threading.active_count(), len(ortgpu.sessions())])
"""
    )
    assert result.ok().json == ["LibraryNotFoundError", 1, 0]


# What happens in threads when sessions open on GPUs: with a double of GPUSession, because none opens here


class Double:
    """Opens on each device but ``busy``; all but the first wait for one another."""

    opened: ClassVar[list[Double]]
    busy: ClassVar[int | None]
    together: ClassVar[threading.Barrier]

    def __init__(self, _model: object, *, device: int, **options: object) -> None:
        self.options, self.closed = options, False
        self.device = Device("cuda", device, f"GPU-{device}", "NVIDIA H200", (9, 0), 1 << 37, "580.65")
        if device > 0:
            self.together.wait(DEADLINE)
        if device == self.busy:
            raise DeviceBusyError(f"cuda:{device} is busy", uuid=self.device.uuid)
        registry.register(self)
        self.opened.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[Double]:
    Double.opened, Double.busy, Double.together = [], None, threading.Barrier(2)
    shown = tuple(CudaDevice(n, f"GPU-{n}", "NVIDIA H200", (9, 0), 1 << 37, 0) for n in range(3))
    monkeypatch.setattr(pool_workers, "initialise", lambda: CudaState(0, shown, 0))
    monkeypatch.setattr(pool_workers, "gpu_session_class", lambda: Double)
    return Double


def test_sessions_open_at_the_same_time_and_only_the_first_warns(double: type[Double]) -> None:
    with GPUSessionPool("model.onnx") as pool:
        assert [device.ordinal for device in pool.devices] == [0, 1, 2]
        other = {"allow_cpu": False, "cpu_nodes": "allow"}
        assert [session.options for session in pool.sessions] == [{}, other, other]
        assert len({registry._entries[id(session)].created_by for session in pool.sessions}) == 1
    assert all(session.closed for session in double.opened)
    with GPUSessionPool("model.onnx", cpu_nodes="forbid", allow_cpu=True) as pool:
        given = {"cpu_nodes": "forbid", "allow_cpu": True}
        assert [session.options for session in pool.sessions] == [given, *[{**given, "allow_cpu": False}] * 2]


def test_a_gpu_that_refuses_closes_the_sessions_of_the_others(double: type[Double]) -> None:
    double.busy = 1
    before = threading.active_count()
    with pytest.raises(DeviceBusyError, match="cuda:1 is busy"):
        GPUSessionPool("model.onnx")
    assert [session.device.ordinal for session in double.opened] == [0, 2]
    assert all(session.closed for session in double.opened)
    assert threading.active_count() == before


def test_a_system_out_of_threads_leaves_nothing_open(double: type[Double], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("ortgpu-pool"):
            if len(started) == 4:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        GPUSessionPool("model.onnx")
    assert len(double.opened) == 3
    assert all(session.closed for session in double.opened)
    assert not any(thread.is_alive() for thread in started)
