"""Checks of the arguments of a GPUSession, made before anything is opened."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any

from ..errors import ProviderRequestError, manual
from ..provider.devices import DeviceRequest, as_request, check_form, is_cpu
from ..provider.requests import CPUNodes

#: Arguments that GPUSession takes and InferenceSession ignores.
OWN = ("device", "cpu_nodes", "allow_cpu", "cuda_graph", "pinned_memory_limit")
NAMES = (*OWN, "sess_options", "providers", "provider_options")

_CLOSE = 0.7  # difflib's ratio: "device_id" and "enable_cuda_graph" are close, no argument of ONNX Runtime's own is


def cpu_is_allowed_by_variable() -> bool:
    return os.environ.get("ORTGPU_ALLOW_CPU", "").lower() in ("1", "true", "yes", "on")


def checked_model(model: Any) -> str | bytes | os.PathLike[str]:
    """Return ``model``, or raise the TypeError that InferenceSession would raise."""
    if not isinstance(model, (str, bytes, os.PathLike)):
        raise TypeError(f"Unable to load from type '{type(model)}'")
    return model


def checked_cpu_nodes(value: Any) -> CPUNodes:
    """Return ``value``, or raise ValueError if it names no policy."""
    if value not in ("allow", "warn", "forbid"):
        raise ValueError(f'cpu_nodes must be "allow", "warn" or "forbid", not {value!r}')
    policy: CPUNodes = value
    return policy


def checked_flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool. Raises TypeError for others, since the text "false" of a configuration is truthy."""
    if value not in (False, True):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def checked_allow_cpu(value: Any) -> bool | None:
    """Return ``value``, a bool or None (the variable ORTGPU_ALLOW_CPU decides). Raises TypeError for others."""
    return None if value is None else checked_flag("allow_cpu", value)


def checked_limit(name: str, value: Any) -> int:
    """Return a number of bytes. Raises TypeError if it is no integer, ValueError if it is negative."""
    if operator.index(value) < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
    return operator.index(value)


def checked_device(device: Any) -> DeviceRequest:
    """Return the requested device. Raises TypeError or DeviceNotFoundError for a form that names no GPU anywhere."""
    requested: DeviceRequest = as_request(device)
    if not is_cpu(requested):
        check_form(requested)
    return requested


def checked_options(options: Any, kind: type[Any]) -> Any:
    """Return the SessionOptions, or None if there are none: ONNX Runtime takes any falsy value for none."""
    if not options:
        return None
    if not isinstance(options, kind):
        raise TypeError(f"sess_options must be an onnxruntime.SessionOptions, not {type(options).__name__}")
    return options


def checked_others(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the further arguments of InferenceSession, without enable_fallback=0.

    Raises:
        TypeError: a name looks like a misspelt argument of GPUSession.
        ProviderRequestError: enable_fallback=1.
    """
    if int(arguments.pop("enable_fallback", 0)):
        raise no_fallback("enable_fallback=1 was passed")
    if arguments:
        refuse_misspelt("GPUSession", arguments)
    return arguments


def no_fallback(what: str) -> ProviderRequestError:
    return ProviderRequestError(
        "a GPUSession does not fall back to the CPU",
        evidence=[what],
        fixes=[manual("leave it out; allow_cpu=True, or ORTGPU_ALLOW_CPU=1, accepts the CPU where there is no GPU")],
    )


def misspelt(names: Iterable[str], known: Iterable[str] = NAMES) -> dict[str, str]:
    """Map each name that is close to a known argument to that argument.

    InferenceSession ignores unknown arguments: with ``device_id=1`` a session would be on the first GPU.
    """
    import difflib

    known = tuple(known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE) for name in names}
    return {name: matches[0] for name, matches in close.items() if matches}


def refuse_misspelt(kind: str, names: Iterable[str], known: Iterable[str] = NAMES) -> None:
    """Raise TypeError if a name looks misspelt. ``kind`` is the class that has the arguments."""
    for name, meant in misspelt(names, known).items():
        raise TypeError(f"{kind} has no argument {name!r}; did you mean {meant!r}?")
