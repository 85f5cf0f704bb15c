"""Something else was put under the name ``onnxruntime.InferenceSession`` before ortgpu is used: tracers do that."""

from __future__ import annotations

import json

import pytest

from tests.support.children import child_environment, run_python

pytestmark = pytest.mark.lab


def written_by(program: str, *arguments: str, **env: str) -> str:
    return run_python(program, *arguments, env=child_environment({"CUDA_VISIBLE_DEVICES": "", **env})).ok().stdout


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
    result, is_plain, refused, kinds = json.loads(written_by("session.traced_class.replaced", put).splitlines()[-1])
    assert result == [-1, -1]
    assert is_plain is True
    assert refused in (["DriverNotFoundError"] * 2, ["NoDeviceError"] * 2)
    assert kinds == ["GPUSession", "unguarded"]


# mock makes the function that stands in for `run`, in a namespace of its own without a name.


@pytest.mark.parametrize("guarded", [False, True], ids=["GPUSession", "guarded"])
def test_methods_that_a_mock_has_the_place_of(guarded: bool) -> None:
    written_by("session.traced_class.mocked", "guarded" if guarded else "ours", ORTGPU_ALLOW_CPU="1")
