"""GPUSession where ONNX Runtime cannot be imported: a stand-in that raises why, until it can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ortgpu.errors import PackageError
from ortgpu.session import lazily


class Broken:
    """Stands for the module of GPUSession, which raises at every look."""

    looks = 0

    @property
    def GPUSession(self) -> Any:  # noqa: N802 - the name of the class
        self.looks += 1
        raise PackageError(f"no ONNX Runtime, look {self.looks}")


def test_the_class_where_it_can_be_imported() -> None:
    from ortgpu.session.gpu_session import GPUSession

    assert lazily.gpu_session_class() is GPUSession


def test_opening_raises_the_reason_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazily, "gpu_session", Broken())
    cls = lazily.gpu_session_class()
    assert cls.__name__ == cls.__qualname__ == "GPUSession"
    with pytest.raises(PackageError, match="look 2"):
        cls("model.onnx")
    with pytest.raises(PackageError, match="look 3"):
        cls.for_rank("model.onnx")


def test_a_repaired_environment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazily, "gpu_session", Broken())
    cls = lazily.gpu_session_class()
    opened: list[Any] = []

    class Session:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            opened.append((arguments, named))

        @classmethod
        def for_rank(cls, *arguments: Any) -> str:
            return f"for rank {arguments}"

    monkeypatch.setattr(lazily, "gpu_session", SimpleNamespace(GPUSession=Session))
    assert type(cls("model.onnx", device=1)) is Session
    assert opened == [(("model.onnx",), {"device": 1})]
    assert cls.for_rank("model.onnx") == "for rank ('model.onnx',)"
