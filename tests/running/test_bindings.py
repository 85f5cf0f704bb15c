"""IOBindings of a session: what fails in them is typed, as it is in the session's own methods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.session.test_running import child

OUTLIVES = (1, 30)  # an IOBinding its session: before that, plain ONNX Runtime crashes too

# The arena of ONNX Runtime is the real one, over libraries of CUDA that compute nothing.
FULL = """
import numpy as np, onnx.parser, onnxruntime
from ortgpu import GPUSession
text = '<ir_version: 8, opset_import: ["": 17]> neg (float[n] x) => (float[n] y) { y = Neg(x) }'
limit = {"gpu_mem_limit": str(64 << 20)}
model = onnx.parser.parse_model(text).SerializeToString()
session = GPUSession(model, providers=[("CUDAExecutionProvider", limit)], pinned_memory_limit=0)
big, small = np.zeros(64 << 20, np.float32), np.zeros(4, np.float32)
value = onnxruntime.OrtValue.ortvalue_from_numpy(big)

def outcome(action):
    try:
        return {"returned": repr(action())}
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "cause": type(error.__cause__).__name__}

def bound(feed):
    binding = session.io_binding()
    binding.bind_cpu_input("x", feed)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0].shape

report({
    "run": outcome(lambda: session.run(None, {"x": big})),
    "bind_cpu_input": outcome(lambda: bound(big)),
    "bind_ortvalue_input": outcome(lambda: session.io_binding().bind_ortvalue_input("x", value)),
    "then": outcome(lambda: bound(small)),
    "wrong": outcome(lambda: session.io_binding().bind_cpu_input("z", small)),
})
"""


@pytest.fixture(scope="module")
def full(module_lab: Lab, provider_library: str) -> Any:
    return module_lab.machine_that_places(provider_library).run(FULL).ok().json


@pytest.mark.parametrize("method", ["run", "bind_cpu_input", "bind_ortvalue_input"])
def test_memory_that_is_full_is_named_where_an_input_is_bound(full: Any, method: str) -> None:
    assert full[method]["type"] == "GPUOutOfMemoryError"
    assert "256 MiB were asked for" in full[method]["text"]
    assert full[method]["cause"] in ("RuntimeError", "Fail")


def test_the_session_works_on(full: Any) -> None:
    assert full["then"] == {"returned": "(4,)"}


def test_a_wrong_name_is_onnxruntimes_own_word(full: Any) -> None:
    assert full["wrong"]["type"] not in ("GPUOutOfMemoryError", "ProviderFailureError")
    assert full["wrong"]["cause"] == "NoneType"


def test_a_sticky_error_of_a_binding_makes_every_session_refuse() -> None:
    found = child("""
        one, other = session(), session()
        binding = one.io_binding()
        class Failing:
            def copy_outputs_to_cpu(self):
                raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")
        binding._iobinding = Failing()
        print(json.dumps([outcome(binding.copy_outputs_to_cpu), outcome(lambda: other.run(None, FEED))]))
    """)
    assert [each["type"] for each in found] == ["PoisonedContextError"] * 2


@pytest.mark.skipif(older_than(OUTLIVES) is not None, reason=str(older_than(OUTLIVES)))
def test_a_binding_does_not_keep_its_session() -> None:
    found = child("""
        import gc, weakref
        made = session()
        binding, gone = made.io_binding(), weakref.ref(made)
        del made
        gc.collect()
        print(json.dumps([gone() is None, isinstance(binding, onnxruntime.IOBinding),
                          outcome(lambda: binding.bind_cpu_input("z", FEED["x"]))["cause"]]))
    """)
    assert found == [True, True, None]
