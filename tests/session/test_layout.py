"""For which models and sessions the layout NHWC is chosen; what it gives is for a GPU to show (gpu/test_layout.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from ortgpu.model.protobuf import length_delimited
from ortgpu.session.chosen.choose import LAYOUT_OPTIONS
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.lab.stubs import GPU, Cuda
from tests.session.test_chosen_options import WATCHED
from tests.support.judged_models import gains_channels_last
from tests.support.networks import CHANNELS, Network, random_network

CUDA = "CUDAExecutionProvider"
chooses = pytest.mark.skipif(older_than((1, 31)) is not None, reason=str(older_than((1, 31))))
CHOSEN = {name: value for name, (value, _) in LAYOUT_OPTIONS.items()}


def model_of(change: Callable[[Network], object], dtype: type = np.float32) -> bytes:
    """Twelve convolutions, and what ``change`` adds after six of them."""
    network = Network(0, dtype)
    for number in range(12):
        network.add("Relu", network.conv())
        if number == 5:
            change(network)
    return network.model()


def nothing(network: Network) -> None:
    pass


@pytest.mark.parametrize("number", range(6))
def test_networks_of_convolutions_gain(number: int) -> None:
    assert gains_channels_last(random_network(number))


def _depthwise(network: Network) -> None:
    network.conv(group=CHANNELS)


def _narrow_groups(network: Network) -> None:
    network.conv(group=CHANNELS // 2)


def _transposed(network: Network) -> None:
    network.add("Transpose", network.current, perm=[0, 1, 3, 2])


def _flattened(network: Network) -> None:
    network.add("Reshape", network.current, network.constant(np.array([0, CHANNELS, 24, 24])))


def _of_another_domain(network: Network) -> None:
    network.add("Relu", network.current, domain="com.example")


def _asymmetric(network: Network) -> None:
    network.conv(pads=[0, 0, 2, 2])


def _pooled_asymmetrically(network: Network) -> None:
    network.add("MaxPool", network.current, kernel_shape=[3, 3], pads=[0, 0, 2, 2])


def _automatically_padded(network: Network) -> None:
    network.add("Conv", network.current, network.weights(CHANNELS, CHANNELS, 3, 3), auto_pad="SAME_UPPER")


def _to_an_odd_number_of_channels(network: Network) -> None:
    network.add("Conv", network.current, network.weights(21, CHANNELS, 1, 1))
    network.current = "x"


def _from_an_odd_number_of_channels(network: Network) -> None:
    bounds = [network.constant(np.array([bound])) for bound in (0, 5, 1)]
    network.conv(network.add("Slice", network.current, *bounds), inside=5)


def _resized_smoothly(network: Network) -> None:
    network.add("Resize", network.current, "", network.constant(np.array([1, 1, 2, 2], np.float32)), mode="linear")


def _shared_with_a_depthwise_one(network: Network) -> None:
    weights = network.weights(CHANNELS, 1, 3, 3)
    network.add("Conv", network.current, weights, pads=[1] * 4, group=CHANNELS)
    channel = network.add("Slice", network.current, *(network.constant(np.array([bound])) for bound in (0, 1, 1)))
    network.add("Conv", channel, weights, pads=[1] * 4)


def computed_weights(network: Network) -> None:
    weights = network.add("Mul", network.weights(CHANNELS, CHANNELS, 1, 1), network.number(2))
    network.add("Conv", "x", weights, network.weights(CHANNELS), kernel_shape=[1, 1])


def _weights_of_the_caller(network: Network) -> None:
    network.inputs.append(("weights", [CHANNELS, CHANNELS, 1, 1]))
    network.add("Conv", network.current, "weights", network.weights(CHANNELS), kernel_shape=[1, 1])


def _overridable_weights(network: Network) -> None:
    """As models of before version 4 have all of theirs: an initializer that is an input as well."""
    weights = network.weights(CHANNELS, CHANNELS, 1, 1)
    network.inputs.append((weights, [CHANNELS, CHANNELS, 1, 1]))
    network.add("Conv", network.current, weights, network.weights(CHANNELS), kernel_shape=[1, 1])


@pytest.mark.parametrize(
    "change",
    [
        _depthwise,
        _narrow_groups,
        _transposed,
        _flattened,
        _of_another_domain,
        _asymmetric,
        _pooled_asymmetrically,
        _automatically_padded,
        _to_an_odd_number_of_channels,
        _from_an_odd_number_of_channels,
        _resized_smoothly,
        _shared_with_a_depthwise_one,
        computed_weights,
        _weights_of_the_caller,
        _overridable_weights,
    ],
)
def test_networks_that_lose_or_fail_keep_the_layout(change: Callable[[Network], object]) -> None:
    assert gains_channels_last(model_of(nothing))
    assert not gains_channels_last(model_of(change))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_numbers_keep_the_layout(dtype: type) -> None:
    assert not gains_channels_last(model_of(nothing, dtype))


def test_few_convolutions_keep_the_layout() -> None:
    network = Network(0)
    for _ in range(7):
        network.conv()
    assert not gains_channels_last(network.model())
    network.conv()
    assert gains_channels_last(network.model())


def test_pictures_have_three_channels() -> None:
    network = Network(0)
    network.inputs[0] = ("x", ["batch", 3, 24, 24])
    network.conv(inside=3)
    for _ in range(8):
        network.conv()
    assert gains_channels_last(network.model())


def test_shapes_of_weights_say_what_nodes_do_not() -> None:
    """Of kernels whose size the node leaves out, and of convolutions that are not of images."""
    for rank, gains in ((1, False), (2, True)):
        network = Network(0)
        for _ in range(8):
            weights = network.weights(CHANNELS, CHANNELS, *[3] * rank)
            network.add("Conv", network.current, weights)
        assert gains_channels_last(network.model()) == gains


def test_what_is_no_model_is_left_to_onnx_runtime(tmp_path: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.touch()
    for model in (empty, tmp_path, tmp_path / "absent.onnx", b"", b"\xff" * 40, bytes(range(256))):
        assert not gains_channels_last(model)


def test_a_model_that_was_cut_short_never_raises() -> None:
    whole = onnx.load_from_string(random_network(0))
    for initializer in whole.graph.initializer:
        initializer.raw_data = initializer.raw_data[:8]  # a short file has as many places to cut as it has bytes
    data = whole.SerializeToString()
    assert gains_channels_last(data)
    random = np.random.default_rng(0)
    for cut in range(0, len(data), 3):
        gains_channels_last(data[:cut])
    for at in range(0, len(data), 3):
        gains_channels_last(data[:at] + random.bytes(2) + data[at + 2 :])


@pytest.mark.parametrize("many", ["nodes", "initializers", "values"])
def test_a_model_of_very_many_parts_is_not_read_to_its_end(many: str) -> None:
    """Reading it would take longer than what is gained."""
    model = onnx.load_from_string(random_network(0))
    node, graph = model.graph.node[-1], model.graph
    if many == "nodes":
        graph.node.extend(helper.make_node("Relu", node.output, [f"more{number}"]) for number in range(50_000))
    elif many == "initializers":
        graph.initializer.extend(helper.make_tensor(f"more{number}", 1, [1], [0]) for number in range(50_000))
    data = model.SerializeToString()
    if many == "values":
        # Of an initializer, each with a tag of its own: 50,000 times 1.0 in field 4, as no list but one by one.
        tensor = b"\x08\x01\x10\x01" + b"\x25\x00\x00\x80\x3f" * 50_000
        with_it = graph.SerializeToString() + length_delimited(5, tensor) * 3
        model.ClearField("graph")
        data = model.SerializeToString() + length_delimited(7, with_it)
    assert not gains_channels_last(data)


def test_a_file_reads_as_its_bytes_do(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(random_network(0))
    assert gains_channels_last(path)
    assert gains_channels_last(str(path))


# What sessions ask for


def asked(lab: Lab, capability: tuple[int, int], code: str, tmp_path: Path) -> list[dict[str, str]]:
    """The options of the CUDA provider with which ONNX Runtime's constructor was called."""
    path = tmp_path / "network.onnx"
    path.write_bytes(random_network(0))
    machine = lab.machine(cuda=Cuda(devices=(GPU(capability=capability),)))
    found: list[dict[str, str]] = machine.run(f"MODEL = {str(path)!r}\n{WATCHED}\n{code}").ok().json
    return found


