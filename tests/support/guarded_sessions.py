"""A library that makes sessions of its own, for the tests of the guard: imported before it or after."""

from __future__ import annotations

from typing import Any

from onnxruntime import InferenceSession


class Pickable(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """As face recognition libraries have it: pickles as its path, and opens that anew."""

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        super().__init__(model_path, **kwargs)
        self.model_path = model_path

    def __getstate__(self) -> dict[str, Any]:
        return {"model_path": self.model_path}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__init__(values["model_path"])  # type: ignore[misc]  # as such libraries do


class Reducing(InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
    """Pickles in the older way."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.model_path = model_path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model_path,)


def make_one(path: str, **kwargs: Any) -> Any:
    return InferenceSession(path, **kwargs)
