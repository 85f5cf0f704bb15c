"""Several requests in one run, joined along their first axis, with their results split again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import GPUError

Arrays = Mapping[str, Any]
Run = Callable[[Arrays], dict[str, Any]]


def answer(run: Run, requests: Sequence[Arrays]) -> list[dict[str, Any] | Exception]:
    """Return the result of ``run`` for each request, or its exception, in order.

    Requests with the same inputs, types and shapes are joined; the first axis may differ. If a joined run fails and the
    GPU is not the cause, each request runs alone, so that only the wrong one fails.
    """
    results: list[dict[str, Any] | Exception] = [RuntimeError("not run")] * len(requests)
    for group in _alike(requests):
        for number, result in zip(group, _answer_group(run, [requests[number] for number in group]), strict=True):
            results[number] = result
    return results


def _answer_group(run: Run, requests: Sequence[Arrays]) -> Sequence[dict[str, Any] | Exception]:
    if len(requests) == 1:
        try:
            return [run(requests[0])]
        except Exception as error:  # noqa: BLE001 - returned to the caller of the request
            return [error]
    joined = {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}
    try:
        outputs = run(joined)
    except GPUError as error:
        return [error] * len(requests)
    except Exception:  # noqa: BLE001 - one of the requests may be wrong
        return [result for request in requests for result in _answer_group(run, [request])]
    return _taken_apart(outputs, [_length(request) or 0 for request in requests])


def _taken_apart(outputs: dict[str, Any], lengths: Sequence[int]) -> Sequence[dict[str, Any] | Exception]:
    for name, output in outputs.items():
        if np.shape(output)[:1] != (sum(lengths),):
            error = ValueError(
                f"output {name!r} of {sum(lengths)} joined items has the shape {np.shape(output)}: the requests of "
                "this model cannot be joined. Pass max_batch_size=1"
            )
            return [error] * len(lengths)
    ends = np.cumsum(lengths)[:-1]
    parts = {name: np.split(output, ends) for name, output in outputs.items()}
    return [{name: part[number] for name, part in parts.items()} for number in range(len(lengths))]


def _alike(requests: Sequence[Arrays]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for number, request in enumerate(requests):
        signature: object = number
        if _length(request) is not None:
            signature = tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(request.items()))
        groups.setdefault(signature, []).append(number)
    return list(groups.values())


def _length(request: Arrays) -> int | None:
    """Return the length of the first axis. None if the inputs differ in it, or one has no axis."""
    lengths = {array.shape[:1] for array in request.values()}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None
