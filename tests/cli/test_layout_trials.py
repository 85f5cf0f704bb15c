"""Which layouts of images a measurement tries with a model, and whose results are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from ortgpu.cli.bench.measuring import (
    TOLERANCE,
    DifferentResultsError,
    check_results,
    find_weights,
    has_convolutions,
    layouts_beside,
    why_untried,
)
from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.session.chosen.choose import LAYOUT_OPTIONS
from ortgpu.session.chosen.layouts import LAYOUTS
from tests.support.networks import CHANNELS, Network

CUDA = "CUDAExecutionProvider"
CHOSEN = {"cudnn_conv_algo_search": ("HEURISTIC", "")}
FIRST, LAST, FUSED = LAYOUTS


def saved(network: Network, path: Path) -> str:
    path.write_bytes(network.model())
    return str(path)


# Which are tried


def test_biases_are_fused_in_no_other_layout() -> None:
    """Alone, that option gives wrong results."""
    for options in LAYOUTS.values():
        assert options["prefer_nhwc"] == "1" or "fuse_conv_bias" not in options


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, (LAST, FUSED)),
        (CHOSEN, (LAST, FUSED)),
        ({**CHOSEN, **LAYOUT_OPTIONS}, (FIRST, LAST)),
        ({"prefer_nhwc": ("1", "")}, (FIRST, FUSED)),
    ],
)
def test_what_the_session_has_already_is_not_tried(
    chosen: dict[str, tuple[str, str]], expected: tuple[str, ...]
) -> None:
    assert layouts_beside(chosen) == expected


def test_only_convolutions_on_the_gpu_count() -> None:
    def placed(operator: str, provider: str) -> Placement:
        return Placement((PlacedNode("n", operator, "", provider, "compute"),))

    assert has_convolutions(placed("Conv", CUDA))
    assert has_convolutions(placed("FusedConv", CUDA))
    assert not has_convolutions(placed("Conv", "CPUExecutionProvider"))
    assert not has_convolutions(placed("MatMul", CUDA))
    assert has_convolutions(Placement((), known=False))


def computed_weights(network: Network) -> None:
    network.add("Conv", "x", network.add("Mul", network.weights(CHANNELS, CHANNELS, 1, 1), network.number(2)))


def _of_the_caller(network: Network) -> None:
    network.inputs.append(("weights", [CHANNELS, CHANNELS, 1, 1]))
    network.add("Conv", "x", "weights")


def _overridable(network: Network) -> None:
    weights = network.weights(CHANNELS, CHANNELS, 1, 1)
    network.inputs.append((weights, [CHANNELS, CHANNELS, 1, 1]))
    network.add("Conv", "x", weights)


def _of_a_constant_node(network: Network) -> None:
    value = onnx.numpy_helper.from_array(np.zeros((CHANNELS, CHANNELS, 1, 1), network.dtype))
    network.add("Conv", "x", network.add("Constant", value=value))


def _in_a_branch(network: Network) -> None:
    inner = Network(1)
    inner.add("Conv", "x", network.weights(CHANNELS, CHANNELS, 1, 1))  # from around it
    inner.inputs.clear()
    branch = onnx.load_from_string(inner.model()).graph
    network.add("If", network.constant(np.array(True)), then_branch=branch, else_branch=branch)


def _transposed(network: Network) -> None:
    network.add("ConvTranspose", "x", network.add("Relu", network.weights(CHANNELS, CHANNELS, 1, 1)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, ("FLOAT",)),
        (computed_weights, ("FLOAT", None)),
        (_of_the_caller, ("FLOAT", None)),
        (_overridable, ("FLOAT", None)),
        (_of_a_constant_node, ("FLOAT", "FLOAT")),
        (_in_a_branch, ("FLOAT",) * 3),
        (_transposed, ("FLOAT", None)),
    ],
)
def test_weights_of_a_model(
    change: Callable[[Network], None] | None, expected: tuple[str | None, ...], tmp_path: Path
) -> None:
    network = Network(0)
    network.conv()
    if change:
        change(network)
    found = find_weights(saved(network, tmp_path / "model.onnx"))
    assert found == expected
    assert (why_untried("channels-last", found) is None) == (None not in expected)


@pytest.mark.parametrize(
    ("dtype", "last", "fused"),
    [
        (np.float32, None, None),
        (np.float16, None, "illegal instruction"),
        (np.float64, "of the type double", "of the type double"),
    ],
)
def test_types_of_weights(dtype: type, last: str | None, fused: str | None, tmp_path: Path) -> None:
    network = Network(0, dtype)
    network.conv()
    weights = find_weights(saved(network, tmp_path / "model.onnx"))
    for layout, expected in (("channels-last", last), ("channels-last, biases fused", fused)):
        why = why_untried(layout, weights)
        assert why is None if expected is None else why is not None and expected in why


def test_every_weight_of_an_old_model_is_an_input_as_well(tmp_path: Path) -> None:
    network = Network(0)
    _overridable(network)
    model = onnx.load_from_string(network.model())
    model.ir_version = 3
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert find_weights(str(path)) == ("FLOAT",)


def test_a_function_does_not_know_its_weights(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
    g (float[1, 1, 4, 4] x) => (y) <float[1, 1, 1, 1] w = {2}> { y = own.layer(x, w) }
    <opset_import: ["": 17], domain: "own"> layer (a, b) => (c) { c = Conv(a, b) }"""
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(text), path)
    assert find_weights(str(path)) == (None,)


# Whose results count


def test_results_within_the_precision_of_tf32() -> None:
    right = np.linspace(-4, 4, 100, dtype=np.float32)
    check_results(["y"], [right], [right + 4 * TOLERANCE * 0.9])
    check_results(["y"], [right.astype(np.float16)], [(right + 4 * TOLERANCE * 0.9).astype(np.float16)])
    odd = np.array([np.nan, np.inf, 1, -np.inf], np.float32)
    for same in (np.zeros(3, np.float32), odd, np.zeros(0), np.arange(3), np.array(["a"], np.object_)):
        check_results(["y"], [same], [same.copy()])


@pytest.mark.parametrize(
    ("right", "other", "why"),
    [
        (np.array([1.0, -4.0]), np.array([1.0, -4.0 * (1 + TOLERANCE) - 0.01]), "by 0.09, and its largest value is 4"),
        (np.zeros(3), np.full(3, 1e-9), "by 1e-09, and its largest value is 0"),
        (np.ones(3, np.float16) * 60000, np.ones(3, np.float16) * -60000, "by 1.2e\\+05"),
        (np.ones(3), np.array([1, 1, np.nan]), "infinities or NaN"),
        (np.array([1, np.inf]), np.array([1, -np.inf]), "infinities or NaN"),
        (np.array([1, np.nan]), np.array([1, 1.0]), "infinities or NaN"),
        (np.arange(3), np.array([0, 2, 2]), "in 1 of 3 values"),
        (np.ones((2, 3)), np.ones((3, 2)), r"has shape \(3, 2\) and type float64, not \(2, 3\) and float64"),
        (np.ones(3), np.ones(3, np.float32), "type float32"),
        ([np.ones(3)], [np.ones(3)], "is no tensor"),
    ],
)
def test_other_results(right: Any, other: Any, why: str) -> None:
    with pytest.raises(DifferentResultsError, match=f"output 'y' .*{why}"):
        check_results(["x", "y"], [np.ones(1), right], [np.ones(1), other])
