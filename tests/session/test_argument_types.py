"""The names and types of arguments: what type checkers see, and what is said at run time.

mypy checks this file, too. It reports a ``type: ignore`` without need, so each one stands for a mistake that it sees.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from ortgpu import DeviceNotFoundError, GPUSession
from ortgpu.provider.devices import check_form
from ortgpu.session.request import OWN, InferenceSessionArguments, SessionArguments


def open_misspelt() -> None:
    GPUSession(b"", devce="cuda:0")  # type: ignore[call-arg]  # the mistake


def open_misspelt_for_rank() -> None:
    GPUSession.for_rank(b"", alow_cpu=True)  # type: ignore[call-arg]  # the mistake


def open_with_wrong_type() -> None:
    GPUSession(b"", disabled_optimizers=3, allow_cpu="false")  # type: ignore[arg-type]  # the mistakes


def open_rightly() -> None:
    GPUSession(b"", disabled_optimizers=["ConstantFolding"], enable_fallback=0, read_config_from_model=True)
    GPUSession.for_rank(b"", cpu_nodes="forbid", tuned=Path("record"), disabled_optimizers=set())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (open_misspelt, "GPUSession has no argument 'devce'; did you mean 'device'"),
        (open_misspelt_for_rank, "GPUSession has no argument 'alow_cpu'; did you mean 'allow_cpu'"),
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


def test_what_tuned_can_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        GPUSession(b"", tuned="later")
    assert "tuned='later' is none of True, False, \"now\"" in str(raised.value)
    assert raised.value.filename == str(tmp_path / "later")


def test_forms_of_a_device_that_are_listed_are_taken() -> None:
    with pytest.raises(DeviceNotFoundError) as raised:
        check_form("tpu")
    (listed,) = raised.value.evidence
    for device in ("cuda", "cuda:0", "gpu", "gpu:0", "auto"):
        assert f'"{device}"' in listed
        check_form(device)
