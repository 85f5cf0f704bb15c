"""Classes of sessions that other people wrote, taken in by the guard: whatever they define, the session is verified.

A session opens on the CPU here, and takes that for a GPU.
"""

from __future__ import annotations

import pytest

from tests.support.cpu_session import child

pytestmark = pytest.mark.lab


CLASSES = (
    "a_property_called_device",
    "attributes_called_device_and_placement",
    "class_attributes_called_device_placement_and_options_chosen",
    "answers_of_its_own",
    "methods_called_as_ours",
    "not_hashable",
    "all_the_same",
    "slots",
    "generic_abstract_of_another_constructor",
    "a_mixin_before_ONNX_Runtimes_class",
    "an_abstract_class_before_it",
    "generic_before_it",
    "generic_before_it_with_slots",
    "counted_by_a_mixin",
    "constructed_again",
    "keeps_its_attributes_itself",
)


@pytest.mark.parametrize("definition", CLASSES)
def test_a_class_of_somebody_else(definition: str) -> None:
    found = child("session.guarded_classes.a_class_of_somebody_else", definition)
    assert found == [
        "Theirs", True, [["guarded", "cuda:0"]] * 2, [-1] * 4, "PoisonedContextError", "PoisonedContextError",
    ]  # fmt: skip


def test_a_class_that_turns_to_the_cpu_itself() -> None:
    """Its session is one of ONNX Runtime again."""
    found = child("session.guarded_classes.a_class_that_turns_to_the_cpu_itself")
    assert found == [
        ["InvalidProtobuf", True, [-1] * 4],
        [True, ["CPUExecutionProvider"], ["mine"]],
        ["cpu", "cpu"],
    ]
