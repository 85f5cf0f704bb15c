"""What is verified once ONNX Runtime has opened a session: its providers, its GPU, the nodes on the CPU."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import onnx
import pytest

from ortgpu.environment.gpu.cuda import CudaDevice, CudaState
from ortgpu.errors import GPUError, PlacementError, ProviderFallbackError
from ortgpu.provider.placement import CPUNodesWarning, PlacedNode, Placement
from ortgpu.provider.requests import CPUNodes, ProviderList
from ortgpu.running.onnxruntimes import InferenceSession
from ortgpu.session import opening
from ortgpu.session.plan import Plan
from ortgpu.session.request import SessionRequest
from tests.lab.fixtures import Lab
from tests.support.children import child_environment, run_python

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
GPUS = tuple(
    CudaDevice(number, f"GPU-{number}", f"NVIDIA {name}", capability, memory, 0)
    for number, (name, capability, memory) in enumerate([("H200", (9, 0), 141 << 30), ("L4", (8, 9), 24 << 30)])
)
ON_CPU = Placement((PlacedNode("a", "Unique", "", CPU, "compute"), PlacedNode("b", "Relu", "", CUDA, "compute")))
SHAPES_ON_CPU = Placement((PlacedNode("a", "Gather", "", CPU, "shape"), PlacedNode("b", "Relu", "", CUDA, "compute")))


class Bound(InferenceSession):  # type: ignore[misc]  # ONNX Runtime ships no types
    """An open session as ONNX Runtime reports it: what a C++ session would answer."""

    def __init__(self, providers: list[str], options: dict[str, dict[str, str]]) -> None:
        self._providers, self._provider_options = providers, options


class Driver:
    """The diagnosis's context of an opening on a machine with two different GPUs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def ask_driver(self) -> CudaState:
        return CudaState(0, None, 1)  # which lists no devices, so nobody asks for a context

    def diagnose(self, cause: BaseException | None = None) -> GPUError:
        return ProviderFallbackError("no cause found", bound=())


def verified(bound: list[str], ordinal: str, *, planned: int = 0, **changes: Any) -> Plan:
    request = SessionRequest("model.onnx", **changes)
    plan = Plan(request, ProviderList((CUDA, CPU)), device=planned, gpu=GPUS[planned])
    session = Bound(bound, {CUDA: {"device_id": ordinal}, CPU: {}})
    return opening._verified_plan(cast(Any, session), plan, cast(Any, Driver(plan)))


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_session_on_the_gpu_that_was_asked_for_holds(ordinal: int) -> None:
    assert verified([CUDA, CPU], str(ordinal), planned=ordinal).gpu == GPUS[ordinal]


@pytest.mark.parametrize(("asked", "bound"), [(0, 1), (1, 0)])
def test_a_session_on_another_gpu_than_asked_for_is_refused(asked: int, bound: int) -> None:
    with pytest.raises(ProviderFallbackError, match=f"bound cuda:{bound} and cuda:{asked} was asked for"):
        verified([CUDA, CPU], str(bound), planned=asked)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("bound", [[CPU], [CPU, CUDA], ["DmlExecutionProvider", CPU]])
def test_a_session_without_cuda_before_the_cpu_is_refused(bound: list[str], guarded: bool) -> None:
    with pytest.raises(ProviderFallbackError):
        verified(bound, "0", is_guarded=guarded)


def checked_nodes(placement: Placement, cpu_nodes: CPUNodes) -> list[str]:
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        opening._check_cpu_nodes(cast(Any, object()), placement, cpu_nodes)
    assert all(each.category is CPUNodesWarning for each in issued)
    return [str(each.message) for each in issued]


def test_nodes_that_compute_on_the_cpu_are_warned_of() -> None:
    (text,) = checked_nodes(ON_CPU, "warn")
    assert "Unique" in text
    assert checked_nodes(ON_CPU, "allow") == []
    with pytest.raises(PlacementError):
        checked_nodes(ON_CPU, "forbid")


@pytest.mark.parametrize("cpu_nodes", ["warn", "allow", "forbid"])
def test_nodes_that_handle_shapes_may_be_on_the_cpu(cpu_nodes: CPUNodes) -> None:
    assert checked_nodes(SHAPES_ON_CPU, cpu_nodes) == []


# Counts of what an opening costs, by an audit hook and a profiler in all threads. Only calls of ortgpu count.
COUNTED = """
import os, sys, threading, warnings
from ortgpu import GPUSession
warnings.simplefilter("ignore")
path, entered, opened = sys.argv[1], set(), []

def note_opening(event, arguments):
    if event == "open" and arguments[0] == path:
        opened.append(arguments[1])

def note_call(frame, event, _):
    code = frame.f_code
    if event == "call" and f"{os.sep}ortgpu{os.sep}" in code.co_filename and code.co_name != "<module>":
        entered.add(code)

sys.addaudithook(note_opening)
outcome = "opened"
threading.setprofile(note_call)
sys.setprofile(note_call)
try:
    session = GPUSession(path)
except Exception as error:
    outcome = type(error).__name__
finally:
    sys.setprofile(None)
    threading.setprofile(None)
report([outcome, len(opened), len(entered)])
"""


def save_model(path: Path, reshapes: int) -> str:
    """Save a chain of reshapes to computed shapes. Only the form of its last node says if that needs cuDNN."""
    nodes, x = "", "x"
    for number in range(reshapes):
        nodes += f"s{number} = Shape ({x}) g{number} = Gather (s{number}, zero) "
        nodes += f"c{number} = Concat <axis = 0> (g{number}, rest) y{number} = Reshape ({x}, c{number}) "
        x = f"y{number}"
    constants = "<int64[1] zero = {0}, int64[1] rest = {-1}>"
    text = f"g (float[n, 4] x) => (int64[1, m] y) {constants} {{ {nodes} y = ArgMax <axis = -1> ({x}) }}"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}').SerializeToString())
    return str(path)


@pytest.mark.parametrize("reshapes", [1, 200])
def test_a_session_opens_its_model_once(lab: Lab, provider_library: str, tmp_path: Path, reshapes: int) -> None:
    """Also where the outline stops at first, since the model is large, and the placement asks for the rest of it."""
    machine = lab.machine_that_places(provider_library)
    outcome, openings, _ = machine.run(COUNTED, argv=[save_model(tmp_path / "model.onnx", reshapes)]).ok().json
    assert (outcome, openings) == ("opened", 1)


@pytest.mark.parametrize("reshapes", [1, 200])
def test_a_session_that_does_not_open_opens_its_model_once(lab: Lab, tmp_path: Path, reshapes: int) -> None:
    path = save_model(tmp_path / "model.onnx", reshapes)
    outcome, openings, _ = lab.machine().run(COUNTED, argv=[path]).ok().json
    assert (outcome, openings) == ("DriverNotFoundError", 1)


def test_a_session_without_a_gpu_opens_its_model_once(tmp_path: Path) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    program = f"from tests.support import children\nreport = lambda value: children.report('json', value)\n{COUNTED}"
    outcome, openings, _ = run_python(program, save_model(tmp_path / "model.onnx", 1), env=env).ok().json
    assert outcome in ("DriverNotFoundError", "NoDeviceError")
    assert openings == 1
