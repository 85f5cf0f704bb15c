"""Nodes on the CPU with the operators of shapes that compute on data, told from those that handle shapes.

The installed provider places the nodes, over libraries of CUDA that compute nothing.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from ortgpu.model.data_flow import Key, Places, computing_nodes
from ortgpu.model.outline import GraphOutline
from ortgpu.provider.placement import FOLLOWS, NO_KERNEL
from tests.lab.fixtures import Lab
from tests.support.known_placements import shapes


def made(text: str, opset: int = 17) -> bytes:
    header = f'<ir_version: 8, opset_import: ["": {opset}, "own": 1]>'
    data: bytes = onnx.parser.parse_model(f"{header} {textwrap.dedent(text)}").SerializeToString()
    return data.replace(b"LATIN", b"L\xc4TIN")  # which is not UTF-8


# CUDA has kernels for these operators, and none for these types. What has a name computes on the CPU: "it" for want of
# a kernel, "after" because ONNX Runtime has it follow one that takes a shape.
COMPUTING = {
    "an image compared": """
        g (uint8[n] x, uint8[1] limit) => (uint8[n] y) { [it] c = Greater (x, limit) y = Cast <to = 2> (c) }""",
    "numbers kept within bounds": """
        g (float[n] x, int32 low, int32 high) => (int32[n] y)
        { i = Cast <to = 6> (x) [it] y = Clip (i, low, high) }""",
    "a mask repeated as often as a shape says": """
        g (float[n] x) => (float[m] y)
        {
            zero = Constant <value = float {0}> ()
            mask = Less (x, zero)
            s = Shape (x)
            [it] t = Tile (mask, s)
            [after] y = Cast <to = 1> (t)
        }""",
    "a product": "g (int64[n] x) => (int64[1] y) { h = Neg (x) [it] y = ReduceProd <keepdims = 1> (h) }",
    "behind another that computes there": """
        g (uint8[n] x, uint8[1] limit) => (uint8[n] y) { [first] h = Mod (x, limit) [it] y = Max (h, limit) }""",
    "in a branch": """
        g (uint8[n] x, uint8[1] limit, bool c) => (bool[n] y)
        {
            y = If (c) <
                then_branch = yes () => (bool[n] a) { [it] a = Less (x, limit) },
                else_branch = no () => (bool[n] b) { d = Cast <to = 9> (x) b = Not (d) }
            >
        }""",
    "beside a number from a shape": """
        g (uint8[n] x, float[k] v) => (bool[n] y) { s = Shape (v) t = Cast <to = 2> (s) [it] y = Less (x, t) }""",
    "a type that few kernels have": """
        g (float[n, m] x) => (float[m, n] y)
        { [first] a = Cast <to = 22> (x) [it] b = Transpose (a) [after] y = Cast <to = 1> (b) }""",
    "strings inside": """
        g (float[n] x) => (float[n] y) { [it] s = Cast <to = 8> (x) [after] y = Cast <to = 1> (s) }""",
    "as much as a shape says": """
        g (float[k] v) => (bool[q] y) { s = Shape (v) b = Cast <to = 9> (s) [it] y = Tile (b, s) }""",
    "in a loop, with what it hands on and a shape": """
        g (int64 n, uint8[k] x) => (uint8[k] y)
        {
            c = Constant <value = bool {1}> ()
            y = Loop (n, c, x) <
                body = b (int64 i, bool go, uint8[k] v) => (bool on, uint8[k] w)
                {
                    on = Identity (go)
                    s = Shape (v)
                    t = Cast <to = 2> (s)
                    [it] l = Less (v, t)
                    [after] w = Cast <to = 2> (l)
                }
            >
        }""",
}

# Nodes that cannot be told by their names: how many are on the CPU, and the operator of those that compute
INDISTINCT = {
    "an unnamed twin that handles shapes": (
        """
        g (uint8[n] x, uint8[n] t, float[k] v) => (bool[n] y, bool[1] z)
        { y = Less (x, t) s = Shape (v) z = Less (s, s) }""",
        {"Less"},
    ),
    "a name that is not UTF-8": ("g (uint8[n] x, uint8[1] t) => (bool[n] y) { [LATIN] y = Less (x, t) }", {"Less"}),
    "a twin on the GPU": (
        """
        g (uint8[n] x, float[n] v) => (bool[n] y, bool[n] z) { y = Less (x, x) z = Less (v, v) }""",
        {"Less"},
    ),
    "unnamed twins that cast": (
        """
        g (float8e4m3fnuz[n] x, float[k] v) => (float[n] y, float[1] z)
        { y = Cast <to = 1> (x) s = Shape (v) z = Cast <to = 1> (s) }""",
        {"Cast"},
    ),
    "unnamed, of both kinds, each in its place": (
        """
        g (float[n, m] x) => (float[k] y)
        { s = Shape (x) a = Add (s, s) z = ReduceProd (a) b = Add (x, x) y = Reshape (b, z) }""",
        set(),
    ),
    "a type that few kernels have, on the GPU": (
        """
        g (float8e5m2[n, m] x, int64[1] one) => (float8e5m2[k] y)
        { s = Shape (x) z = Reshape (s, one) p = ReduceProd <keepdims = 1> (z) y = Reshape (x, p) }""",
        set(),
    ),
    "a function of the model": (
        """
        g (uint8[n] x, float[k] v) => (bool[n] y, bool[1] z) { [call] y, z = own.f (x, v) }
        <domain: "own", opset_import: ["": 17]>
        f (a, b) => (c, d)
        { s = Shape (b) t = CastLike (s, a) [inner] c = Less (a, t) [shape] d = Less (s, s) }""",
        {"Less"},
    ),
    "the function of an operator": (
        """
        g (float[n] x, float8e4m3fnuz[1] t) => (float8e4m3fnuz[n] y) { y = CastLike (x, t) }""",
        {"Cast"},
    ),
    "shapes in the function of an operator": (
        """
        g (float[n, 4, k] x, float[4] a, float[4] b) => (float[n, 4, k] y)
        { y = GroupNormalization <num_groups = 2> (x, a, b) }""",
        set(),
    ),
    "shapes in the function of another": (
        """
        g (float[n, m] x, int64[2] s) => (float[p, q] y) { y = CenterCropPad (x, s) }""",
        set(),
    ),
    "nodes in no order": (
        """
        g (uint8[n] x, float[k] v) => (bool[n] y)
        { y = Less (x, d) d = Mod (e, e) s = Shape (v) e = Cast <to = 2> (s) }""",
        {"Less", "Mod"},  # which handles a shape that comes later
    ),
    "a large constant": (
        f"""
        g (float[k] v) => (bool[101] y) <uint8[101] w = {{{", ".join("7" * 101)}}}>
        {{ s = Size (v) t = Cast <to = 2> (s) y = Less (w, t) }}""",
        {"Less"},
    ),
    "a number that is given beside those of a shape": (
        """
        g (int64[1] n, float[k] v, float[m] x) => (float[p] y)
        { s = Shape (v) t = Concat <axis = 0> (n, s) y = Expand (x, t) }""",
        set(),
    ),
}

NEWER = (  # opset 21
    "a type that few kernels have, on the GPU",
    "a type that few kernels have",
    "unnamed twins that cast",
    "the function of an operator",
    "shapes in the function of an operator",
    "shapes in the function of another",
)
FOLLOWED = "a mask repeated as often as a shape says"

# The first of COMPUTING as the error advises
MENDED = made("""
    g (uint8[n] x, uint8[1] limit) => (uint8[n] y)
    { a = Cast <to = 6> (x) b = Cast <to = 6> (limit) c = Greater (a, b) y = Cast <to = 2> (c) }""")

SHAPES = {
    "a shape": shapes(),
    "the number of elements": made("""
        g (float[n, m] x) => (float[k] y)
        {
            s = Shape (x)
            [it] e = ReduceProd <keepdims = 1> (s)
            y = Reshape (x, e)
        }"""),
}

# A model can ask for the CPU: by annotations, as of the second and the third node, or by names
DIVIDED = made("""
    g (float[2, 2] x) => (float[2, 2] y)
    { [first] a = MatMul (x, x) [asked] b = Erf (a) [askedtoo] c = Neg (b) [last] y = MatMul (c, c) }""")


@pytest.fixture(scope="module")
def opened(module_lab: Lab, tmp_path_factory: pytest.TempPathFactory, provider_library: str) -> Any:
    folder = tmp_path_factory.mktemp("models")
    computing = {name: made(text, 21 if name in NEWER else 17) for name, text in COMPUTING.items()}
    computing |= {name: made(text, 21 if name in NEWER else 17) for name, (text, _) in INDISTINCT.items()}
    for name, content in {**computing, **SHAPES, "mended": MENDED}.items():
        (folder / f"{name}.onnx").write_bytes(content)
    model = onnx.load_from_string(DIVIDED)
    for node in model.graph.node[1:3]:
        node.metadata_props.add(key="layer_ann", value="slow")
    onnx.save(model, folder / "divided.onnx")
    machine = module_lab.machine_that_places(provider_library)
    return machine.run_program("model.data_flow.opened", str(folder), FOLLOWED).ok().json


def on_cpu(opened: Any, name: str) -> dict[str, list[str]]:
    return {node: [kind, reason] for node, provider, kind, reason in opened[name][0] if provider.startswith("CPU")}


@pytest.mark.parametrize("name", COMPUTING)
def test_what_computes_without_a_kernel_is_warned_of_and_refused(opened: Any, name: str) -> None:
    computing = sorted(re.findall(r"\[(it|first|after)\]", COMPUTING[name]))
    found = on_cpu(opened, name)
    assert {node: found[node][0] for node in computing} == dict.fromkeys(computing, "compute")
    assert "no CUDA kernel" in found["it"][1]
    _, warnings, refused, _ = opened[name]
    assert len(warnings) == 1
    verb = "computes" if len(computing) == 1 else "compute"
    assert f"{len(computing)} of {len(opened[name][0])} nodes {verb} on the CPU" in warnings[0]
    assert sorted(refused) == computing


@pytest.mark.parametrize("name", INDISTINCT)
def test_nodes_that_cannot_be_told_by_name(opened: Any, name: str) -> None:
    placed, warnings, refused, operators = opened[name]
    assert any(provider.startswith("CPU") for _, provider, _, _ in placed), "nothing was tried"
    assert set(operators) == INDISTINCT[name][1]
    assert bool(warnings) == (refused is not None) == bool(operators)


@pytest.mark.parametrize("name", SHAPES)
def test_what_handles_shapes_is_not(opened: Any, name: str) -> None:
    found = on_cpu(opened, name)
    assert found, "nothing is on the CPU: nothing was tried"
    assert {kind for kind, _ in found.values()} == {"shape"}
    assert opened[name][1:] == [[], None, []]


def test_another_type_puts_the_node_onto_the_gpu(opened: Any) -> None:
    assert "mended" in opened
    assert on_cpu(opened, "mended") == {}
    assert opened["mended"][1:] == [[], None, []]


@pytest.mark.parametrize("key", ["session.layer_assignment_settings", "session.name_based_layer_assignment"])
def test_what_the_model_asks_for_is_said_to_be_asked_for(opened: Any, key: str) -> None:
    placed, refused = opened["divided"][key]
    asks = f"the model asks for it with {key}, or there is no CUDA kernel"
    assert sorted(placed) == [["asked", "compute", asks], ["askedtoo", "compute", asks]]
    assert refused[0] == f"leave {key} out of the session options"
    assert asks in refused[1]
    assert opened["undivided"] == [], "the fix does not mend it"


def test_the_reasons_are_those_of_onnxruntime(opened: Any) -> None:
    assert opened["explained"] == {"it": ["compute", NO_KERNEL], "after": ["compute", FOLLOWS]}
    assert opened["table"].startswith("4 nodes, 2 on the GPU, 1 copy between devices\n")


# As a function


def flow(text: str, *inputs: str, **placed: str) -> set[str]:
    """Names of the nodes that compute. ``placed``: a name, and after it the operator."""
    keys: dict[Key, Places] = {
        (operator, name): Places(int(place == "doubtful"), int(place == "data"))
        for (name, _, operator), place in ((key.partition("_"), place) for key, place in placed.items())
    }
    return {name for _, name in computing_nodes(GraphOutline(made(text)), inputs, keys)}


TWO = "g (int64[n] x) => (int64[n] y) { [a] h = Neg (x) [b] y = Mul (h, x) }"


def test_what_takes_data_computes() -> None:
    assert flow(TWO, "x", a_Neg="data", b_Mul="doubtful") == {"b"}
    assert flow(TWO, "x", a_Neg="doubtful", b_Mul="doubtful") == {"a", "b"}


def test_what_is_not_placed_is_what_it_takes() -> None:
    """It was put together with others."""
    assert flow(TWO, "x", b_Mul="doubtful") == {"b"}
    assert (
        flow("g (int64[n] x) => (int64[1] y) { s = Shape (x) h = Neg (s) [b] y = Abs (h) }", "x", b_Abs="doubtful")
        == set()
    )


def test_what_takes_of_both_computes() -> None:
    """ONNX Runtime's preference does not ask how large an input is. A number that is given can be a part of a shape."""
    text = "g (int64[{size}] x) => (int64[n] y) {{ s = Shape (x) [b] y = Mul (x, s) }}"
    assert flow(text.format(size="n"), "x", b_Mul="doubtful") == {"b"}
    assert flow(text.format(size=101), "x", b_Mul="doubtful") == {"b"}
    assert flow(text.format(size=100), "x", b_Mul="doubtful") == set()


