"""Arguments of a GPUSession that mean nothing, refused before anything is tried."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any, Literal

from ..errors import ProviderRequestError, manual
from ..provider.devices import DeviceRequest, as_request, check_form, is_cpu

CPUNodes = Literal["allow", "warn", "forbid"]

#: What GPUSession takes and InferenceSession ignores.
OWN = ("device", "cpu_nodes", "allow_cpu", "cuda_graph", "pinned_memory_limit")
NAMES = (*OWN, "sess_options", "providers", "provider_options")

_CLOSE = 0.7  # difflib's ratio: "device_id" and "enable_cuda_graph" are close, no argument of ONNX Runtime's own is


def cpu_is_allowed_by_variable() -> bool:
    return os.environ.get("ORTGPU_ALLOW_CPU", "").lower() in ("1", "true", "yes", "on")


def checked_model(model: Any) -> str | bytes | os.PathLike[str]:
    """Raises TypeError, in the words of InferenceSession."""
    if not isinstance(model, (str, bytes, os.PathLike)):
        raise TypeError(f"Unable to load from type '{type(model)}'")
    return model


def checked_cpu_nodes(value: Any) -> CPUNodes:
    """Raises ValueError."""
    if value not in ("allow", "warn", "forbid"):
        raise ValueError(f'cpu_nodes must be "allow", "warn" or "forbid", not {value!r}')
    policy: CPUNodes = value
    return policy


def checked_flag(name: str, value: Any) -> bool:
    """Raises TypeError for what is neither True nor False: the text "false" of a configuration is true in Python."""
    if value not in (False, True):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def checked_allow_cpu(value: Any) -> bool | None:
    """Raises TypeError, as :func:`checked_flag`. None: the variable ORTGPU_ALLOW_CPU decides."""
    return None if value is None else checked_flag("allow_cpu", value)


def checked_limit(name: str, value: Any) -> int:
    """Bytes. Raises TypeError, ValueError."""
    if operator.index(value) < 0:
        raise ValueError(f"{name} must be at least 0, not {value}")
    return operator.index(value)


def checked_device(device: Any) -> DeviceRequest:
    """Raises TypeError and DeviceNotFoundError for what names no GPU anywhere: ``allow_cpu`` would not mend that."""
    requested: DeviceRequest = as_request(device)
    if not is_cpu(requested):
        check_form(requested)
    return requested


def checked_options(options: Any, kind: type[Any]) -> Any:
    """The SessionOptions; None where there are none, for which ONNX Runtime takes everything that is false."""
    if not options:
        return None
    if not isinstance(options, kind):
        raise TypeError(f"sess_options must be an onnxruntime.SessionOptions, not {type(options).__name__}")
    return options


def checked_others(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that InferenceSession takes and GPUSession does not name, without enable_fallback=0. Raises TypeError where
    one is nearly ours, ProviderRequestError for enable_fallback=1."""
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
    """Those names of arguments that are nearly a known one, and which. InferenceSession ignores what it does not know:
    with ``device_id=1`` a session would be on the first GPU."""
    import difflib

    known = tuple(known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE) for name in names}
    return {name: matches[0] for name, matches in close.items() if matches}


def refuse_misspelt(kind: str, names: Iterable[str], known: Iterable[str] = NAMES) -> None:
    """Raises TypeError. ``kind``: the class that has the arguments."""
    for name, meant in misspelt(names, known).items():
        raise TypeError(f"{kind} has no argument {name!r}; did you mean {meant!r}?")
