"""The table of settings, against what the options of ONNX Runtime and the names of a record are known to be."""

from __future__ import annotations

import pytest

from ortgpu.provider.requests import CHOSEN_OPTIONS
from ortgpu.provider.settings import (
    AUTOMATIC,
    CAPTURE,
    FEW_THREADS,
    LIMIT,
    MAP_DEPTH,
    PINNED_MEMORY_LIMIT,
    SESSION_SETTINGS,
    SETTINGS,
    described,
    options_of,
)

# Each value of each setting, written down a second time: records of users name them.
KNOWN = {
    ("layout", "channels-first"): {"prefer_nhwc": "0"},
    ("layout", "channels-last"): {"prefer_nhwc": "1"},
    ("layout", "channels-last, biases fused"): {"prefer_nhwc": "1", "fuse_conv_bias": "1"},
    ("search", "heuristic"): {"cudnn_conv_algo_search": "HEURISTIC"},
    ("search", "exhaustive"): {"cudnn_conv_algo_search": "EXHAUSTIVE"},
    ("workspace", "largest"): {"cudnn_conv_use_max_workspace": "1"},
    ("workspace", "small"): {"cudnn_conv_use_max_workspace": "0"},
    ("cudnn", "on"): {"enable_cudnn": "1"},
    ("cudnn", "off"): {"enable_cudnn": "0"},
    ("threads", "all"): {},
    ("threads", "few"): {"intra_op_num_threads": "4"},
    ("graph", "none"): {},
    ("graph", "captured"): {"enable_cuda_graph": "1"},
    ("shapes", "free"): {},
    ("shapes", "fixed"): {"free_dimension_overrides": "those that were measured"},
    ("precision", "float32"): {},
    ("precision", "float16"): {"float16": "1"},
    ("depth", "four"): {},
    ("depth", "two"): {"map_depth": "2"},
    ("depth", "eight"): {"map_depth": "8"},
    ("staging", "pinned"): {},
    ("staging", "none"): {"map_staging": "0"},
}


@pytest.mark.parametrize(("setting", "options"), KNOWN.items(), ids=lambda each: ": ".join(each))
def test_what_each_setting_asks_for(setting: tuple[str, str], options: dict[str, str]) -> None:
    name, value = setting
    assert options_of({name: value}) == options


def test_the_table_has_no_more_than_these() -> None:
    assert {(name, value) for name, values in SETTINGS.items() for value in values} == set(KNOWN)


def test_the_bias_is_never_fused_alone() -> None:
    """ONNX Runtime 1.31 then makes wrong results: conv.cc clears a buffer on another stream than what fills it."""
    for options in KNOWN.values():
        assert "fuse_conv_bias" not in options or options["prefer_nhwc"] == "1"


def test_what_changes_inputs_or_results_is_not_applied_by_itself() -> None:
    assert set(SETTINGS) - set(AUTOMATIC) == {"graph", "shapes", "precision"}


def test_defaults_that_pages_name() -> None:
    assert (FEW_THREADS, MAP_DEPTH, PINNED_MEMORY_LIMIT) == (4, 4, 2 << 30)
    assert (CAPTURE, LIMIT) == ("enable_cuda_graph", "gpu_mem_limit")
    assert set(SESSION_SETTINGS).isdisjoint(CHOSEN_OPTIONS)


@pytest.mark.parametrize("settings", [{"layout": "diagonal"}, {"colour": "red"}])
def test_a_name_that_is_not_there(settings: dict[str, str]) -> None:
    with pytest.raises(KeyError):
        options_of(settings)


def test_words_for_a_person() -> None:
    assert described({"layout": "channels-last", "search": "heuristic"}) == "layout channels-last, search heuristic"
    assert described({}) == "ONNX Runtime's default settings"
