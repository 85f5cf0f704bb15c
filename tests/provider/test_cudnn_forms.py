"""Which forms of an operator need cuDNN: the rules against what was seen on a GPU without the library."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from ortgpu.model.outline import GraphOutline
from ortgpu.provider.cudnn import cudnn_operators, operators_needing_cudnn
from tests.support.cudnn_forms import FORMS, Form

SEEN = json.loads((Path(__file__).parents[1] / "support" / "cudnn_forms.json").read_text(encoding="utf-8"))["forms"]
NEEDS, RUNS = set(SEEN["needs it"]), set(SEEN["runs without"])


def test_every_form_was_tried() -> None:
    assert sorted(form.name for form in FORMS) == sorted(name for names in SEEN.values() for name in names)


@pytest.mark.parametrize("form", [form for form in FORMS if form.name in NEEDS | RUNS], ids=lambda form: form.name)
def test_the_rules_agree_with_the_gpu(form: Form) -> None:
    model, _ = form.model()
    operators = [(form.operator, form.domain)]
    assert operators_needing_cudnn(GraphOutline(model), operators) == ((form.operator,) if form.name in NEEDS else ())


def test_a_form_in_a_branch_or_a_function_counts() -> None:
    inner = helper.make_node("ArgMax", ["x"], ["y"], axis=0)
    outer = helper.make_node("ArgMax", ["x"], ["z"], axis=-1)
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])
    condition = helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    branch = helper.make_graph([inner], "branch", [], [helper.make_empty_tensor_value_info("y")])
    choice = helper.make_node("If", ["c"], ["w"], then_branch=branch, else_branch=branch)
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("z", "w")]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    whole = helper.make_graph([outer, choice], "g", [x, condition], outputs)
    without = helper.make_graph([outer], "g", [x], outputs[:1])
    function = helper.make_function("own", "Most", ["x"], ["y"], [inner], opsets)
    own = helper.make_graph([outer, helper.make_node("Most", ["x"], ["w"], domain="own")], "g", [x], outputs)
    models = [
        helper.make_model(whole, opset_imports=opsets),
        helper.make_model(without, opset_imports=opsets),
        helper.make_model(own, opset_imports=opsets, functions=[function]),
    ]
    needing = [operators_needing_cudnn(GraphOutline(model.SerializeToString()), [("ArgMax", "")]) for model in models]
    assert needing == [("ArgMax",), (), ("ArgMax",)]


@pytest.mark.parametrize(
    ("model", "candidates", "needing"),
    [
        (b"no model", ("ArgMax", "Conv", "ReduceMean"), ("ArgMax", "Conv")),
        (FORMS[0].model()[0], ("ArgMax", "ReduceMean"), ("ArgMax",)),  # which an optimiser may have made
    ],
)
def test_what_a_model_does_not_tell(model: bytes, candidates: tuple[str, ...], needing: tuple[str, ...]) -> None:
    operators = [(name, "") for name in candidates]
    assert cudnn_operators(operators) == candidates
    assert operators_needing_cudnn(GraphOutline(model), operators) == needing
