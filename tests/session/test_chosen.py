"""The options that suit a model: for which models, releases and requests they are chosen, and when they go again."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import onnxruntime
import pytest

from ortgpu.model.outline import GraphOutline
from ortgpu.provider.cudnn import CUDNN_OPERATORS
from ortgpu.provider.options import RECORDING_KEY
from ortgpu.provider.placement import UNKNOWN, PlacedNode, Placement
from ortgpu.provider.requests import parse
from ortgpu.provider.settings import THREADS
from ortgpu.session.chosen import NO_HANDLES, ON_FEW_THREADS, ON_GPU, WITHOUT_CUDNN, choose, unfit

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
HANDLES = "enable_cudnn"
ABS = "y = Abs(x)"


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)


def outline(nodes: str = ABS, domains: str = '"": 17', functions: str = "") -> GraphOutline:
    head = f"<ir_version: 8, opset_import: [{domains}]> "
    text = f"{head} g (float[n, 4] x) => (float[n, 4] y) {{ {nodes} }} {functions}"
    return GraphOutline(onnx.parser.parse_model(text).SerializeToString())


def chosen(
    nodes: str = ABS, providers: Any = None, options: Any = None, release: tuple[int, ...] = (1, 31), **text: str
) -> set[str]:
    return {*choose(parse(providers, None), options, release, outline(nodes, **text))}


def test_a_small_model_on_the_gpu_needs_neither_handles_nor_many_threads() -> None:
    assert chosen() == {HANDLES, THREADS}
    assert chosen(release=(1, 32)) == {HANDLES, THREADS}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"release": (1, 30)}, set()),
        ({"providers": [(CUDA, {HANDLES: "1"})]}, {THREADS}),
        ({"providers": [(CUDA, {HANDLES: "0"})]}, {THREADS}),
        ({"providers": ["TensorrtExecutionProvider", CUDA]}, set()),
        ({"nodes": "y = Softmax(x)"}, {THREADS}),
        ({"nodes": "a = Abs(x) y = CumSum(a, a)"}, set()),
        ({"nodes": "y = com.microsoft.Gelu(x)", "domains": '"": 17, "com.microsoft": 1'}, set()),
        (
            {
                "nodes": "y = local.Abs(x)",
                "domains": '"": 17, "local": 1',
                "functions": '<domain: "local", opset_import: ["": 17]> Abs (a) => (b) { b = Abs(a) }',
            },
            set(),
        ),
        (
            {
                "domains": '"": 17, "local": 1',
                "functions": '<domain: "local", opset_import: ["": 17]> Other (a) => (b) { b = Abs(a) }',
            },
            set(),
        ),
    ],
)
def test_whatever_else_is_said_is_left_alone(changes: dict[str, Any], expected: set[str]) -> None:
    assert chosen(**changes) == expected


def test_options_of_the_caller_keep_their_threads_and_their_silence() -> None:
    options = onnxruntime.SessionOptions()
    assert chosen(options=options) == {HANDLES}
    options.add_session_config_entry(RECORDING_KEY, "0")
    assert chosen(options=options) == set(), "without a record nothing could verify the choice"


def test_a_machine_of_few_cores_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert chosen() == {HANDLES}


def test_a_model_that_cannot_be_read_gets_nothing() -> None:
    assert choose(parse(None, None), None, (1, 31), GraphOutline(b"no model")) == {}


@pytest.mark.parametrize("operator", sorted(CUDNN_OPERATORS[""]))
def test_no_operator_on_cudnn_goes_without_its_handles(operator: str) -> None:
    assert operator.encode() not in WITHOUT_CUDNN


def test_operators_that_go_without_cudnn_are_on_the_gpu_and_of_the_standard() -> None:
    assert WITHOUT_CUDNN < ON_GPU
    assert {name.decode() for name in ON_GPU} <= {schema.name for schema in onnx.defs.get_all_schemas()}


def placed(*nodes: tuple[str, str]) -> Placement:
    return Placement(tuple(PlacedNode("n", op_type, "", provider, "compute") for op_type, provider in nodes))


CHOICES = {**NO_HANDLES, **ON_FEW_THREADS}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (placed(("Abs", CUDA)), set()),
        (placed(("Abs", CUDA), ("Conv", CUDA)), {HANDLES}),
        (placed(("Abs", CUDA), ("Conv", CPU)), {THREADS}),
        (placed(("Abs", CUDA), ("Unique", CPU)), {THREADS}),
        (UNKNOWN, {HANDLES, THREADS}),
    ],
)
def test_a_choice_goes_where_the_placement_does_not_bear_it(placement: Placement, expected: set[str]) -> None:
    assert unfit(CHOICES, placement) == expected
    assert unfit({}, placement) == set()


def test_few_threads_that_were_measured_stay_wherever_nodes_are() -> None:
    assert unfit({THREADS: ("4", "threads few: took 0.5")}, placed(("Unique", CPU))) == set()
