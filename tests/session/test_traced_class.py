"""Something else was put under the name ``onnxruntime.InferenceSession`` before ortgpu is used: tracers do that."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.children import run_python

pytestmark = pytest.mark.lab

PROGRAM = """
import json, warnings
warnings.simplefilter("ignore")
import numpy as np, onnx.parser, onnxruntime
plain = onnxruntime.InferenceSession
onnxruntime.InferenceSession = {put}

import ortgpu

text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) {{ y = Neg(x) }}'
model = onnx.parser.parse_model(text).SerializeToString()
session = ortgpu.GPUSession(model, allow_cpu=True)
unguarded = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
refused = []
with ortgpu.enforce():
    for make in (plain, onnxruntime.InferenceSession):
        try:
            make(model)
        except ortgpu.GPUError as error:
            refused.append(type(error).__name__)
print(json.dumps([
    session.run(None, {{"x": np.ones(2, np.float32)}})[0].tolist(), isinstance(session, plain), refused,
    [record.kind for record in ortgpu.sessions()],
]))
"""


def written_by(program: str, **env: str) -> str:
    return run_python(program, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}).ok().stdout


@pytest.mark.parametrize(
    "put",
    [
        "lambda *given, **named: plain(*given, **named)",
        "__import__('functools').partial(plain)",
        "type('Traced', (plain,), {})",
    ],
    ids=["function", "partial", "subclass"],
)
def test_a_class_that_was_replaced(put: str) -> None:
    result, is_plain, refused, kinds = json.loads(written_by(PROGRAM.format(put=put)).splitlines()[-1])
    assert result == [-1, -1]
    assert is_plain is True
    assert refused in (["DriverNotFoundError"] * 2, ["NoDeviceError"] * 2)
    assert kinds == ["GPUSession", "unguarded"]


# mock makes the function that stands in for `run`, in a namespace of its own without a name.
SPECIFIED = """
import warnings
warnings.simplefilter("ignore")
from unittest import mock
import onnxruntime, ortgpu
from ortgpu.diagnosis.probe.probing import RELU

if {guarded}:
    ortgpu.install()
    make = onnxruntime.InferenceSession
else:
    make = ortgpu.GPUSession
with mock.patch.object(onnxruntime.InferenceSession, "run", autospec=True, return_value=["mocked"]) as run:
    session = make(RELU)
    assert session.run(None, {{}}) == ["mocked"]
run.assert_called_once_with(session, None, {{}}, None)
with mock.patch.object(onnxruntime.InferenceSession, "__init__", autospec=True, side_effect=RuntimeError("mocked")):
    try:
        make(RELU)
    except RuntimeError as error:
        assert str(error) == "mocked", error
    else:
        raise AssertionError("the mock was not called")
"""


@pytest.mark.parametrize("guarded", [False, True], ids=["GPUSession", "guarded"])
def test_methods_that_a_mock_has_the_place_of(guarded: bool) -> None:
    written_by(SPECIFIED.format(guarded=guarded), ORTGPU_ALLOW_CPU="1")
