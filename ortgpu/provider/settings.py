"""The table of settings: the names in a record, and the options of ONNX Runtime that each name sets.

A record holds names of this table alone. Provider options in a record would be a risk for its users: some are
addresses of functions.
"""

from __future__ import annotations

from collections.abc import Mapping

# These names in ``options_chosen`` are no options of a provider.
THREADS = "intra_op_num_threads"  # the session option
DIMENSIONS = "free_dimension_overrides"  # sizes by name, as JSON
FLOAT16 = "float16"  # "1": the model is converted before it is opened
DEPTH = "map_depth"  # concurrent runs of map
STAGING = "map_staging"  # "0": map runs with the arrays of the caller, not with copies in pinned memory
SESSION_SETTINGS = (THREADS, DIMENSIONS, FLOAT16, DEPTH, STAGING)
CAPTURE = "enable_cuda_graph"  # the option of the provider
LIMIT = "gpu_mem_limit"  # the option of the provider: bytes that the arena may hold
ONE_STREAM = "use_ep_level_unified_stream"  # the option of the provider: all runs use one stream and its handles

FEW_THREADS = 4  # three concurrent runs of run_async keep a GPU busy

# Two runs with pinned arrays reach what an H200 can do with batches of 8 and more; batches of 1 gain up to four.
MAP_DEPTH = 4
PINNED_MEMORY_LIMIT = 2 << 30  # bytes, unless the caller passes a limit

Settings = Mapping[str, str]  # values by the names of settings


# cuDNN's DEFAULT is no candidate: on an H200 it took 2.8 to 69 times as long with each of five networks with
# convolutions (2026-11-23), and most of the time of a search.
# fuse_conv_bias never stands alone: ONNX Runtime 1.31 then clears a buffer of the convolution on another stream than
# the stream that fills it (conv.cc), and some results are wrong.
SETTINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "layout": {
        "channels-first": {"prefer_nhwc": "0"},
        "channels-last": {"prefer_nhwc": "1"},
        "channels-last, biases fused": {"prefer_nhwc": "1", "fuse_conv_bias": "1"},
    },
    "search": {name.lower(): {"cudnn_conv_algo_search": name} for name in ("HEURISTIC", "EXHAUSTIVE")},
    "workspace": {
        "largest": {"cudnn_conv_use_max_workspace": "1"},
        "small": {"cudnn_conv_use_max_workspace": "0"},
    },
    "cudnn": {"on": {"enable_cudnn": "1"}, "off": {"enable_cudnn": "0"}},
    "threads": {"all": {}, "few": {THREADS: str(FEW_THREADS)}},
    "graph": {"none": {}, "captured": {CAPTURE: "1"}},
    "shapes": {"free": {}, "fixed": {DIMENSIONS: "those that were measured"}},
    "precision": {"float32": {}, "float16": {FLOAT16: "1"}},
    "depth": {"four": {}, "two": {DEPTH: "2"}, "eight": {DEPTH: "8"}},
    "staging": {"pinned": {}, "none": {STAGING: "0"}},
}

# Settings that change neither inputs, outputs and errors nor the precision. A session applies them by itself. All
# other settings need a record that the caller names.
AUTOMATIC = ("layout", "search", "workspace", "cudnn", "threads", "depth", "staging")


def options_of(settings: Settings) -> dict[str, str]:
    """Return the options for settings: options of the CUDA provider, and options ``SESSION_SETTINGS``.

    Raises:
        KeyError: the table has no such name or value.
    """
    return {option: text for name, value in settings.items() for option, text in SETTINGS[name][value].items()}


def described(settings: Settings) -> str:
    """Return settings as a person reads them: "layout channels-last, search heuristic"."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "ONNX Runtime's default settings"
