"""Sessions that are pickled and copied with what a subclass or a user added to them. On the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lab.installed import older_than
from tests.support.cpu_session import child

EXPECTED = ["Detector", 320, ["cat"], True, "cpu", [-1] * 4]


def test_a_subclass_with_a_constructor_of_its_own_arrives_whole() -> None:
    found = child("session.session_pickling.a_subclass_with_a_constructor_of_its_own_arrives_whole")
    *whole, by_protocol = found
    assert whole == [EXPECTED] * 3
    assert by_protocol == [EXPECTED] * len(by_protocol)


def test_a_class_that_says_itself_what_is_carried() -> None:
    """As for an InferenceSession, which cannot be pickled otherwise."""
    found = child("session.session_pickling.a_class_that_says_itself_what_is_carried")
    assert found == [["state"] * 4, [[-1] * 4] * 4]


def test_an_attribute_called_as_one_of_ours_is_the_subclass_s() -> None:
    found = child("session.session_pickling.an_attribute_called_as_one_of_ours_is_the_subclass_s")
    assert found == ["mine", "set before", None, "anew", "set before", "Placement", False, True]


def test_what_a_run_left_behind_stays() -> None:
    found = child("session.session_pickling.what_a_run_left_behind_stays")
    assert found[:2] == ["mine", "mine"]
    assert set(found[2]) <= {"_pinned"}


def test_entries_of_the_session_options_that_only_the_installed_release_has() -> None:
    entries = {"session.qdq_matmulnbits_accuracy_level": "4"}
    if older_than((1, 31)) is None:
        entries["session.intra_op.spin_duration_us"] = "7"
        entries["ep.cuda.fpa_intb_gemm"] = "1"  # read by the CUDA provider
        entries["optimization.constant_folding_max_output_size_in_bytes"] = "999"
    found = child(
        "session.session_pickling.entries_of_the_session_options_that_only_the_installed_release_has",
        json.dumps(entries),
    )
    assert found == entries


def test_a_copy_has_all_of_the_session_options() -> None:
    """Also what cannot be read back: without the initialiser, a copy gave other results, and said nothing."""
    found = child("session.session_pickling.a_copy_has_all_of_the_session_options")
    assert found == [[[10] * 4, [4]]] * 4


def test_session_options_travel_by_the_function_that_makes_them() -> None:
    """Without their initialiser and dimension, a session in another process gave other results, and said nothing."""
    found = child("session.session_pickling.session_options_travel_by_the_function_that_makes_them")
    assert found["function"]["returned"] == [[10] * 4, [4]]
    assert found["spawned function"]["returned"] == "GPUSession"
    for name in ("object", "untouched", "guarded"):
        for way in (name, f"spawned {name}"):
            assert found[way]["type"] == "ProviderRequestError", way
            assert "sess_options=make_options" in found[way]["text"]
    assert found["none"]["type"] in ("PicklingError", "AttributeError")  # of a lambda
    assert found["no options"]["type"] == "TypeError"


def test_a_relative_path_is_that_of_the_process_that_opened_it(tmp_path: Path) -> None:
    found = child(
        "session.session_pickling.a_relative_path_is_that_of_the_process_that_opened_it",
        str(tmp_path),
    )
    assert found == ["neg.onnx", [-1] * 4, [-1] * 4]


def test_a_spawned_worker_gets_a_session_of_its_own() -> None:
    """As with joblib, which pickles what it passes on in the same way."""
    found = child("session.session_pickling.a_spawned_worker_gets_a_session_of_its_own")
    assert found == [[-2] * 4, "allow", [-1] * 4]


def test_what_cannot_be_pickled_says_so() -> None:
    found = child("session.session_pickling.what_cannot_be_pickled_says_so")
    assert found["type"] == "TypeError"
    assert "lock" in found["text"]
