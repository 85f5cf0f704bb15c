"""GPUSessionPool(isolate=True): real worker processes, on the CPU, that are killed for real."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ortgpu.errors import ExecutionError, WorkerLostError
from ortgpu.model.files import ModelSource
from ortgpu.session.pool import isolated
from tests.support.children import ROOT, child_environment, program_path, python_arguments, run_python
from tests.support.fork_server import run_forked
from tests.support.made_sessions import NEG

DEADLINE = 120
PROGRAMS = "session.pool_isolated"


def child(program: str, deadline: float = DEADLINE, fresh: bool = False) -> Any:
    """What a program reported. ``fresh``: it is about imports or forks; see tests/support/fork_server.py."""
    run = run_python if fresh else run_forked
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    return run(program, behind=f"pools {PROGRAMS}", env=env, deadline=deadline).ok().reports


# Results


def test_results_are_those_of_a_session_and_the_caller_needs_no_onnxruntime() -> None:
    found = child(
        "session.pool_isolated.results_are_those_of_a_session_and_the_caller_needs_no_onnxruntime", fresh=True
    )
    assert found["sizes"] == [4, 0, 2, 0, 0]
    assert (found["run"], found["named"]) == (3, 4)
    assert found["futures"] == list(range(20))
    assert (found["map"], found["list"]) == (list(range(200)), list(range(9)))
    assert found["imported"] is False
    assert found["pids"] == 4
    assert found["left"] == []


TYPES = ("float", "double", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def test_arrays_of_all_types_and_forms_arrive_as_they_are() -> None:
    found = child(f"""
        types = {TYPES!r}
        inputs = ", ".join(f"{{kind}}[n] a_{{kind}}" for kind in types)
        outputs = ", ".join(f"{{kind}}[n] b_{{kind}}" for kind in types)
        model = model_of(f"same ({{inputs}}) => ({{outputs}}) {{{{ "
                         + " ".join(f"b_{{kind}} = Identity(a_{{kind}})" for kind in types) + " }}")
        from ortgpu.model.tensor_types import DTYPES
        whole = np.arange(3 * 5 * 7).reshape(3, 5, 7)
        forms = {{
            "plain": whole, "empty": whole[:0], "no columns": whole[:, :, 3:3], "a number": whole[1, 2, 3],
            "transposed": whole.transpose(2, 0, 1), "with gaps": whole[::2, :, 1::3], "backwards": whole[::-1],
            "large": np.arange(3 << 18).reshape(3, -1),
        }}
        different = []
        with isolated_pool(1, of_any_rank(model)) as made:
            for name, form in forms.items():
                given = {{f"a_{{kind}}": np.asarray(form).astype(DTYPES[f"tensor({{kind}})"], order="K")
                         for kind in types}}
                for kind, result in zip(types, made.run(None, given), strict=True):
                    right = given[f"a_{{kind}}"]
                    if result.dtype != right.dtype or result.shape != right.shape or not (result == right).all():
                        different.append([name, kind, str(result.dtype), result.shape])
                    assert result.flags.writeable and result.flags.owndata or result.base is not None
        report("different", different)
    """)
    assert found["different"] == []


def test_a_python_that_was_built_without_memfd_create_has_isolated_pools_too() -> None:
    """As those of conda and of uv, which are built for an older glibc."""
    found = child("session.pool_isolated.a_python_that_was_built_without_memfd_create_has_isolated_pools_too")
    assert found["map"] == found["again"] == list(range(50))
    assert (found["inherited"], found["left"]) == (False, 0)
    assert found["too many"]["type"] == "OSError"
    assert "Too many open files" in found["too many"]["text"]


def test_results_and_feeds_are_the_callers_own() -> None:
    """A result does not change when its worker's memory is used again, nor a feed that was submitted."""
    found = child("session.pool_isolated.results_and_feeds_are_the_callers_own")
    assert found["4"] == found[str(3 << 20)] == [[n, n] for n in range(8)]


