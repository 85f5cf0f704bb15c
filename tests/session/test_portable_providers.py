"""Lists of providers that programs write for many machines are no request for what this machine lacks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab

OPENED = "session.portable_providers.opened"


@pytest.fixture(scope="module")
def opened(module_lab: Lab, provider_library: str) -> Any:
    machine = module_lab.machine_that_places(provider_library)
    return machine.run_program(OPENED, str(module_lab.models.relu)).ok().json


@pytest.mark.parametrize("providers", ["available", "reversed"])
def test_the_available_list_asks_for_cuda(opened: Any, providers: str) -> None:
    names, lines = opened[providers]
    assert names == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert lines == ["left out of the providers of a session: TensorrtExecutionProvider"]


@pytest.mark.parametrize("providers", ["DirectML", "Azure"])
def test_providers_of_other_builds_are_left_out(opened: Any, providers: str) -> None:
    names, lines = opened[providers]
    assert names == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("providers", "error"),
    [
        ("TensorRT first", "LibraryNotFoundError"),
        ("TensorRT with options", "LibraryNotFoundError"),
        ("Azure alone", "ProviderRequestError"),
    ],
)
def test_what_a_person_wrote_is_refused(opened: Any, providers: str, error: str) -> None:
    assert opened[providers][0] == error, opened[providers]
