"""Which node is where: kinds, refusal, tables; and what a real session records."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortgpu.provider import placement
from ortgpu.provider.cudnn import CUDNN_OPERATORS, cudnn_operators
from ortgpu.provider.options import recording_options
from ortgpu.provider.placement import (
    UNKNOWN,
    PlacedNode,
    Placement,
    cufft_operators,
    format_table,
    kind_of,
    read_placement,
    refusal,
    warning,
)
from ortgpu.provider.requests import CPU, CUDA
from tests.support.children import run_python


def node(op_type: str, provider: str = CUDA, *, name: str = "", domain: str = "") -> PlacedNode:
    return PlacedNode(name, op_type, domain, provider, kind_of(op_type, domain, provider))


# Kinds


@pytest.mark.parametrize("op_type", ["Shape", "Gather", "Concat", "Cast", "Reshape", "Where", "Mul", "NonZero"])
@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_nodes_that_handle_shapes_on_the_cpu(op_type: str, domain: str) -> None:
    assert kind_of(op_type, domain, CPU) == "shape"


@pytest.mark.parametrize(("op_type", "kind"), [("Gather", "compute"), ("Mul", "compute"), ("Shape", "shape")])
def test_the_same_operators_on_the_gpu(op_type: str, kind: str) -> None:
    """There they work on data: all of them have CUDA kernels, and what is small stays on the CPU."""
    assert kind_of(op_type, "", CUDA) == kind


@pytest.mark.parametrize(
    ("op_type", "domain"),
    [
        ("Conv", ""),
        ("MatMul", ""),
        ("NonMaxSuppression", ""),
        ("TopK", ""),
        ("FusedConv", "com.microsoft"),
        ("Gather", "com.example"),
        ("TreeEnsembleClassifier", "ai.onnx.ml"),
        ("shape", ""),
        ("", ""),
    ],
)
def test_nodes_that_compute(op_type: str, domain: str) -> None:
    assert kind_of(op_type, domain, CPU) == kind_of(op_type, domain, CUDA) == "compute"


@pytest.mark.parametrize(
    ("op_type", "domain", "cudnn", "cufft"),
    [
        ("Conv", "", True, False),
        ("Conv", "ai.onnx", True, False),
        ("FusedConv", "com.microsoft", True, False),
        ("Conv", "com.ms.internal.nhwc", True, False),
        ("Conv", "com.example", False, False),
        ("Softmax", "", False, False),
        ("MatMul", "", False, False),
        ("Rfft", "com.microsoft", False, True),
        ("Irfft", "com.microsoft", False, True),
        ("Rfft", "", False, False),
    ],
)
def test_libraries_that_operators_need(op_type: str, domain: str, cudnn: bool, cufft: bool) -> None:
    operators = [(op_type, domain)]
    assert (cudnn_operators(operators), cufft_operators(operators)) == ((op_type,) * cudnn, (op_type,) * cufft)


# Written down here once more: an entry that gets lost in a table would let a model open that cannot run.
ON_CUDNN = {
    "": """Conv ConvTranspose BatchNormalization InstanceNormalization LRN RNN GRU LSTM Einsum MaxPool AveragePool
        GlobalMaxPool GlobalAveragePool ArgMax ArgMin ReduceMin ReduceMax ReduceProd ReduceL1 ReduceL2 ReduceLogSumExp
        ReduceMean ReduceLogSum ReduceSumSquare""",
    "com.microsoft": "FusedConv NhwcConv NhwcFusedConv Attention MultiHeadAttention",
    "com.ms.internal.nhwc": "Conv ConvTranspose BatchNormalization FusedConv",
}


def test_the_tables_have_each_operator_and_no_other() -> None:
    assert {domain: sorted(names) for domain, names in CUDNN_OPERATORS.items()} == {
        domain: sorted(names.split()) for domain, names in ON_CUDNN.items()
    }
    assert {*placement.CONVOLUTIONS} == {"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "NhwcFusedConv"}
    assert cufft_operators([(name, "com.microsoft") for name in ("Rfft", "Irfft", "Gelu")]) == ("Irfft", "Rfft")


def test_operators_of_the_standard_exist() -> None:
    """A misspelt name in the table would silently never match."""
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert CUDNN_OPERATORS[""] <= known


# Placements

MIXED = Placement(
    (
        node("Conv", name="/stem/Conv"),
        node("Relu"),
        node("Relu"),
        node("NonMaxSuppression", CPU, name="nms"),
        node("Shape", CPU),
        node("Gather", CPU),
        node("Gather", CPU),
        node("FusedConv", domain="com.microsoft"),
    )
)


def test_what_a_placement_counts() -> None:
    assert MIXED.by_provider == {CUDA: 4, CPU: 4}
    assert MIXED.cpu_compute_nodes == (MIXED.nodes[3],)
    assert MIXED.operators_on(CUDA) == {"Conv": 1, "Relu": 2, "FusedConv": 1}
    assert MIXED.operators_on("TensorrtExecutionProvider") == {}


def test_rows_are_most_frequent_first_within_a_provider() -> None:
    assert MIXED.rows() == [
        (CUDA, "compute", "Relu", 2),
        (CUDA, "compute", "Conv", 1),
        (CUDA, "compute", "FusedConv", 1),
        (CPU, "shape", "Gather", 2),
        (CPU, "compute", "NonMaxSuppression", 1),
        (CPU, "shape", "Shape", 1),
    ]


def test_a_placement_is_a_table() -> None:
    lines = str(MIXED).splitlines()
    assert lines[0].split() == ["provider", "kind", "operator", "nodes"]
    assert [line.split() for line in lines[1:]] == [[str(cell) for cell in row] for row in MIXED.rows()]
    starts = {line.index("compute") for line in lines[1:] if "compute" in line}
    assert starts == {lines[0].index("kind")}
    assert not any(line.endswith(" ") for line in lines)


def test_an_empty_and_an_unknown_placement() -> None:
    assert (UNKNOWN.known, UNKNOWN.nodes, UNKNOWN.rows(), UNKNOWN.by_provider) == (False, (), [], {})
    assert str(UNKNOWN).startswith("placement unknown")
    assert str(Placement(())).split() == ["provider", "kind", "operator", "nodes"]


def test_names_of_nodes() -> None:
    assert str(MIXED.nodes[0]) == "Conv '/stem/Conv'"
    assert str(MIXED.nodes[1]) == "Relu"
    assert str(MIXED.nodes[-1]) == "com.microsoft:FusedConv"
    assert str(node("Conv", domain="ai.onnx")) == "Conv"


NODES = st.lists(
    st.builds(node, st.sampled_from(["Conv", "Shape", "Gather", "TopK"]), st.sampled_from([CUDA, CPU, "Other"])),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(NODES)
def test_every_node_is_in_one_row(nodes: list[PlacedNode]) -> None:
    placement = Placement(tuple(nodes))
    rows = placement.rows()
    assert sum(count for *_, count in rows) == len(nodes) == sum(placement.by_provider.values())
    assert len({row[:3] for row in rows}) == len(rows)
    providers = list(dict.fromkeys(row[0] for row in rows))
    assert providers == list(placement.by_provider), "the rows of a provider stand together"
    for provider in providers:
        counts = [count for name, _, _, count in rows if name == provider]
        assert counts == sorted(counts, reverse=True)
    assert len(str(placement).splitlines()) == len(rows) + 1
    assert (refusal(placement) is None) == (placement.cpu_compute_nodes == ())


# Tables


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    table = format_table([("a", "bb"), ("ccc", "d"), ("", "eeee")])
    assert table == "a    bb\nccc  d\n     eeee"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["C", "Z"]), max_size=5)] * 3), min_size=1))
def test_any_table_has_a_line_for_each_row(rows: list[tuple[str, str, str]]) -> None:
    lines = format_table(rows).split("\n")
    assert len(lines) == len(rows)
    width = max(len(row[0]) for row in rows) + 2
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(row[0])
        assert line[width:].startswith(row[1])
        assert line.rstrip() == line


# Refusal


def test_shapes_on_the_cpu_are_no_reason_to_refuse() -> None:
    assert refusal(Placement((node("Conv"), node("Shape", CPU), node("Gather", CPU)))) is None
    assert refusal(Placement(())) is None


def test_compute_on_the_cpu_is() -> None:
    found = refusal(MIXED)
    assert found is not None
    assert found.summary == "1 of 8 nodes computes on the CPU: NonMaxSuppression"
    assert found.nodes == (MIXED.nodes[3],)
    assert (
        "NonMaxSuppression 'nms': no CUDA kernel for this operator with these types, attributes and this opset"
        in found.evidence
    )
    assert found.fixes


def test_an_unknown_placement_cannot_be_promised() -> None:
    found = refusal(UNKNOWN)
    assert found is not None
    assert "1.24" in str(found)
    assert found.nodes == ()


def test_nodes_that_are_not_all_recorded_cannot_be_promised() -> None:
    error = refusal(Placement((node("Equal"),), is_whole=False))
    assert error is not None
    assert "1.27" in str(error.evidence)
    assert warning(Placement((node("Equal"),), is_whole=False)) is None


@pytest.mark.parametrize("key", ["session.layer_assignment_settings", "session.resource_cuda_partitioning_settings"])
def test_an_option_that_divides_the_model_is_named(key: str) -> None:
    options = recording_options()
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Relu (x) }'
    session = onnxruntime.InferenceSession(
        onnx.parser.parse_model(text).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    assert [each.divided_by for each in read_placement(session).cpu_compute_nodes] == [None]
    asked: Any = SimpleNamespace(_sess=session._sess, _sess_options=onnxruntime.SessionOptions())
    asked._sess_options.add_session_config_entry(key, "gpu(Neg)")
    (found,) = read_placement(asked).cpu_compute_nodes
    assert found.divided_by == key
    assert f"leave {key} out" in str(refusal(read_placement(asked)))
    assert read_placement(asked, without_options=True).cpu_compute_nodes[0].divided_by is None


def test_a_name_that_is_not_utf8_leaves_the_other_nodes_known() -> None:
    """Otherwise cpu_nodes="warn" would say nothing of such a model, and "forbid" would refuse it on the GPU too."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { [NAME] h = Relu (x) y = Neg (h) }'
    data = onnx.parser.parse_model(text).SerializeToString().replace(b"NAME", b"N\xc4ME")
    found = read_placement(onnxruntime.InferenceSession(data, recording_options(), providers=[CPU]))
    assert sorted((each.op_type, each.name) for each in found.nodes) == [("Neg", ""), ("Relu", "")]