def test_what_cannot_go_to_another_process_is_refused_with_the_reason() -> None:
    found = child("session.pool_isolated.what_cannot_go_to_another_process_is_refused_with_the_reason")
    for name in ("text", "objects", "list", "number", "none", "map", "on a GPU", "OrtValue"):
        for told in found[name]:
            assert told["type"] == "ProviderRequestError", found[name]
            assert "input 'x' is" in told["text"]
    assert found["in map"]["type"] == "ProviderRequestError"
    assert found["on the CPU"] == {"returned": 7.0}
    assert found["no feed"]["type"] == "TypeError"
    assert found["wrong name"]["type"] in ("ValueError", "InvalidArgument")
    assert found["wrong output"]["type"] in ("InvalidArgument", "ValueError")
    assert "returned" not in found["word"]
    assert found["wrong type"]["type"] == found["wrong shape"]["type"] == "InvalidArgument"
    assert found["after"] == [7, 0]
    assert found["list out"]["type"] == "ProviderRequestError"
    assert found["other output"] == {"returned": 1.0}


def test_what_no_pool_with_processes_can_do_is_refused_before_it_opens() -> None:
    found = child("session.pool_isolated.what_no_pool_with_processes_can_do_is_refused_before_it_opens")
    refused = {name: each["type"] for name, each in found["refused"].items()}
    assert refused == {
        "a word": "TypeError",
        "none at all": "ProviderRequestError",
        "twice": "ProviderRequestError",
        "no sessions": "ValueError",
        "graphs": "ProviderRequestError",
        "misspelt": "TypeError",
        "no pickle": "TypeError",
        "deadline": "ValueError",
        "endless": "ValueError",
        "cpu_nodes": "ValueError",
        "no GPU": refused["no GPU"],
    }
    assert refused["no GPU"] in ("DriverNotFoundError", "NoDeviceError", "DriverUnusableError")
    assert "providers of a GPUSessionPool with isolate=True must pickle" in found["refused"]["no pickle"]["text"]
    assert found["no model"]["type"] == "NoSuchFile"
    assert found["no isolation"]["type"] == "ValueError"
    assert "works on Linux only, and this is darwin" in found["macOS"]["text"]
    assert found["left"] == found["everywhere"]


def test_a_path_options_and_warnings_arrive() -> None:
    found = child("session.pool_isolated.a_path_options_and_warnings_arrive")
    assert (found["run"], found["again"]) == (3, list(range(9)))
    assert found["warned"] == [["CPUExecutionWarning", program_path(PROGRAMS)]] * 2


def test_what_workers_log_is_logged_by_the_callers_handlers() -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    ended = run_python(f"{PROGRAMS}.what_workers_log", env=env, deadline=DEADLINE).ok()
    assert ended.reports["opened"] == [2, 3]
    assert ended.reports["kinds"] == [["ortgpu", "WARNING"], ["ortgpu.pool", "WARNING"]]
    assert ended.stderr == ""


def test_requests_are_joined_for_worker_processes_too() -> None:
    found = child("session.pool_isolated.requests_are_joined_for_worker_processes_too")
    assert found["wrong"] == "InvalidArgument"
    assert found["imported"] is False
    assert found["results"] == [[1 + n % 3, 4, n] for n in range(60)]


def test_requests_that_were_joined_with_a_deadly_one_end_no_further_worker() -> None:
    """Which of them it was is not known: run again apart, it would end two more."""
    found = child("session.pool_isolated.requests_that_were_joined_with_a_deadly_one_end_no_further_worker")
    assert [each["type"] for each in found["joined"]] == ["WorkerLostError"] * 4
    assert found["again"] == [0, 1, 2]
    assert found["restarts"] == 2


# Deaths


def test_a_worker_that_is_killed_while_idle_is_replaced() -> None:
    found = child("session.pool_isolated.a_worker_that_is_killed_while_idle_is_replaced")
    assert found["noticed"] < 1
    assert found["meanwhile"] == list(range(5))
    assert found["health"] == [["ready", 1, 0], ["ready", 0, 0]]
    assert found["error"] == ["WorkerLostError", "SIGKILL", None]
    assert found["new"] == [True, True]
    assert found["after"] == list(range(50))
    assert found["lost"] == 0


