"""A library that creates sessions of its own, and asks for nothing; its model may come as bytes."""

from __future__ import annotations

from typing import Any

from onnxruntime import InferenceSession


class Detector(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """A subclass that the programs create themselves."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)


def detect(model: Any, **arguments: Any) -> Any:
    return InferenceSession(model, **arguments)


def move(session: Any, *providers: str) -> Any:
    session.set_providers(list(providers))
    return session
