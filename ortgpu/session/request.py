"""The request for a session, checked once, and the facts that are verified after opening."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from ..errors import ProviderRequestError, manual
from ..model.files import ModelSource, is_special_file
from ..provider.devices import DeviceRequest, check_form, is_cpu
from ..provider.requests import NO_PROVIDERS, CPUNodes, ProviderList
from ..provider.settings import PINNED_MEMORY_LIMIT as PINNED_MEMORY_LIMIT
from ..provider.sizes import GPUSize, Size, memory_by_variable, parse_gpu_size, parse_size

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # type checkers bring it

    from ..provider.devices import Device
    from ..provider.placement import Placement
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:
    Unpack = type  # Only typing.get_type_hints reads it, and needs a name that takes brackets.

#: Arguments that GPUSession takes and InferenceSession ignores.
OWN = ("device", "cpu_nodes", "allow_cpu", "cuda_graph", "pinned_memory_limit", "tuned", "memory", "trim_idle")
NAMES = (*OWN, "sess_options", "providers", "provider_options")

Tuned: TypeAlias = bool | Literal["now"] | str | os.PathLike[str]  # whether to use a record of tune, or its path


class InferenceSessionArguments(TypedDict, total=False):
    """Further arguments of InferenceSession by name. It ignores other names, and so does a session at run time."""

    disabled_optimizers: Iterable[str]
    enable_fallback: Literal[0, False]
    read_config_from_model: bool


class _CommonArguments(InferenceSessionArguments, total=False):
    cpu_nodes: CPUNodes
    allow_cpu: bool | None
    cuda_graph: bool
    pinned_memory_limit: Size
    tuned: Tuned
    trim_idle: float | None


class SessionArguments(_CommonArguments, total=False):
    """The arguments of a GPUSession by name, for functions that pass them on; without ``device``."""

    memory: GPUSize | None


class _ArgumentsByPosition(TypedDict, total=False):
    sess_options: Any
    providers: Sequence[Any] | None
    provider_options: Sequence[dict[Any, Any]] | None


class PoolArguments(SessionArguments, _ArgumentsByPosition, total=False):
    """The arguments of a GPUSession that a pool hands to each of its sessions, all by name."""


class ModelsArguments(_CommonArguments, _ArgumentsByPosition, total=False):
    """The arguments of a GPUSession that GPUModels hands to each of its sessions, all by name; without ``memory``."""

    device: Device | DeviceRequest


class BatchedOptions(TypedDict, total=False):
    """The options of ``batched()`` by name, besides ``max_batch`` and ``max_wait``."""

    max_queue: int
    when_full: Literal["wait", "raise"]
    inputs: Mapping[str, Any] | None


_CLOSE = 0.7  # difflib's ratio: "device_id" and "enable_cuda_graph" are close, no argument of ONNX Runtime's own is


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The arguments of a constructor."""

    model: ModelSource
    sess_options: Any = None  # ONNX Runtime ships no types
    providers: ProviderList = NO_PROVIDERS
    device: DeviceRequest = None
    cpu_nodes: CPUNodes = "warn"
    allow_cpu: bool | None = False  # None: the variable ORTGPU_ALLOW_CPU decides
    cuda_graph: bool = False
    pinned_memory_limit: Size = PINNED_MEMORY_LIMIT
    tuned: Tuned = True
    memory: GPUSize | None = None
    trim_idle: float | None = None
    make_options: Callable[[], Any] | None = None  # the function that returned ``sess_options``
    shares_budget: bool = True  # False: a run needed the part of the budget for plans of further shapes or graphs
    is_guarded: bool = False  # A library opens the session. It chose its options, and may have measured with them.
    others: Mapping[str, Any] = field(default_factory=dict)  # further arguments of InferenceSession


@dataclass(frozen=True, slots=True)
class Verified:
    device: Device
    placement: Placement
    options_chosen: dict[str, tuple[str, str]]
    budget: int | None = None  # bytes of the GPU that the session may take


#: The fields of ``Verified`` that are attributes of a session
FACTS = ("device", "placement", "options_chosen")


