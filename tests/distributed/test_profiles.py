"""``ortgpu.diagnose``: which profile judges, and which arguments belong to it."""

from __future__ import annotations

from typing import Any

import pytest

import ortgpu
from ortgpu.distributed.diagnosis import profiles, training


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The profile that was asked, with its arguments."""
    calls: list[Any] = []
    monkeypatch.setattr(
        profiles, "diagnose_inference", lambda *given, **named: calls.append(("inference", given, named))
    )
    monkeypatch.setattr(training, "diagnose_training", lambda *given, **named: calls.append(("training", given, named)))
    return calls


def test_it_is_the_public_name() -> None:
    assert ortgpu.diagnose is profiles.diagnose


def test_inference_is_the_default(called: list[Any]) -> None:
    profiles.diagnose()
    profiles.diagnose(b"model", probe=True, timeout=5)
    assert called == [
        ("inference", (None,), {"probe": False, "timeout": 30.0}),
        ("inference", (b"model",), {"probe": True, "timeout": 5}),
    ]


def test_training_gets_its_hosts_and_folder(called: list[Any]) -> None:
    profiles.diagnose(profile="training")
    profiles.diagnose(profile="training", ssh=["a"], shared_folder="/mnt", probe=True, timeout=5)
    assert called == [
        ("training", ((), None), {"probe": False, "timeout": 30.0}),
        ("training", (["a"], "/mnt"), {"probe": True, "timeout": 5}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": "serving"}, "'inference' or 'training'"),
        ({"ssh": ["a"]}, "belong to the profile 'training'"),
        ({"shared_folder": "/mnt"}, "belong to the profile 'training'"),
        ({"shared_folder": ""}, "belong to the profile 'training'"),
        ({"profile": "training", "model": b""}, "judges no model"),
        ({"profile": "training", "shared_folder": ""}, "shared_folder is empty"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_arguments_of_the_other_profile_are_refused(arguments: Any, message: str, called: list[Any]) -> None:
    with pytest.raises(ValueError, match=message):
        profiles.diagnose(**arguments)
    assert called == []
