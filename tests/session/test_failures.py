"""What becomes of an exception of a run: a typed error, a second run within the budget, or the exception as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

from ortgpu.errors import (
    ForkedSessionError,
    GPUOutOfMemoryError,
    LibraryNotFoundError,
    PoisonedContextError,
    ProviderFailureError,
    ProviderOptionError,
)
from ortgpu.provider import lifetime
from ortgpu.provider.devices import CPU
from ortgpu.running.memory import Holdings
from ortgpu.session import failures
from tests.support.made_sessions import L4, made_session

WHERE = " ; GPU=1 ; hostname=vm ; file=x.cc ; line=91 ; expr=cudaMemcpyAsync(...); "
STICKY = f"[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered{WHERE}"
ECC = f"[ONNXRuntimeError] : 1 : FAIL : CUDA failure 214: uncorrectable ECC error encountered{WHERE}"
MEMORY = "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 9437184"
IN_CONV = f"Non-zero status code returned while running Conv node. Name:'c' Status Message: {MEMORY}"
IN_RELU = f"Non-zero status code returned while running Relu node. Name:'c' Status Message: {MEMORY}"


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the driver says: whether the GPU works, and which process initialised it."""
    answers: dict[str, Any] = {"works": False, "pid": os.getpid()}
    monkeypatch.setattr(lifetime, "gpu_works", lambda ordinal: answers["works"])
    monkeypatch.setattr(failures, "initialised_in", lambda: answers["pid"])
    monkeypatch.setattr(lifetime, "_poison", None)
    before = dict(lifetime.table)
    lifetime.table.clear()
    yield answers
    lifetime.table.clear()
    lifetime.table.update(before)


def raised(cause: BaseException) -> Any:
    """Return an exception with a traceback, as a run leaves it."""
    try:
        raise cause
    except BaseException as error:  # noqa: BLE001 - it is what the test is about
        return error


def explained(text: str, session: Any = None, kind: Any = native.Fail) -> Any:
    return failures.explained(session or made_session(), raised(kind(text)))


def test_a_failure_of_the_gpu_has_its_type_and_its_cause() -> None:
    cause = raised(native.Fail(ECC))
    error = failures.explained(made_session(), cause)
    assert isinstance(error, ProviderFailureError)
    assert error.__cause__ is cause
    assert error.__traceback__ is None


@pytest.mark.parametrize("kind", [native.Fail, RuntimeError])
def test_a_sticky_error_is_noted_and_ends_each_session(kind: Any) -> None:
    session, other = made_session(), made_session()
    assert isinstance(explained(STICKY, session, kind), PoisonedContextError)
    assert isinstance(lifetime.error_of(other), PoisonedContextError)


def test_words_of_a_sticky_error_on_a_gpu_that_works_are_a_name(driver: dict[str, Any]) -> None:
    driver["works"] = True
    session, cause = made_session(), raised(native.Fail(STICKY))
    assert failures.explained(session, cause) is cause
    assert lifetime.error_of(session) is None


@pytest.mark.parametrize("text", ["Got invalid dimensions for input: x", "the input is wrong"])
def test_what_is_not_about_the_gpu_stays_as_it_is(text: str) -> None:
    cause = raised(native.InvalidArgument(text))
    assert failures.explained(made_session(), cause) is cause


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError])
def test_what_the_callers_own_objects_raise_is_theirs(kind: type[Exception]) -> None:
    cause = raised(kind(STICKY))
    assert failures.explained(made_session(), cause) is cause


def test_on_the_cpu_words_of_memory_are_about_the_host() -> None:
    cause = raised(native.Fail(MEMORY))
    assert failures.explained(made_session(device=CPU), cause) is cause


def test_a_session_that_was_closed_meanwhile_says_so() -> None:
    session = made_session()
    session.close()
    assert "closed" in str(explained("NoneType has no attribute run", session, RuntimeError))


def test_a_server_that_forked_unseen_is_told_of_the_fork(driver: dict[str, Any]) -> None:
    driver["pid"] = os.getpid() + 1
    session = made_session()
    assert isinstance(explained("CUDA failure 3: initialization error", session), ForkedSessionError)
    assert isinstance(lifetime.error_of(session), ForkedSessionError)
    assert not isinstance(explained("anything", made_session(device=CPU)), ForkedSessionError)


def with_options(**chosen: str) -> Any:
    session = made_session()
    session._verified.options_chosen.update({name: (value, "why") for name, value in chosen.items()})
    return session


def test_a_handle_that_was_left_out_is_not_a_missing_library() -> None:
    text = "cuDNN handle is required"
    assert isinstance(explained(text), LibraryNotFoundError)
    assert isinstance(explained(text, with_options(enable_cudnn="0")), ProviderOptionError)


