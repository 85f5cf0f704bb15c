"""The names and types of arguments: what type checkers see, and what is said at run time.

mypy checks this file, too. It reports a ``type: ignore`` without need, so each one stands for a mistake that it sees.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from ortgpu import DeviceNotFoundError, GPUModels, GPUSession, GPUSessionPool, fit
from ortgpu.provider.devices import check_form
from ortgpu.session.pool.batching import Batched
from ortgpu.session.request import (
    OWN,
    BatchedOptions,
    InferenceSessionArguments,
    ModelsArguments,
    PoolArguments,
    SessionArguments,
    seconds,
)
from tests.support.cpu_session import child


def open_misspelt() -> None:
    GPUSession(b"", devce="cuda:0")  # type: ignore[call-arg]  # the mistake


def open_misspelt_for_rank() -> None:
    GPUSession.for_rank(b"", alow_cpu=True)  # type: ignore[call-arg]  # the mistake


def open_with_wrong_type() -> None:
    GPUSession(b"", disabled_optimizers=3, allow_cpu="false")  # type: ignore[arg-type]  # the mistakes


def open_misspelt_pool() -> None:
    GPUSessionPool(b"", isolated=True)  # type: ignore[call-arg]  # the mistake


def open_misspelt_models() -> None:
    GPUModels(devce=0)  # type: ignore[call-arg]  # the mistake


def fit_misspelt() -> None:
    fit(b"", alow_cpu=True)  # type: ignore[call-arg]  # the mistake


def join_misspelt(session: GPUSession, pool: GPUSessionPool) -> None:
    session.batched(max_wiat=1)  # type: ignore[call-arg]  # the mistake
    pool.batched(when_full="block")  # type: ignore[arg-type]  # the mistake


def open_rightly() -> None:
    GPUSessionPool(b"", isolate=True, sess_options=None, pinned_memory_limit="2GB", allow_cpu=True)
    GPUSession(b"", disabled_optimizers=["ConstantFolding"], enable_fallback=0, read_config_from_model=True)
    GPUModels("12GiB", device="cuda:1", providers=["CUDAExecutionProvider"], trim_idle=60)
    fit(b"", [1], device=0, providers=["CUDAExecutionProvider"], memory="1GiB")
    GPUSession.for_rank(b"", cpu_nodes="forbid", tuned=Path("record"), disabled_optimizers=set())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (open_misspelt, "GPUSession has no argument 'devce'; did you mean 'device'"),
        (open_misspelt_for_rank, "GPUSession has no argument 'alow_cpu'; did you mean 'allow_cpu'"),
        (open_misspelt_pool, "GPUSessionPool has no argument 'isolated'; did you mean 'isolate'"),
        (open_misspelt_models, "GPUModels has no argument 'devce'; did you mean 'device'"),
        (fit_misspelt, "fit\\(\\) has no argument 'alow_cpu'; did you mean 'allow_cpu'"),
        (open_with_wrong_type, "allow_cpu must be True or False, not 'false'"),
    ],
)
def test_a_mistake_that_type_checkers_see_is_refused_at_run_time(call: Callable[[], None], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


def test_functions_that_pass_arguments_on_know_them_all() -> None:
    """All arguments of the constructor but ``device``."""
    parameters = inspect.signature(GPUSession.__init__).parameters.values()
    own = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set(own) == set(OWN)
    del own["device"]
    assert SessionArguments.__annotations__.keys() == own.keys() | InferenceSessionArguments.__annotations__.keys()
    written = {name: typing.cast("typing.ForwardRef", SessionArguments.__annotations__[name]) for name in own}
    assert {name: each.__forward_arg__ for name, each in written.items()} == own


def test_models_take_the_arguments_of_a_session_but_memory() -> None:
    names = {*OWN, "sess_options", "providers", "provider_options", *InferenceSessionArguments.__annotations__}
    assert ModelsArguments.__annotations__.keys() == names - {"memory"}
    assert PoolArguments.__annotations__.keys() == names - {"device"}


def test_the_options_of_a_service_are_those_of_its_class() -> None:
    parameters = inspect.signature(Batched.__init__).parameters.values()
    own = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY} - {"is_alone", "warm"}
    assert own == {"max_batch", "max_wait", *BatchedOptions.__annotations__}


def test_what_tuned_can_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        GPUSession(b"", tuned="later")
    assert "tuned='later' is not True, False or \"now\"" in str(raised.value)
    assert raised.value.filename == str(tmp_path / "later")


def test_forms_of_a_device_that_are_listed_are_taken() -> None:
    with pytest.raises(DeviceNotFoundError) as raised:
        check_form("tpu")
    (listed,) = raised.value.evidence
    for device in ("cuda", "cuda:0", "gpu", "gpu:0", "auto"):
        assert f'"{device}"' in listed
        check_form(device)


def test_a_size_that_a_pool_of_processes_is_given_as_text() -> None:
    found = child("session.argument_types.a_size_that_a_pool_of_processes_is_given_as_text")
    assert found == [-1, -1]


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 1e300, True, "1", None])
def test_seconds_are_a_number_that_a_thread_can_wait_for(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="trim_idle must be a number of seconds"):
        seconds("trim_idle", value)
    assert seconds("trim_idle", 2) == 2.0