def test_a_constant_is_neither() -> None:
    text = "g (int64[n] x) => (int64[1] y) <int64[1] w = {1}> { s = Shape (x) [b] y = Mul (w, s) [c] z = Abs (w) }"
    assert flow(text, "x", b_Mul="doubtful", c_Abs="doubtful") == set()


def test_nodes_of_one_name_are_one() -> None:
    """Of which of them the placement speaks cannot be told: ONNX Runtime may have removed the other."""
    text = "g (int64[n] x) => (int64[n] y, int64[1] z) { s = Shape (x) y = Neg (x) z = Neg (s) }"
    assert computing_nodes(GraphOutline(made(text)), ["x"], {("Neg", ""): Places(1)}) == frozenset()


@pytest.mark.parametrize("size", ["[k]", ""])
def test_what_a_loop_hands_in_is_what_it_was_given(size: str) -> None:
    text = """
        g (int64 n, bool c, int64SIZE x) => (int64 y)
        {
            y = Loop (n, c, x) <
                body = b (int64 i, bool go, int64 v) => (bool on, int64 w)
                { on = Identity (go) [it] w = Mul (i, v) }
            >
        }"""
    found = flow(text.replace("SIZE", size), "n", "c", "x", it_Mul="doubtful")
    assert found == ({"it"} if size else set())