def test_a_request_that_was_running_runs_once_more() -> None:
    found = child("session.pool_isolated.a_request_that_was_running_runs_once_more")
    assert found["value"] == 5
    assert found["restarts"] == [0, 1]


def test_a_request_that_kills_two_workers_fails_and_the_others_do_not() -> None:
    found = child("session.pool_isolated.a_request_that_kills_two_workers_fails_and_the_others_do_not")
    causes = {name: found[name]["details"]["cause"] for name in ("killed", "crashed", "ended", "poisoned")}
    assert causes == {
        "killed": "SIGKILL",
        "crashed": "SIGSEGV",
        "ended": "exit status 3",
        "poisoned": "PoisonedContextError: an illegal memory access was encountered",
    }
    for name in causes:
        assert found[name]["type"] == "WorkerLostError"
        assert "two worker processes were lost while they ran this request" in found[name]["text"]
        assert found[name]["others"] == ["WorkerLostError"]
        assert found[name]["details"]["device"] == "cpu"
    assert found["after"] == list(range(20))
    assert found["restarts"] == 8
    assert found["lost"] == 0


def test_a_failure_of_one_worker_that_another_does_not_have_replaces_it() -> None:
    """As a GPU of a pool without isolation is taken out. Where both fail, the request is at fault."""
    found = child("session.pool_isolated.a_failure_of_one_worker_that_another_does_not_have_replaces_it")
    assert found["both"]["type"] == "ProviderFailureError"
    assert found["restarts"] == 0
    assert found["one"] == {"returned": 6}
    assert found["why"] == "a run failed there and succeeded elsewhere: cuDNN failed"


def test_a_worker_that_takes_longer_than_the_deadline_is_replaced() -> None:
    found = child("session.pool_isolated.a_worker_that_takes_longer_than_the_deadline_is_replaced")
    assert found["stopped"] == 5
    assert 0.5 <= found["seconds"] < 30
    assert found["why"] == "its deadline of 0.5 s has passed"  # of a shape that warm() made plans for
    assert found["hangs"]["type"] == "WorkerLostError"
    assert found["hangs"]["details"]["cause"] == "its deadline of 2 s has passed"  # of a first run
    assert found["after"] == 7


def test_a_process_that_cannot_be_killed_is_left_and_replaced() -> None:
    """As one that is stuck in the driver."""
    found = child("session.pool_isolated.a_process_that_cannot_be_killed_is_left_and_replaced")
    assert found["value"] == {"returned": 5}
    assert found["replaced"] == [True, 1, "its deadline of 0.5 s has passed", True]
    assert found["left"] == []


def test_a_process_that_lets_go_of_its_channel_and_does_not_end_is_replaced() -> None:
    """As one whose GPU takes long to be freed. Requests must not go to it meanwhile, nor wait for it."""
    found = child("session.pool_isolated.a_process_that_lets_go_of_its_channel_and_does_not_end_is_replaced")
    assert [each["returned"] for each in found["others"]] == list(range(6))
    assert found["future"]["details"]["cause"] in ("it does not answer", "exit status 0")
    assert found["left"] is False


def test_an_error_of_a_run_or_an_opening_is_no_death() -> None:
    """Also a TimeoutError, as of a disk on the network, or an EOFError."""
    found = child("session.pool_isolated.an_error_of_a_run_or_an_opening_is_no_death")
    for name in ("with a deadline", "without"):
        assert found[name] == [["TimeoutError", "EOFError", "BrokenPipeError"], 4, 0]
    for name in ("TimeoutError", "EOFError", "ConnectionResetError"):
        assert (found[name]["type"], found[name]["text"]) == (name, "the disk is gone")


@pytest.mark.slow
def test_deaths_before_a_first_result_are_delayed_and_others_are_not() -> None:
    found = child("session.pool_isolated.deaths_before_a_first_result_are_delayed_and_others_are_not")
    first, second, third, after_a_result = found["delays"]
    assert 1.5 <= first < 2.9
    assert 3.0 <= second < 4.4
    assert 3.0 <= third < 4.4
    assert after_a_result < 1.4
    assert found["restarts"] == 4


