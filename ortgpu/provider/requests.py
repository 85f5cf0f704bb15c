"""The execution providers that a caller requests, and the CUDA-first list for ONNX Runtime."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..environment.libraries.library_file import absent_strings
from ..errors import ProviderOptionError, ProviderRequestError, manual

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
CPUNodes = Literal["allow", "warn", "forbid"]  # the action for nodes that compute on the CPU
TENSORRT = ("TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")

_ENUMERATED = {
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
}
_UNSIGNED = ("gpu_mem_limit", "device_id")
_BOOLEAN = (
    "cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "do_copy_in_default_stream", "enable_cuda_graph",
    "enable_cudnn", "fuse_conv_bias", "prefer_nhwc", "tunable_op_enable", "tunable_op_tuning_enable",
    "use_ep_level_unified_stream", "use_tf32", "enable_skip_layer_norm_strict_mode",
)  # fmt: skip
_BOOLEAN_VALUES = ("0", "1", "false", "true", "False", "True")  # parse_string.h

# The list is from cuda_execution_provider_info.cc and only serves to suggest a spelling: the wheel's strings decide.
_OPTION_NAMES = (
    *_ENUMERATED, *_UNSIGNED, *_BOOLEAN, "has_user_compute_stream", "user_compute_stream", "sdpa_kernel",
    "tunable_op_max_tuning_duration_ms", "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache",
)  # fmt: skip


# Providers by the first word of their options
_PREFIXES = {"trt": TENSORRT[0], "nv": TENSORRT[1], "migraphx": "MIGraphXExecutionProvider"}
_NEAR = 0.75  # lowest similarity of a misspelt option: at 0.7, device_type of OpenVINO would match device_id

# Options that a session sets unless its caller does: value and reason. The figures are from an H200 with networks of
# nine kinds, in batches of 32. Where HEURISTIC is slower, ``ortgpu tune`` chooses EXHAUSTIVE. EXHAUSTIVE decides by
# timing, so sessions of the same model may differ, while HEURISTIC takes the same algorithms each time. HEURISTIC
# changes the results of three of ONNX's node tests, within the precision of TF32.
CHOSEN_OPTIONS = {
    "cudnn_conv_algo_search": (
        "HEURISTIC",
        "runs of new shapes come four to seven times sooner than with ONNX Runtime's default EXHAUSTIVE; steady runs "
        "took 1.00 to 1.03 of the time, dense blocks 1.10",
    ),
}


@dataclass(frozen=True, slots=True)
class ProviderList:
    """Providers in order of precedence, with the options of each as strings."""

    names: tuple[str, ...]
    options: Mapping[str, dict[str, str]] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()  # names that came again; their later options do not count

    def options_of(self, name: str) -> dict[str, str]:
        return self.options.get(name, {})

    def replace_cuda_options(self, options: Mapping[str, str]) -> ProviderList:
        return ProviderList(self.names, {**self.options, CUDA: {**self.options_of(CUDA), **options}})

    def provider_arguments(self) -> list[tuple[str, dict[str, str]]]:
        return [(name, dict(self.options_of(name))) for name in self.names]


NO_PROVIDERS = ProviderList(())


def parse(providers: Any, provider_options: Any) -> ProviderList:
    """Return the request in one form. Raises ProviderRequestError if malformed. The first of equal names counts."""
    if providers is None:
        if provider_options:
            raise _malformed(providers, "provider_options without providers")
        return NO_PROVIDERS
    if isinstance(providers, (str, bytes)) or not isinstance(providers, Sequence):
        raise _malformed(providers, f"providers is a {type(providers).__name__}, not a list")
    pairs = [_pair(providers, entry) for entry in providers]
    if provider_options is not None:
        if isinstance(provider_options, (str, bytes)) or not isinstance(provider_options, Sequence):
            raise _malformed(providers, f"provider_options is a {type(provider_options).__name__}, not a list")
        if len(provider_options) != len(pairs):
            raise _malformed(providers, f"{len(pairs)} providers and {len(provider_options)} provider_options")
        if any(entry_options is not None for _, entry_options in pairs):
            raise _malformed(providers, "options are given in providers and in provider_options")
        if not all(isinstance(entry_options, dict) for entry_options in provider_options):
            raise _malformed(providers, "provider_options must be dicts")
        pairs = [(name, entry_options) for (name, _), entry_options in zip(pairs, provider_options, strict=True)]
    options: dict[str, dict[str, str]] = {}
    repeated = []
    for name, entry_options in pairs:
        if name in options:
            repeated.append(name)
        else:
            options[name] = {str(k): str(v) for k, v in (entry_options or {}).items()}
    return ProviderList(tuple(options), options, tuple(dict.fromkeys(repeated)))


def _pair(providers: Any, entry: Any) -> tuple[str, dict[Any, Any] | None]:
    if isinstance(entry, str):
        return entry, None
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], dict):
        return entry[0], entry[1]
    raise _malformed(providers, f"{entry!r} is neither a name nor a (name, options) tuple")


def drop_unintended(requested: ProviderList, known: Collection[str], available: Sequence[str]) -> ProviderList:
    """Return the request without providers that a list for many machines names beside CUDA.

    These are the providers of other builds. TensorRT is left out, too, if the list is all of
    ``get_available_providers()`` and TensorRT has no options beyond CUDA's, such as one ``device_id`` for all.
    """
    if CUDA not in requested.names:
        return requested
    unmeant = {name for name in requested.names if name in known and name not in (*available, *TENSORRT, CUDA, CPU)}
    options_of_cuda = requested.options_of(CUDA).items()
    has_own_options = any(not requested.options_of(name).items() <= options_of_cuda for name in TENSORRT)
    if set(requested.names) == set(available) and not has_own_options:
        unmeant.update(TENSORRT)
    return ProviderList(
        tuple(name for name in requested.names if name not in unmeant), requested.options, requested.repeated
    )


def check_names(requested: ProviderList, known: Sequence[str], available: Sequence[str]) -> None:
    """Raise ProviderRequestError for providers that ONNX Runtime would drop with a warning."""
    for name in requested.names:
        if name not in known and name not in (*available, *TENSORRT):
            suggestion = suggest(name, {*available, CUDA})
            raise ProviderRequestError(
                f"there is no execution provider {name!r}" + (f"; did you mean {suggestion!r}?" if suggestion else ""),
                evidence=[f"providers in this build: {', '.join(available)}"],
                fixes=[manual(f"write {suggestion!r}" if suggestion else f"leave {name!r} out")],
                requested=requested.names,
            )
        if name not in available and name != CUDA:
            raise ProviderRequestError(
                f"{name} is not part of the installed ONNX Runtime, and no registered plugin brings it",
                evidence=[f"providers in this build: {', '.join(available)}"],
                fixes=[manual(f"leave {name} out, register its plugin first, or install a build that has it")],
                requested=requested.names,
            )


def suggest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that a misspelt name of a provider may mean, or None."""
    stem = _provider_stem(name)
    if stem in ("gpu", "nvidia"):
        return CUDA
    by_stem = {_provider_stem(full): full for full in sorted(candidates)}
    close = difflib.get_close_matches(stem, by_stem, n=1, cutoff=0.7)  # at 0.6, "npu" and "xpu" would match "cpu"
    return by_stem[close[0]] if close else None


