"""A function in a thread of its own, with its result or its exception."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """Starts at once. Whoever starts one waits for :meth:`result`: a thread that is left alone does not survive a fork
    in a state to rely on."""

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def result(self) -> Result:
        """Wait for the end; raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
