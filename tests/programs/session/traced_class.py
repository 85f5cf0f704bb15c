"""Programs of ``tests/session/test_traced_class.py``."""

from __future__ import annotations

import json
import sys
import warnings
from unittest import mock

import numpy as np
import onnx.parser
import onnxruntime

warnings.simplefilter("ignore")
plain = onnxruntime.InferenceSession


def replaced() -> None:
    onnxruntime.InferenceSession = eval(sys.argv[1])

    import ortgpu

    text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
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
    print(
        json.dumps(
            [
                session.run(None, {"x": np.ones(2, np.float32)})[0].tolist(),
                isinstance(session, plain),
                refused,
                [record.kind for record in ortgpu.sessions()],
            ]
        )
    )


def mocked() -> None:
    import ortgpu
    from ortgpu.diagnosis.probe.probing import RELU

    if sys.argv[1] == "guarded":
        ortgpu.install()
        make = onnxruntime.InferenceSession
    else:
        make = ortgpu.GPUSession
    with mock.patch.object(onnxruntime.InferenceSession, "run", autospec=True, return_value=["mocked"]) as run:
        session = make(RELU)
        assert session.run(None, {}) == ["mocked"]
    run.assert_called_once_with(session, None, {}, None)
    with mock.patch.object(onnxruntime.InferenceSession, "__init__", autospec=True, side_effect=RuntimeError("mocked")):
        try:
            make(RELU)
        except RuntimeError as error:
            assert str(error) == "mocked", error
        else:
            raise AssertionError("the mock was not called")
