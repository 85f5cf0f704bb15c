"""The facts of an environment: read all at once, or each when it is first asked for."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ortgpu import inspect_environment
from ortgpu.environment import inspection
from ortgpu.environment.inspection import Environment, UnreadEnvironment
from ortgpu.environment.packages.installed import count_engines


def test_all_facts_are_read_at_once() -> None:
    environment = inspect_environment()
    assert type(environment) is Environment
    assert set(environment.as_dict()) == {field.name for field in fields(Environment)}


def test_an_unread_fact_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def read(name: str, _: object) -> str:
        calls.append(name)
        return name

    for name in inspection._FACTS:
        monkeypatch.setitem(inspection._FACTS, name, partial(read, name))
    environment: Any = UnreadEnvironment(driver="known")
    assert (environment.driver, environment.host, environment.host) == ("known", "host", "host")
    assert calls == ["host"]


def test_each_fact_has_its_reader() -> None:
    assert {field.name for field in fields(Environment)} == inspection._FACTS.keys()
    assert not hasattr(UnreadEnvironment(), "another_fact")


@pytest.mark.parametrize(
    ("names", "engines"),
    [
        (["onnxruntime", "onnxruntime_gpu-1.31.1.dist-info", "numpy-2.3.0.dist-info"], 1),
        (["onnxruntime-1.31.1.dist-info", "onnxruntime_gpu-1.31.1.dist-info"], 2),
        (["onnxruntime_training_cpu-1.19.2.dist-info", "ort_nightly-1.32.dev1-py3.12.egg-info"], 2),
        (["onnxruntime_extensions-0.14.0.dist-info", "onnxruntime_gpu.libs"], 0),
    ],
)
def test_engines_are_counted_by_the_names_of_their_metadata(tmp_path: Path, names: list[str], engines: int) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    assert count_engines(str(tmp_path)) == engines