def test_a_worker_that_cannot_be_replaced_is_given_up_and_all_are_told() -> None:
    found = child("session.pool_isolated.a_worker_that_cannot_be_replaced_is_given_up_and_all_are_told")
    assert found["one"] == [1, 1, 1, 2]
    assert found["error"][0] == "ExecutionError"
    assert "model.onnx has changed since the pool was opened" in found["error"][1]
    assert {each["type"] for each in found["waiting"]} == {"ExecutionError"}
    assert found["later"]["type"] == "ExecutionError"
    assert "no GPU of this GPUSessionPool is left" in found["later"]["text"]
    assert "has changed since" in found["later"]["text"]
    assert found["states"] == ["lost", "lost"]
    assert found["left"] == []


def test_a_worker_that_dies_while_it_opens_is_an_error_of_the_constructor() -> None:
    found = child("session.pool_isolated.a_worker_that_dies_while_it_opens_is_an_error_of_the_constructor")
    assert (found["crash"]["type"], found["crash"]["details"]["cause"]) == ("WorkerLostError", "SIGABRT")
    assert found["hang"]["details"]["cause"] == "it had no session after 0.5 s"
    assert found["no interpreter"]["type"] == "ExecutionError"
    assert found["left"] == []


MANY = pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.mark.parametrize("deaths", [4, MANY], ids=["few", "many"])
def test_descriptors_threads_and_memory_do_not_grow_with_deaths(deaths: int) -> None:
    found = child(
        f"""
        isolated._BACK_OFF = (0.01, 0.02)  # one of the two may have no request between two deaths
        made = isolated_pool(2)
        def die():
            for each in made.health():
                kill(each.pid)
            for n in range(8):
                assert value_of(made.run(None, feed(n))) == n
            ready(made)
        die()
        before = [descriptors(), len(threads()), shared_bytes()]
        for _ in range({deaths} // 2):
            die()
        gc.collect()
        report("grew", [before, [descriptors(), len(threads()), shared_bytes()]])
        made.close()
        report("left", [threads(), shared_bytes()])
    """,
        deadline=60 + 4 * deaths,
    )
    before, after = found["grew"]
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] <= before[2] + (8 << 16)  # not every channel was used before
    assert found["left"] == [[], 0]


# Room


def test_without_room_a_request_fails_and_the_pool_goes_on() -> None:
    found = child("session.pool_isolated.without_room_a_request_fails_and_the_pool_goes_on")
    for name in ("feed", "result"):
        assert found[name]["type"] == "ExecutionError", found
        assert "has no space for the arrays of this request" in found[name]["text"]
        assert "File too large" in found[name]["text"]
    assert found["next"] == 2
    assert found["small"] == [8]
    assert found["large"] == [[1 << 20], [3 << 20]]
    assert found["same"] == [True]


def test_without_descriptors_requests_go_on_and_no_pool_opens() -> None:
    found = child("session.pool_isolated.without_descriptors_requests_go_on_and_no_pool_opens")
    assert found["here"] == found["there"] == [{"returned": 2}] * 3
    assert found["opening"] == ["ExecutionError"] * 3
    assert found["left"] == [0, []]


def launch(model: ModelSource) -> isolated.Launch:
    return isolated.Launch(model, object, 1, (None, None), isolated.ProcessFeeds(0))