def _provider_stem(name: str) -> str:
    """Return the distinctive word of a provider's name: "cuda" for "cuda:0" and CUDAExecutionProvider."""
    return re.sub(r"[^a-z]", "", re.split("exec|prov", name.lower(), maxsplit=1)[0])


def cuda_first(requested: ProviderList, *, keep_cpu: bool = True) -> ProviderList:
    """Return the list with CUDA first and the CPU last if ``keep_cpu``. TensorRT stays in front if requested so."""
    before = requested.names[: requested.names.index(CUDA)] if CUDA in requested.names else requested.names
    front = [name for name in before if name in TENSORRT]
    rest = [name for name in requested.names if name not in (CUDA, CPU, *front)]
    return ProviderList((*front, CUDA, *rest, *((CPU,) if keep_cpu else ())), requested.options)


def check_options(requested: ProviderList, provider_library: str | None) -> None:
    """Raise ProviderOptionError for options that the installed CUDA provider does not know, or a wrong ``device_id``.

    ONNX Runtime reads the options only after loading the library, so a machine without CUDA never sees the mistake.
    """
    options = requested.options_of(CUDA)
    unknown = absent_strings(provider_library, list(options))
    if unknown:
        raise _unknown_option(unknown[0], options[unknown[0]], provider_library)
    for option, value in options.items():
        if option in _ENUMERATED and value not in _ENUMERATED[option]:
            raise _bad_value(CUDA, option, value, f"one of {', '.join(_ENUMERATED[option])}")
        if option in _BOOLEAN and value not in _BOOLEAN_VALUES:
            raise _bad_value(CUDA, option, value, f"one of {', '.join(_BOOLEAN_VALUES)}")
    numbers = [(CUDA, option, options[option]) for option in _UNSIGNED if option in options]
    numbers += [(name, "device_id", requested.options_of(name).get("device_id", "0")) for name in TENSORRT]
    for name, option, value in numbers:
        if not (value.isascii() and value.isdecimal()):
            raise _bad_value(name, option, value, "a whole number, 0 or larger")