def test_a_warning_has_the_words_of_the_refusal_and_the_placement() -> None:
    error, found = refusal(MIXED), warning(MIXED)
    assert error is not None
    assert found == f"{error.summary}\n{MIXED}"
    assert "NonMaxSuppression" in found
    assert warning(Placement((node("Conv"),))) is None
    assert warning(UNKNOWN) is None
    assert "ONNX Runtime's own format" in str(warning(replace(UNKNOWN, in_own_format=True)))


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("(float[n] x) => (float[n] y) { y = Neg (x) }", True),
        ("(float16[n] x) => (bool[n] y) { y = Equal (x, x) }", False),
        ("(float[n] x) => (float[n] y) { h = Cast <to = 10> (x) i = Neg (h) y = Cast <to = 1> (i) }", False),
        ("(float[n] x) => (float[n] y) <float16[1] w = {1}> { h = CastLike (x, w) y = CastLike (h, x) }", False),
    ],
)
def test_releases_before_127_may_leave_out_nodes_on_16_bit_floats(
    text: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 19]> short {text}').SerializeToString()
    session = onnxruntime.InferenceSession(model, recording_options(), providers=[CPU])
    for release, expected in (((1, 27), True), ((1, 26), is_whole)):
        monkeypatch.setattr(placement, "load_runtime", partial(SimpleNamespace, release=release))
        assert read_placement(session).is_whole is expected