@pytest.mark.parametrize("model", ["a path", "bytes"])
def test_an_interrupt_while_the_model_is_kept_leaves_no_descriptor(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model as bytes is kept in memory of its size."""
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(isolated, "stamp_of", interrupt)
        patched.setattr(isolated, "open", interrupt, raising=False)
        with pytest.raises(KeyboardInterrupt):
            launch(str(path) if model == "a path" else NEG)
    assert os.listdir("/proc/self/fd") == before


def test_a_model_that_no_descriptor_is_left_for_is_not_served_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a new process would serve whatever its path leads to by then."""
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(ExecutionError, match="cannot be started") as caught:
            launch(str(path))
    assert "ulimit -n" in caught.value.fixes[0]


@pytest.mark.parametrize("path", ["missing.onnx", "model.onnx/model.onnx", "no\0name"])
def test_a_path_without_a_file_is_left_to_the_session(path: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(NEG)
    assert launch(str(tmp_path / path)).descriptors == []


def test_a_feed_larger_than_most_leaves_no_memory_behind() -> None:
    found = child("session.pool_isolated.a_feed_larger_than_most_leaves_no_memory_behind")
    assert found["right"] is True
    assert max(found["kept"]) <= 1 << 20


def test_the_request_after_a_large_one_that_failed_succeeds() -> None:
    """The worker frees memory of more than 512 MiB. The parent took it for usable after an error."""
    found = child("session.pool_isolated.the_request_after_a_large_one_that_failed_succeeds")
    assert found["json"] == ["InvalidArgument", [0, 1, 2, 3]]


def test_large_arrays_travel_in_huge_pages_where_the_system_has_some() -> None:
    found = child("session.pool_isolated.large_arrays_travel_in_huge_pages_where_the_system_has_some")
    assert found["right"] == [True] * 7
    pages, can = found["pages"]
    if not can:
        pytest.skip("this system puts no file in memory into huge pages")
    assert pages >= 2 * (9 << 22 >> 21)  # in both directions


def test_large_arrays_are_copied_in_threads_and_the_program_may_fork() -> None:
    found = child("session.pool_isolated.large_arrays_are_copied_in_threads_and_the_program_may_fork", fresh=True)
    assert found["right"] == [True] * 3
    assert found["gaps"] is True
    assert found["threads"] == 2  # beside the calling one
    assert found["futures"] == [True] * 12
    assert found["refilled"] == [[n] for n in range(12)]
    assert found["forked"] == 3
    assert found["after"] is True


# Requests that wait, interrupts, drain


def test_cancelled_requests_leave_no_trace_and_interrupts_end_nothing() -> None:
    found = child("session.pool_isolated.cancelled_requests_leave_no_trace_and_interrupts_end_nothing")
    assert found["cancelled"] == [False, *[True] * (len(found["cancelled"]) - 1)]
    assert found["interrupted"] == "KeyboardInterrupt"
    assert found["values"] == list(range(len(found["values"])))
    assert found["after"] == list(range(30))
    assert found["same"] == [True, 0, 0]


@pytest.mark.parametrize("isolate", [True, False])
def test_drain_waits_for_what_was_asked_and_refuses_the_rest(isolate: bool) -> None:
    found = child(f"""
        made = GPUSessionPool(RELU, [0], isolate={isolate}, allow_cpu=True)
        made.run(None, feed(1))
        if {isolate}:
            pid = made.health()[0].pid
            hold, let_go = (lambda: stop(pid)), (lambda: os.kill(pid, signal.SIGCONT))
        else:
            gate = Gate()
            gate.opened.set()
            Watched(made.sessions[0], gate)
            hold, let_go = gate.opened.clear, gate.opened.set
        hold()
        asked = [made.submit(None, feed(n)) for n in range(2 * made._service.most)]
        blocked = []
        thread = threading.Thread(target=lambda: blocked.append(outcome(lambda: made.run(None, feed(1)))))
        thread.start()
        until(lambda: made.queued == made._service.most)
        report("busy", [made.health()[0].in_flight, made.queued, made._service.most])
        report("late", outcome(lambda: made.drain(0.3)))
        thread.join(10)
        report("refused", [*blocked, outcome(lambda: made.submit(None, feed(1))), outcome(lambda: made.map([]))])
        let_go()
        made.drain(30)
        report("done", [future.done() for future in asked])
        report("values", [value_of(future.result()) for future in asked])
        report("state", [each.state for each in made.health()])
        made.close()
        report("closed", [[each.state for each in made.health()], outcome(lambda: made.run(None, feed(1)))["text"]])
        report("left", threads())
    """)
    running, queued, limit = found["busy"]
    assert running == queued == limit
    assert found["late"]["type"] == "TimeoutError"
    assert f"{limit} requests still run and {limit} wait" in found["late"]["text"]
    for told in found["refused"]:
        assert told["type"] == "ExecutionError"
        assert "drain() was called" in told["text"]
    assert all(found["done"])
    assert found["values"] == list(range(2 * limit))
    assert found["state"] == ["ready"]
    assert found["closed"][0] == ["closed"]
    assert "is closed" in found["closed"][1]
    assert found["left"] == []


def test_health_of_a_pool_without_isolation() -> None:
    found = child("session.pool_isolated.health_of_a_pool_without_isolation")
    assert found["before"] == [["ready", True, 0, 0]] * 2
    assert [each["returned"] for each in found["run"]] == [2] * 4
    (state, error), other = found["after"]
    assert state == "lost"
    assert "ECC" in error
    assert other == ["ready", "None"]


# The end


def test_close_waits_for_what_runs_and_leaves_nothing() -> None:
    found = child("session.pool_isolated.close_waits_for_what_runs_and_leaves_nothing")
    assert {each["type"] for each in found["waiting"]} == {"ExecutionError"}
    assert found["running"] == list(range(len(found["running"])))
    assert found["left"] == [[False, False], [], 0, 0]
    assert "this GPUSessionPool is closed" in found["later"]["text"]


def test_a_stopped_worker_and_one_that_is_being_replaced_do_not_keep_close_waiting() -> None:
    found = child("session.pool_isolated.a_stopped_worker_and_one_that_is_being_replaced_do_not_keep_close_waiting")
    assert found["seconds"] < 20
    assert found["left"] == [False, []]


def test_a_pool_that_is_dropped_is_closed() -> None:
    found = child("session.pool_isolated.a_pool_that_is_dropped_is_closed")
    assert found == {}


def test_a_request_whose_worker_dies_during_close_is_answered() -> None:
    found = child("session.pool_isolated.a_request_whose_worker_dies_during_close_is_answered")
    assert "is closed" in found["future"]["text"]


def test_a_worker_that_ends_has_no_plans_to_make() -> None:
    """Its successor makes them later. The exception for a request that can run elsewhere reached the caller."""
    found = child("session.pool_isolated.a_worker_that_ends_has_no_plans_to_make")
    assert "returned" in found["replacing"]
    assert "is closed" in found["closed"]["text"]


def test_a_pool_that_is_dropped_while_requests_wait_for_a_worker_answers_them() -> None:
    found = child("session.pool_isolated.a_pool_that_is_dropped_while_requests_wait_for_a_worker_answers_them")
    assert "is closed" in found["future"]["text"]


@pytest.mark.parametrize("end", ["exit", "exception", "kill", "forked child", "spawned child"])
def test_workers_end_with_their_parent(end: str, tmp_path: Path) -> None:
    """However it ends: also killed, and with a child of it that has copies of all its descriptors."""
    program = python_arguments(f"{PROGRAMS}.workers_end_with_their_parent")
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    with subprocess.Popen(
        [sys.executable, *program, str(tmp_path / "pids"), end],
        env=env,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        process.wait(DEADLINE)
        pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(map(_lives, pids)):
            time.sleep(0.02)
        left = [pid for pid in pids if _lives(pid)]
        for group in (process.pid, *left):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        assert left == []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    found = child("session.pool_isolated.a_forked_child_is_told_and_the_parent_goes_on", fresh=True)
    for name in ("run", "submit", "map", "health", "drain"):
        assert found[name]["type"] == "ForkedSessionError", name
    assert found["close"] == {"returned": None}
    assert found["facts"] == [0, 1, 1, 0]
    assert found["status"] == 7
    assert found["after"] == [0, 1, 2]
    assert found["restarts"] == 0


def test_everything_resolves_while_workers_are_killed() -> None:
    """No result is wrong and none is lost: each request ends in its result or its typed error."""
    found = child("session.pool_isolated.everything_resolves_while_workers_are_killed")
    assert len(found["ended"]) == 300
    assert set(found["ended"]) <= {"right", "CancelledError", "WorkerLostError"}
    assert found["ended"].count("right") > 200
    assert found["restarts"] > 3
    assert found["left"] == []


def test_the_error_pickles() -> None:
    import pickle

    error = WorkerLostError("two died", worker=1, device="cuda:0", cause="SIGKILL")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.worker, copy.device, copy.cause) == (1, "cuda:0", "SIGKILL")
