"""What a session promises without a word from its caller: the defaults, and ONNX Runtime's fallback."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ortgpu.session.request import NAMES, OWN, SessionRequest, cpu_is_allowed_by_variable
from tests.support.cpu_session import child

CONSTRUCTOR: dict[str, object] = {
    "sess_options": None,
    "providers": None,
    "provider_options": None,
    "device": None,
    "cpu_nodes": "warn",
    "allow_cpu": None,
    "cuda_graph": False,
    "pinned_memory_limit": 2 << 30,
    "tuned": True,
}


def test_the_constructor_has_these_defaults() -> None:
    """A default that turns lenient would bring the silent CPU back."""
    found = child(
        """
        import inspect
        parameters = inspect.signature(GPUSession.__init__).parameters
        report({name: each.default for name, each in parameters.items() if each.default is not each.empty})
        """
    )
    assert {name: found[name] for name in CONSTRUCTOR} == CONSTRUCTOR
    assert set(OWN) < set(NAMES)


def test_a_request_that_names_nothing_allows_nothing() -> None:
    defaults = {name: each.default for name, each in inspect.signature(SessionRequest).parameters.items()}
    assert (defaults["cpu_nodes"], defaults["allow_cpu"], defaults["is_guarded"]) == ("warn", False, False)


@pytest.mark.parametrize(
    ("value", "allows"),
    [
        *((value, True) for value in ("1", "true", "yes", "on", "TRUE", "Yes", "ON")),
        *((value, False) for value in ("", "0", "no", "No", "false", "off", "2", "allow", "yes please", " 1")),
        (None, False),
    ],
)
def test_the_variable_allows_the_cpu_by_these_values_only(
    monkeypatch: pytest.MonkeyPatch, value: str | None, allows: bool
) -> None:
    if value is None:
        monkeypatch.delenv("ORTGPU_ALLOW_CPU", raising=False)
    else:
        monkeypatch.setenv("ORTGPU_ALLOW_CPU", value)
    assert cpu_is_allowed_by_variable() is allows


def test_the_fallback_of_onnxruntime_is_off_from_the_constructor_on() -> None:
    """Plain ONNX Runtime opens a session again on the CPU where that is on, in the constructor and in each run."""
    found: Any = child(
        """
        from onnxruntime import InferenceSession
        constructed, construct = [], InferenceSession.__init__
        def spy(self, *arguments, **named):
            constructed.append(named.get("enable_fallback"))
            construct(self, *arguments, **named)
        InferenceSession.__init__ = spy
        session = GPUSession(NEG)
        report([constructed, session._enable_fallback])
        """
    )
    assert found == [[0], 0]
