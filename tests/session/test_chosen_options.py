"""What is asked of ONNX Runtime's CUDA provider when the caller leaves it open, and when CUDA graphs are asked for.

The driver is a stub, so that a device is chosen. ONNX Runtime's constructor is watched, and continues on the CPU,
because the real provider goes no further with a stub driver.
"""

from __future__ import annotations

from typing import Any

import pytest

from ortgpu.provider.placement import PlacedNode, Placement
from ortgpu.provider.runtime import load_runtime
from ortgpu.session.chosen import slow_search
from tests.lab.fixtures import Lab
from tests.lab.installed import PLACES, older_than
from tests.lab.stubs import GPU, Cuda
from tests.support.networks import random_network

WATCHED = "machines session.watched"
SEARCH = "cudnn_conv_algo_search"
WITH_CONV = Placement((PlacedNode("c", "Conv", "", "CUDAExecutionProvider", "compute"),))
WITHOUT = Placement((PlacedNode("m", "MatMul", "", "CUDAExecutionProvider", "compute"),))
NO_HANDLE = {"enable_cudnn": "0"} if load_runtime().release >= (1, 31) else {}  # of cuDNN, for a Relu


def run(lab: Lab, code: str) -> Any:
    machine = lab.machine(cuda=Cuda(devices=(GPU(),)))
    return machine.run_program(code, str(lab.models.relu), behind=WATCHED).ok().json


def test_the_search_for_convolutions_is_heuristic_unless_the_caller_or_a_library_chose(lab: Lab) -> None:
    cuda = "CUDAExecutionProvider"
    alone, beside, chosen, guarded = run(
        lab,
        f"""
found = [ask()[0], ask([({cuda!r}, {{"use_tf32": 0}})])[0], ask([{cuda!r}], [{{{SEARCH!r}: "EXHAUSTIVE"}}])[0]]
given.clear()
with ortgpu.enforce():
    try:
        onnxruntime.InferenceSession(MODEL, providers=[{cuda!r}])
    except ortgpu.GPUError:
        found.append(list(given))
report(found)
""",
    )
    assert alone == [{SEARCH: "HEURISTIC", **NO_HANDLE}]
    assert beside == [{"use_tf32": "0", SEARCH: "HEURISTIC", **NO_HANDLE}]
    assert chosen == [{SEARCH: "EXHAUSTIVE", **NO_HANDLE}]
    assert guarded == [{}]


def test_an_untuned_session_keeps_the_layout_of_images(lab: Lab) -> None:
    """Measuring decides on it, not the looks of a network: channels-last took 0.74 to 1.4 of the time."""
    path = lab.folder / "network.onnx"
    path.write_bytes(random_network(0))
    machine = lab.machine(cuda=Cuda(devices=(GPU(capability=(9, 0)),)))
    assert machine.run_program("report(ask()[0])", str(path), behind=WATCHED).ok().json == [{SEARCH: "HEURISTIC"}]


def test_a_session_on_the_cpu_chose_nothing(lab: Lab) -> None:
    code = "session = ortgpu.GPUSession(MODEL, allow_cpu=True)\nreport(session.options_chosen)"
    assert lab.machine().run(f"MODEL = {str(lab.models.relu)!r}\nimport ortgpu\n{code}").ok().json == {}


def test_a_model_that_cannot_be_captured_is_refused_with_its_nodes(lab: Lab) -> None:
    said = "This session cannot use the graph capture feature as requested by the user  as all compute graph nodes"
    given, error = run(lab, f"refusals.extend([{said!r}] * {1 + bool(NO_HANDLE)})\nreport(ask(cuda_graph=True))")
    assert [options["enable_cuda_graph"] for options in given] == ["1"] * (1 + bool(NO_HANDLE)) + ["0"]
    assert error["type"] == "PlacementError"
    assert any("Relu" in fact for fact in error["evidence"]) == (older_than(PLACES) is None)
    assert any("graph capture feature" in fact for fact in error["evidence"])


def test_capturing_switched_on_and_off_is_refused(lab: Lab) -> None:
    options = [("CUDAExecutionProvider", {"enable_cuda_graph": "0"})]
    given, error = run(lab, f"report(ask({options!r}, cuda_graph=True))")
    assert given == []
    assert error["type"] == "ProviderRequestError"


@pytest.mark.parametrize(
    ("search", "cudnn", "placement", "is_told"),
    [
        ("DEFAULT", "/lib/libcudnn.so.9", WITH_CONV, True),
        ("DEFAULT", "cudnn64_9.dll", WITH_CONV, True),
        ("DEFAULT", "/lib/libcudnn.so.8", WITH_CONV, False),
        ("DEFAULT", None, WITH_CONV, False),
        ("DEFAULT", "/lib/libcudnn.so.9", WITHOUT, False),
        ("HEURISTIC", "/lib/libcudnn.so.9", WITH_CONV, False),
        ("EXHAUSTIVE", "/lib/libcudnn.so.9", WITH_CONV, False),
    ],
)
def test_a_search_that_makes_convolutions_slow_is_told(
    search: str, cudnn: str | None, placement: Placement, is_told: bool
) -> None:
    warning = slow_search({SEARCH: search}, placement, cudnn)
    assert (warning is not None) is is_told
    assert warning is None or "HEURISTIC" in warning