def checked(request: SessionRequest) -> SessionRequest:
    """Check the arguments of a GPUSession before anything is opened, and return each in its normal form.

    Raises TypeError, ValueError, DeviceNotFoundError or ProviderRequestError. A pipe or a device file as the model
    raises GPUError, because ONNX Runtime may read it for ever.
    """
    import onnxruntime

    model, options = request.model, request.sess_options
    if not isinstance(model, (str, bytes, os.PathLike)):
        raise TypeError(f"Unable to load from type '{type(model)}'")  # the words of InferenceSession
    if not isinstance(model, bytes):
        _refuse_undecoded(os.fsdecode(model))
        _refuse_special_file(model)
    make = options if callable(options) else request.make_options
    if callable(options):
        options = options()
    if options and not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(
            "sess_options must be an onnxruntime.SessionOptions, or a function that returns them, "
            f"not {type(options).__name__}"
        )
    if not is_cpu(request.device):
        check_form(request.device)
    if request.cpu_nodes not in ("allow", "warn", "forbid"):
        raise ValueError(f'cpu_nodes must be "allow", "warn" or "forbid", not {request.cpu_nodes!r}')
    memory_by_variable()
    return replace(
        request,
        sess_options=options or None,  # ONNX Runtime takes any falsy value for none
        make_options=make,
        allow_cpu=None if request.allow_cpu is None else _flag("allow_cpu", request.allow_cpu),
        cuda_graph=_flag("cuda_graph", request.cuda_graph),
        pinned_memory_limit=parse_size("pinned_memory_limit", request.pinned_memory_limit),
        trim_idle=None if request.trim_idle is None else seconds("trim_idle", request.trim_idle),
        memory=None if request.memory is None else parse_gpu_size("memory", request.memory),
        tuned=_checked_tuned(request.tuned),
        others=_checked_others(request.others),
    )


def _refuse_undecoded(path: str) -> None:
    """Raise TypeError, as InferenceSession does, for a path that is not UTF-8. ONNX Runtime takes only UTF-8."""
    if not path.isascii() and any("\ud800" <= character <= "\udfff" for character in path):
        encoding = sys.getfilesystemencoding()
        how = "rename it" if encoding == "utf-8" else "start Python with PYTHONUTF8=1, or with LC_ALL=C.UTF-8"
        raise TypeError(f"the name of the model file {path!a} is not in {encoding}, the encoding of names: {how}")


def _refuse_special_file(path: str | os.PathLike[str]) -> None:
    if is_special_file(path):
        from ..diagnosis.checks.model import unreadable
        from ..model.contents import read_model

        error = unreadable(read_model(path))
        if error is not None:  # A regular file may have replaced it meanwhile.
            raise error


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises TypeError or ValueError with the name of the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < value < threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool. Raises TypeError for others, since the text "false" of a configuration is truthy."""
    if value not in (False, True):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _checked_tuned(value: Tuned) -> Tuned:
    """Return a path as text. Raises TypeError for other types, FileNotFoundError if the record is not there."""
    if isinstance(value, bool) or value == "now":
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f'tuned must be True, False, "now" or the path of a record, not {value!r}')
    path = os.path.abspath(os.fsdecode(value))
    try:
        os.stat(path)
    except FileNotFoundError as error:
        words = f'tuned={value!r} is not True, False or "now", and no record of tune has that path'
        raise FileNotFoundError(error.errno, words, path) from None
    return path


def _checked_others(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if int(arguments.get("enable_fallback", 0)):
        raise no_fallback("enable_fallback=1 was passed")
    others = {**arguments}
    others.pop("enable_fallback", None)
    if others:
        refuse_misspelt("GPUSession", others)
    return others


def no_fallback(what: str) -> ProviderRequestError:
    return ProviderRequestError(
        "a GPUSession does not fall back to the CPU",
        evidence=[what],
        fixes=[manual("leave it out; allow_cpu=True, or ORTGPU_ALLOW_CPU=1, accepts the CPU where there is no GPU")],
    )


def misspelt(names: Iterable[str], known: Iterable[str] = NAMES) -> dict[str, str]:
    """Map each name close to a known argument to that argument: InferenceSession would ignore ``device_id=1``."""
    import difflib

    known = tuple(known)
    close = {name: difflib.get_close_matches(name.lower(), known, n=1, cutoff=_CLOSE) for name in names}
    return {name: matches[0] for name, matches in close.items() if matches}


def refuse_misspelt(kind: str, names: Iterable[str], known: Iterable[str] = NAMES) -> None:
    """Raise TypeError if a name looks misspelt. ``kind`` is the class that has the arguments."""
    for name, suggestion in misspelt(names, known).items():
        raise TypeError(f"{kind} has no argument {name!r}; did you mean {suggestion!r}?")


def cpu_is_allowed_by_variable() -> bool:
    return os.environ.get("ORTGPU_ALLOW_CPU", "").lower() in ("1", "true", "yes", "on")