def test_a_refusal_of_very_many_nodes_stays_readable() -> None:
    nodes = tuple(node(f"Op{number % 20}", CPU, name=f"n{number}") for number in range(500))
    found = refusal(Placement(nodes))
    assert found is not None
    assert found.nodes == nodes
    assert found.summary.startswith("500 of 500 nodes compute on the CPU: Op0 (25), ")
    assert len(found.summary) < 200
    assert len(found.evidence) == 13
    assert found.evidence[-1] == "... 500 in all"


# A real session

RECORD = """
import json, sys
import onnxruntime
from ortgpu.provider.placement import read_placement, refusal
from ortgpu.provider.options import RECORDING_KEY
from ortgpu.provider.requests import CPU
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
if sys.argv[2] == "record":
    options.add_session_config_entry(RECORDING_KEY, "1")
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=[CPU])
placement = read_placement(session)
nodes = [[node.name, node.op_type, node.domain, node.provider, node.kind] for node in placement.nodes]
print(json.dumps([placement.known, nodes, refusal(placement) is not None]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product, its shape, and a number taken out of the shape: nodes of both kinds."""
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["product"], name="the_product"),
        helper.make_node("Shape", ["product"], ["shape"], name="the_shape"),
        helper.make_node("Gather", ["shape", "index"], ["rows"], name="the_rows"),
        helper.make_node("Inverse", ["product"], ["inverse"], domain="com.microsoft", name="the_inverse"),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "n"])],
        [
            helper.make_tensor_value_info("inverse", TensorProto.FLOAT, ["n", "n"]),
            helper.make_tensor_value_info("rows", TensorProto.INT64, []),
        ],
        [helper.make_tensor("index", TensorProto.INT64, [], [0])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path_factory.mktemp("placement") / "mixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


def recorded(model: Path, how: str) -> tuple[bool, list[list[str]], bool]:
    known, nodes, refused = json.loads(run_python(RECORD, str(model), how).ok().stdout)
    return known, nodes, refused


def test_what_a_real_session_records(model: Path) -> None:
    import importlib.metadata

    release = tuple(map(int, importlib.metadata.version("onnxruntime-gpu").split(".")[:2]))
    known, nodes, refused = recorded(model, "record")
    assert known == (release >= (1, 24))
    if not known:
        pytest.skip(f"onnxruntime-gpu {release} does not record placements: recording came with 1.24")
    assert sorted(nodes) == [
        ["the_inverse", "Inverse", "com.microsoft", CPU, "compute"],
        ["the_product", "MatMul", "", CPU, "compute"],
        ["the_rows", "Gather", "", CPU, "shape"],
        ["the_shape", "Shape", "", CPU, "shape"],
    ]
    assert refused


def test_a_session_that_recorded_nothing_is_unknown(model: Path) -> None:
    assert recorded(model, "nothing") == (False, [], True)
