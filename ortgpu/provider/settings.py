"""The table of settings: the names that a record may hold, and what each asks of ONNX Runtime.

A record holds names of this table alone. Provider options would be of use to whoever hands on a record: some are
addresses of functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Names in ``options_chosen`` that are no options of a provider
THREADS = "intra_op_num_threads"  # the session option
DIMENSIONS = "free_dimension_overrides"  # sizes by name, as JSON
FLOAT16 = "float16"  # "1": the model is converted before it is opened
DEPTH = "map_depth"  # runs that map has at work at a time
STAGING = "map_staging"  # "0": map runs with the arrays of the caller, not with copies in pinned memory
OF_THE_SESSION = (THREADS, DIMENSIONS, FLOAT16, DEPTH, STAGING)
CAPTURE = "enable_cuda_graph"  # the option of the provider

FEW_THREADS = 4  # three concurrent runs of run_async, which keep a GPU busy

# Two runs with pinned arrays reach what an H200 can do with batches of 8 and more; batches of 1 gain up to four.
MAP_DEPTH = 4

Settings = Mapping[str, str]  # values by the names of settings


@dataclass(frozen=True, slots=True)
class Effect:
    """What settings ask for.

    Attributes:
        options: of the CUDA provider.
        threads: CPU threads of the session; None is ONNX Runtime's own choice.
        captures: a CUDA graph is captured for each shape of the inputs.
        fixes_shapes: the free dimensions of the inputs get the sizes that were measured.
        is_float16: the model computes in float16, with its inputs and outputs as they were.
        depth: runs that ``map`` has at work at a time; None is its own choice.
        is_staged: ``map`` copies feeds into pinned memory first.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    captures: bool = False
    fixes_shapes: bool = False
    is_float16: bool = False
    depth: int | None = None
    is_staged: bool = True


_AS_IT_IS = Effect()

# cuDNN's DEFAULT is no candidate: on an H200 it took 2.8 to 69 times as long with each of five networks with
# convolutions (benchmarks/results/tuning-h200-2026-11-23-4fba0b2.json has three), and most of the time of a search.
# fuse_conv_bias never stands alone: ONNX Runtime 1.31 then clears a buffer of the convolution on another stream than
# the one that fills it (conv.cc), and some results are wrong.
SETTINGS: Mapping[str, Mapping[str, Effect]] = {
    "layout": {
        "channels-first": Effect({"prefer_nhwc": "0"}),
        "channels-last": Effect({"prefer_nhwc": "1"}),
        "channels-last, biases fused": Effect({"prefer_nhwc": "1", "fuse_conv_bias": "1"}),
    },
    "search": {name.lower(): Effect({"cudnn_conv_algo_search": name}) for name in ("HEURISTIC", "EXHAUSTIVE")},
    "workspace": {
        "largest": Effect({"cudnn_conv_use_max_workspace": "1"}),
        "small": Effect({"cudnn_conv_use_max_workspace": "0"}),
    },
    "cudnn": {"on": Effect({"enable_cudnn": "1"}), "off": Effect({"enable_cudnn": "0"})},
    "threads": {"all": _AS_IT_IS, "few": Effect(threads=FEW_THREADS)},
    "graph": {"none": _AS_IT_IS, "captured": Effect(captures=True)},
    "shapes": {"free": _AS_IT_IS, "fixed": Effect(fixes_shapes=True)},
    "precision": {"float32": _AS_IT_IS, "float16": Effect(is_float16=True)},
    "depth": {"four": _AS_IT_IS, "two": Effect(depth=2), "eight": Effect(depth=8)},
    "staging": {"pinned": _AS_IT_IS, "none": Effect(is_staged=False)},
}

# Settings that change neither inputs, outputs and errors nor the precision. A session applies them by itself; the
# others need a record that its caller names.
AUTOMATIC = ("layout", "search", "workspace", "cudnn", "threads", "depth", "staging")


def effect_of(settings: Settings) -> Effect:
    """Return the joint effect of settings.

    Raises:
        KeyError: the table has no such name or value.
    """
    found = [SETTINGS[name][value] for name, value in settings.items()]
    return Effect(
        {option: value for effect in found for option, value in effect.options.items()},
        next((effect.threads for effect in found if effect.threads is not None), None),
        any(effect.captures for effect in found),
        any(effect.fixes_shapes for effect in found),
        any(effect.is_float16 for effect in found),
        next((effect.depth for effect in found if effect.depth is not None), None),
        all(effect.is_staged for effect in found),
    )


def described(settings: Settings) -> str:
    """Return settings as a person reads them: "layout channels-last, search heuristic"."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "plain ONNX Runtime's own"