def test_a_layout_of_a_record_can_be_done_without() -> None:
    assert any("tuned=False" in str(fix) for fix in explained(ECC, with_options(prefer_nhwc="1")).fixes)
    assert not any("tuned=False" in str(fix) for fix in explained(ECC).fixes)


@pytest.mark.parametrize(("text", "is_outdated"), [(IN_CONV, True), (IN_RELU, False), (MEMORY, False)])
def test_a_convolution_without_memory_has_the_session_opened_again(text: str, is_outdated: bool) -> None:
    """Its next run would use the plan of another shape, and return wrong results."""
    session = made_session()
    error = failures.explained_run(session, raised(native.Fail(text)))
    assert isinstance(error, GPUOutOfMemoryError)
    assert error.requested == 9437184
    assert (session._gpu_context is lifetime.OUTDATED) is is_outdated


def test_a_failure_that_a_callback_is_told_of_counts_as_well() -> None:
    session, other = made_session(), made_session()
    failures.note_text(session, IN_CONV)
    assert session._gpu_context is lifetime.OUTDATED
    failures.note_text(session, STICKY)
    assert isinstance(lifetime.error_of(other), PoisonedContextError)


class Budget:
    """A session with a budget, a holder of memory, and a log of what happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget: int | None = 4 << 30, room: int = 0) -> None:
        self.session = made_session(device=L4)
        self.session._holdings = Holdings(budget, None, room)
        self.log: list[str] = []
        monkeypatch.setattr(failures, "give_back", lambda session: self.log.append("give back"))
        monkeypatch.setattr(type(self.session), "_gpu_reopen", lambda session: self.log.append("open again"))

    def call(self, *outcomes: Any, **named: Any) -> Any:
        left = list(outcomes)

        def run() -> Any:
            self.log.append("run")
            outcome = left.pop(0)
            if isinstance(outcome, str):
                raise native.Fail(outcome)
            return outcome

        try:
            return run()
        except native.Fail as error:
            return failures.call_again(self.session, error, run, **named)


def test_a_run_without_memory_is_made_again_once_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Budget(monkeypatch)
    assert made.call(MEMORY, [1]) == [1]
    assert made.log == ["run", "give back", "run"]


def test_a_second_run_without_memory_names_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Budget(monkeypatch)
    with pytest.raises(GPUOutOfMemoryError, match="budget of 4,096 MiB"):
        made.call(MEMORY, MEMORY)
    assert made.log == ["run", "give back", "run", "give back"]


@pytest.mark.parametrize(("budget", "text"), [(None, MEMORY), (4 << 30, ECC), (4 << 30, "Got invalid dimensions")])
def test_no_other_run_is_made_again(budget: int | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Budget(monkeypatch, budget)
    with pytest.raises((GPUOutOfMemoryError, ProviderFailureError, native.Fail)):
        made.call(text, [1])
    assert made.log == ["run"]


def test_plans_go_before_the_second_run_and_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Budget(monkeypatch, room=1 << 30)
    assert made.session._request.shares_budget
    assert made.call(MEMORY, [1]) == [1]
    assert made.log == ["run", "open again", "give back", "run"]
    assert not made.session._request.shares_budget


def test_a_binding_of_a_session_that_must_open_again_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the C++ session, and a budget has no room for two."""
    made = Budget(monkeypatch, room=1 << 30)
    with pytest.raises(GPUOutOfMemoryError):
        made.call(MEMORY, [1], is_bound=True)
    assert made.log == ["run"]
    plain = Budget(monkeypatch)
    assert plain.call(MEMORY, [1], is_bound=True) == [1]


@pytest.mark.parametrize("way", ["run", "run_with_ort_values", "run_with_iobinding", "run_async"])
def test_each_way_to_run_explains_its_failures(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: object) -> None:
                raise native.Fail(ECC)

            return fail if name.startswith("run") else getattr(native_session, name)

    session, feed = made_session(), {"x": np.ones(1, np.float32)}
    binding, native_session = session.io_binding(), session._sess
    binding.bind_cpu_input("x", feed["x"])
    binding.bind_output("y")
    session._sess = Failing()
    values = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(feed["x"])}
    arguments: dict[str, tuple[Any, ...]] = {
        "run_with_ort_values": (None, values),
        "run_with_iobinding": (binding,),
        "run_async": (None, feed, print, None),
    }
    with pytest.raises(ProviderFailureError, match="ECC"):
        getattr(session, way)(*arguments.get(way, (None, feed)))