def _unknown_option(name: str, value: str, provider_library: str | None) -> ProviderOptionError:
    absent = absent_strings(provider_library, _OPTION_NAMES)
    owner = _PREFIXES.get(name.lower().partition("_")[0])
    summary, advice = f"the CUDA provider knows no option {name!r}", f"remove {name!r}"
    if name in absent:
        summary = f"the installed CUDA provider knows no option {name!r}, which other releases of ONNX Runtime have"
        advice += ", or install a release that has it"
    elif owner is not None:
        summary += f", which is an option of {owner}"
        advice += f", or give it to {owner} if that is meant"
    elif re.search("fp16|float16|half", name, re.IGNORECASE):
        advice += ": the types of the model decide. Convert the model to float16; ortgpu tune --precision fp16 tries it"
    else:
        likeness, near = max(
            ((_likeness(name, option), option) for option in _OPTION_NAMES if option not in absent), default=(0.0, "")
        )
        if likeness >= _NEAR:
            summary += f"; did you mean {near!r}?"
            advice = f"write {near!r}"
    return ProviderOptionError(
        summary,
        evidence=[f"not among the names in {provider_library}"],
        fixes=[manual(advice)],
        provider=CUDA,
        option=name,
        value=value,
    )


def _likeness(name: str, option: str) -> float:
    """Return the similarity of a misspelt name, from 0 to 1, in its own order of words or with sorted words."""

    def sort_words(text: str) -> str:
        return "_".join(sorted(re.split("[_-]", text.lower())))

    pairs = ((name.lower(), option), (sort_words(name), sort_words(option)))
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _bad_value(provider: str, option: str, value: str, wanted: str) -> ProviderOptionError:
    return ProviderOptionError(
        f"the {'CUDA' if provider == CUDA else 'TensorRT'} provider's option {option!r} cannot be {value!r}",
        evidence=[f"{option} is {wanted}"],
        fixes=[manual(f"set {option} to {wanted}")],
        provider=provider,
        option=option,
        value=value,
    )


def _malformed(requested: Any, why: str) -> ProviderRequestError:
    return ProviderRequestError(
        f"the providers of this session are malformed: {why}",
        evidence=["a provider is a name, or a tuple of a name and a dict of options"],
        fixes=[manual('write providers=["CUDAExecutionProvider"] or [("CUDAExecutionProvider", {"device_id": "0"})]')],
        requested=requested if _is_plain(requested) else repr(requested),
    )


def _is_plain(value: Any) -> bool:
    """Return True if an error may carry ``value``: a malformed request can be anything, and errors must pickle."""
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bytes, bool, int, float)
