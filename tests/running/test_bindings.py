"""IOBindings of a session: what fails in them is typed, as it is in the session's own methods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.session.test_running import child

OUTLIVES = (1, 30)  # an IOBinding its session: before that, plain ONNX Runtime crashes too

# The arena of ONNX Runtime is the real one, over libraries of CUDA that compute nothing.
FULL = "running.bindings.full"


@pytest.fixture(scope="module")
def full(module_lab: Lab, provider_library: str) -> Any:
    return module_lab.machine_that_places(provider_library).run_program(FULL).ok().json


@pytest.mark.parametrize("method", ["run", "bind_cpu_input", "bind_ortvalue_input"])
def test_memory_that_is_full_is_named_where_an_input_is_bound(full: Any, method: str) -> None:
    assert full[method]["type"] == "GPUOutOfMemoryError"
    assert "256 MiB were asked for" in full[method]["text"]
    assert full[method]["cause"] in ("RuntimeError", "Fail")


def test_the_session_works_on(full: Any) -> None:
    assert full["then"] == {"returned": "(4,)"}


def test_a_wrong_name_is_onnxruntimes_own_word(full: Any) -> None:
    assert full["wrong"]["type"] not in ("GPUOutOfMemoryError", "ProviderFailureError")
    assert full["wrong"]["cause"] == "NoneType"


def test_a_sticky_error_of_a_binding_makes_every_session_refuse() -> None:
    found = child("running.failing_bindings.a_sticky_error_of_a_binding_makes_every_session_refuse")
    assert [each["type"] for each in found] == ["PoisonedContextError"] * 2


@pytest.mark.skipif(older_than(OUTLIVES) is not None, reason=str(older_than(OUTLIVES)))
def test_a_binding_does_not_keep_its_session() -> None:
    found = child("running.failing_bindings.a_binding_does_not_keep_its_session")
    assert found == [True, True, None]
