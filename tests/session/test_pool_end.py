"""How a GPUSessionPool ends: closed, dropped, interrupted, forked or left open, it leaves nothing behind."""

from __future__ import annotations

import pytest

from tests.support.pool_child import child

pytestmark = pytest.mark.lab


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


def test_a_callback_that_raises_anything_keeps_no_request_from_its_end() -> None:
    found = child("""
        made = open_pool(1)
        gate = Gate()
        Watched(made.sessions[0], gate)
        def ends(future):
            raise SystemExit
        running = [made.submit(None, feed(n)) for n in range(3)]
        gate.wait_for(3)
        waiting = [made.submit(None, feed(n)) for n in range(3)]
        for future in (*running, *waiting):
            future.add_done_callback(ends)
        closing = threading.Thread(target=made.close)
        closing.start()
        report("waiting", [outcome(lambda: future.result(10)) for future in waiting])
        gate.opened.set()
        report("running", [value_of(future.result(10)) for future in running])
        closing.join()
        report("left", pool_threads())
    """)
    assert [each["type"] for each in found["waiting"]] == ["ExecutionError"] * 3
    assert found["running"] == [0, 1, 2]
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
        from ortgpu.session import opening
        from ortgpu.session.pool import workers
        from ortgpu.environment.gpu.cuda import CudaState

        def no_gpu(*_):  # known beforehand: what takes long is finding out
            raise ortgpu.DriverNotFoundError("no driver")

        MODULES = "session/gpu_session_pool.py", "session/pool/workers.py", "session/pool/sessions.py"
        opening.open_on_gpu, workers.initialise = no_gpu, lambda: CudaState(None, None, None)

        def is_with(frame):
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")

        def interrupted_at(number):
            # Raises KeyboardInterrupt at that line of these modules, of those that this thread runs. Not at
            # those with `with`: Python traces them once more before it leaves the block, where no signal comes.
            lines = itertools.count(1)
            def trace(frame, event, _argument):
                if not frame.f_code.co_filename.endswith(MODULES):
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


def test_what_atexit_calls_after_the_pool_has_closed_itself() -> None:
    """Registered before the pool was opened, it is called after that, and waited for threads that were gone."""
    found = child("""
        import atexit
        def late():
            report("waiting", outcome(waiting.result))
            report("later", [outcome(lambda: made.run(None, feed(1))), outcome(lambda: made.map([feed(1)]))])
            made.close()
            report("left", pool_threads())
        atexit.register(late)
        made = open_pool(1)
        gate = Gate()
        Watched(made.sessions[0], gate)
        running = [made.submit(None, feed(n)) for n in range(3)]
        gate.wait_for(3)
        waiting = made.submit(None, feed(3))
        timer = threading.Timer(0.5, gate.opened.set)
        timer.daemon = True  # the program is at its end before
        timer.start()
    """)
    for each in (found["waiting"], *found["later"]):
        assert each["type"] == "ExecutionError"
        assert "this GPUSessionPool is closed" in each["text"]
    assert found["left"] == []