@chooses
def test_it_is_chosen_where_it_was_measured(lab: Lab, tmp_path: Path) -> None:
    (options,) = asked(lab, (9, 0), "report(ask()[0])", tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC", **CHOSEN}


def test_another_gpu_keeps_the_layout(lab: Lab, tmp_path: Path) -> None:
    (options,) = asked(lab, (8, 0), "report(ask()[0])", tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC"}


@pytest.mark.parametrize("option", [{"prefer_nhwc": "0"}, {"use_tf32": "0"}, {"cudnn_conv_algo_search": "EXHAUSTIVE"}])
def test_a_caller_who_chose_keeps_the_layout(lab: Lab, tmp_path: Path, option: dict[str, str]) -> None:
    (options,) = asked(lab, (9, 0), f"report(ask([({CUDA!r}, {option!r})])[0])", tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC", **option}


@chooses
def test_options_that_say_nothing_of_convolutions_change_nothing(lab: Lab, tmp_path: Path) -> None:
    (options,) = asked(lab, (9, 0), f"report(ask([({CUDA!r}, {{'gpu_mem_limit': 2 << 30}})])[0])", tmp_path)
    assert options.items() >= CHOSEN.items()


@pytest.mark.parametrize(
    "setting",
    [
        "options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC",
        "options.optimized_model_filepath = 'kept.onnx'",
        "options.add_session_config_entry('session.disable_prepacking', '1')",
        "options.add_session_config_entry('optimization.disable_specified_optimizers', 'ConvActivationFusion')",
    ],
)
def test_session_options_that_say_what_the_graph_is_to_be(lab: Lab, tmp_path: Path, setting: str) -> None:
    code = f"options = onnxruntime.SessionOptions()\n{setting}\n"
    code += "try:\n    ortgpu.GPUSession(MODEL, options)\nexcept ortgpu.GPUError:\n    report(given)"
    (options,) = asked(lab, (9, 0), code, tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC"}


def test_arguments_that_say_what_the_graph_is_to_be(lab: Lab, tmp_path: Path) -> None:
    (options,) = asked(lab, (9, 0), "report(ask(disabled_optimizers=['ConvActivationFusion'])[0])", tmp_path)
    assert options == {"cudnn_conv_algo_search": "HEURISTIC"}


@chooses
def test_a_session_that_does_not_open_with_it_opens_without(lab: Lab, tmp_path: Path) -> None:
    code = "refusals.append('no kernel for this')\nreport(ask()[0])"
    first, second = asked(lab, (9, 0), code, tmp_path)
    assert first.items() >= CHOSEN.items()
    assert second == {"cudnn_conv_algo_search": "HEURISTIC"}
