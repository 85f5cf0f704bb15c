"""Where cuDNN is missing, a session is refused for the forms of operators that need it, and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.fixtures import Lab

ROOT = Path(__file__).parents[2]
NEEDING = (
    "Conv 2D",
    "LRN float32",
    "ArgMax axis 0",
    "MaxPool 2D",
    "ReduceMax axes [1]",
    "ReduceMean axes [1]",
    "LSTM forward",
)
WITHOUT = (
    "ArgMax axis -1",
    "ArgMin axis 2",
    "MaxPool 2D indices",
    "MaxPool 2D dilated",
    "ReduceMean axes [2]",
    "ReduceSum axes [1]",
)


@pytest.fixture(scope="module")
def outcomes(module_lab: Lab, provider_library: str) -> Any:
    machine = module_lab.machine_that_places(provider_library)
    program = str(ROOT / "tests" / "programs" / "cudnn_forms.py")
    return machine.run(argv=[program, *NEEDING, *WITHOUT], env={"PYTHONPATH": str(ROOT)}).ok().reports["outcomes"]


@pytest.mark.parametrize("name", NEEDING)
def test_a_form_that_needs_it_is_refused(outcomes: Any, name: str) -> None:
    """LRN fails in ONNX Runtime's constructor, in words that do not name cuDNN."""
    missing, disabled = outcomes[name]
    assert missing[0] == "LibraryNotFoundError"
    assert "libcudnn.so.9" in missing[1]
    assert disabled[0] == "ProviderOptionError"
    assert "enable_cudnn is 0" in disabled[2]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_form_that_does_without_opens(outcomes: Any, name: str) -> None:
    assert outcomes[name] == [["cuda"], ["cuda"]]
