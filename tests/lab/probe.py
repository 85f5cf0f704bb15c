"""What runs inside the child: open a session, and write down what happened. Imports nothing of the tests.

The parent passes this file's text to the child's interpreter, followed by a call of one of its functions.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any


def report(value: object) -> None:
    """Hand a value to the parent; the last one counts."""
    with open(os.environ["CHILD_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(["json", value], default=str) + "\n")


def open_session(model: str, arguments: dict[str, Any], again: dict[str, Any] | None = None) -> None:
    """Report what ``ortgpu.GPUSession`` does with a model, and then a second one with the arguments of ``again``."""

    def attempt() -> dict[str, object]:
        from ortgpu import GPUSession

        session = GPUSession(model, **arguments)
        return {"providers": session.get_providers(), "device": str(getattr(session, "device", None))}

    seen = _observe(attempt)
    if again is not None:
        arguments.update(again)
        seen["again"] = _observe(attempt)
    report(seen)


def open_plain_session(model: str, arguments: dict[str, Any]) -> None:
    """Report what ``onnxruntime.InferenceSession`` does with a model, with the CUDA wheels loaded as it advises.

    The argument ``before`` is code that the program runs first, whose errors and warnings count too.
    """

    def attempt() -> dict[str, object]:
        exec(arguments.pop("before", ""), {})
        import onnxruntime

        preload = arguments.pop("preload", True)
        if preload and hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        return {"providers": onnxruntime.InferenceSession(model, **arguments).get_providers(), "device": None}

    report(_observe(attempt))


def diagnose_here(probe: bool) -> None:
    """Report the first problem that ``ortgpu.diagnose`` finds, with the others."""

    def attempt() -> dict[str, object]:
        import ortgpu

        problems = ortgpu.diagnose(probe=probe).problems
        if problems:
            raise problems[0].with_others(problems)
        return {"providers": [], "device": None}

    report(_observe(attempt))


def describe(error: BaseException) -> dict[str, object]:
    """An exception as plain data, with what ``ortgpu``'s own carry."""
    return {
        "type": type(error).__name__,
        "bases": [cls.__name__ for cls in type(error).__mro__],
        "text": str(error),
        "code": getattr(error, "code", None) if hasattr(error, "summary") else None,
        "summary": getattr(error, "summary", None),
        "evidence": list(getattr(error, "evidence", ())),
        "fixes": [str(fix) for fix in getattr(error, "fixes", ())],
        "remedies": [
            {"text": str(fix), "kind": fix.kind, "needs": fix.needs, "executable": fix.executable}
            for fix in getattr(error, "fixes", ())
        ],
        "others": [describe(other) for other in getattr(error, "others", ())],
        "details": error.details() if hasattr(error, "details") else {},
        "severity": getattr(error, "severity", None),
        "consequence_of": getattr(error, "consequence_of", None),
    }


def _observe(attempt: Callable[[], dict[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {"error": None, "providers": None, "device": None, "warnings": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen.update(attempt())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test asks about
            seen["error"] = describe(error)
    seen["warnings"] = [
        {
            "type": warning.category.__name__,
            "text": str(warning.message),
            "error": describe(warning.message.error) if hasattr(warning.message, "error") else None,
        }
        for warning in caught
    ]
    return seen