def test_what_a_loop_hands_on_comes_from_every_turn() -> None:
    text = """
        g (int64 n, bool c, int64[1, 1] x, int64[k, q] z) => (int64[p] y)
        {
            s = Shape (x)
            y = Loop (n, c, s) <
                body = b (int64 i, bool go, int64[p] v) => (bool on, int64[p] w)
                { on = Identity (go) [it] u = Neg (v) [data] w = Reshape (z, u) }
            >
        }"""
    assert flow(text, "n", "c", "x", "z", it_Neg="doubtful", data_Reshape="data") == {"it"}
    assert flow(text.replace("w = Reshape (z, u)", "w = Abs (u)"), "n", "c", "x", "z", it_Neg="doubtful") == set()


def test_of_what_cannot_be_read_nothing_is_known(tmp_path: Path) -> None:
    placed = {("Neg", "a"): Places(1), ("Neg", "b"): Places(0, 1)}
    assert computing_nodes(GraphOutline(b"\x08"), ["x"], placed) == {("Neg", "a")}
    assert computing_nodes(GraphOutline(tmp_path / "none.onnx"), ["x"], placed) == {("Neg", "a")}


def test_of_functions_that_nest_deeper_than_python_calls_nothing_is_known() -> None:
    """ONNX Runtime opens such a model."""
    placed = {("Neg", "a"): Places(1)}
    last = 1200
    call = "f{} (p) => (r) {{ r = own.f{} (p) }}"
    functions = [call.format(number, number + 1) for number in range(last)] + [f"f{last} (p) => (r) {{ r = Neg (p) }}"]
    text = "g (float[n] x) => (float[n] y) { y = own.f0 (x) }"
    for function in functions:
        text += f' <domain: "own", opset_import: ["": 17, "own": 1]> {function}'
    assert computing_nodes(GraphOutline(made(text)), ["x"], placed) == {("Neg", "a")}


# Without ONNX Runtime: the nodes that have a kernel are on the GPU, and "it" is on the CPU.

ON_THE_CPU = re.compile(r"\[(it|first)\] \w+ = (\w+)")


@pytest.mark.parametrize("name", sorted({*COMPUTING} - {"in a branch", "in a loop, with what it hands on and a shape"}))
def test_a_node_with_data_computes(name: str) -> None:
    outline = GraphOutline(made(COMPUTING[name], 21 if name in NEWER else 17))
    inputs = [value.name.decode() for value in outline.graph.inputs]
    placed = {(node.operator.decode(), node.name.decode()): Places(elsewhere=1) for node in outline.graph.nodes}
    on_cpu = {(operator, node): Places(doubtful=1) for node, operator in ON_THE_CPU.findall(COMPUTING[name])}
    assert computing_nodes(outline, inputs, {**placed, **on_cpu}) == set(on_cpu)


def test_a_node_with_shapes_alone_does_not() -> None:
    outline = GraphOutline(SHAPES["the number of elements"])
    placed = {("Shape", ""): Places(elsewhere=1), ("ReduceProd", "it"): Places(doubtful=1)}
    assert not computing_nodes(outline, ["x"], placed)


@pytest.mark.parametrize("operator", ["Tile", "Expand", "Range", "ConstantOfShape"])
def test_as_many_elements_as_a_shape_says_are_no_shape(operator: str) -> None:
    """The shape is on the CPU as the kernel of CUDA takes it, so nothing but its type keeps such a node there."""
    nodes = {
        "Tile": "[it] y = Tile (b, s)",
        "Expand": "[it] y = Expand (b, s)",
        "Range": "e = Size (v) one = Constant <value = int64 {1}> () [it] y = Range (e, e, one)",
        "ConstantOfShape": "[it] y = ConstantOfShape (s)",
    }
    text = (
        f"g (float[k] v) => (int64[q] y) {{ s = Shape (v) b = Constant <value = int64[1] {{1}}> () {nodes[operator]} }}"
    )
    outline = GraphOutline(made(text))
    placed = {("Shape", ""): Places(elsewhere=1), (operator, "it"): Places(doubtful=1)}
    assert computing_nodes(outline, ["v"], placed) == {(operator, "it")}
