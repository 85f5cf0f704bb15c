"""Whether ONNX Runtime knows the opset and the operators of a model, told with and without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from ortgpu.diagnosis.diagnosing import find_problems
from ortgpu.diagnosis.probe.result import ProbeStep
from ortgpu.errors import GPUError
from ortgpu.model.contents import ModelFacts
from ortgpu.provider.requests import CUDA
from tests.lab import Cuda, Machine
from tests.lab.fixtures import Lab
from tests.lab.installed import older_than
from tests.support.made_facts import HEALTHY, all_of, probed, request


def diagnosed(machine: Machine, model: Path, given_as: str = "path") -> list[tuple[str, str, str]]:
    given = f"open({str(model)!r}, 'rb').read()" if given_as == "bytes" else repr(str(model))
    code = f"import ortgpu; problems = ortgpu.diagnose({given}, probe=True).problems; "
    result = machine.run(code + "report([(one.code, one.severity, str(one)) for one in problems])").ok()
    return [(code, severity, text) for code, severity, text in result.json]


def save(path: Path, op_type: str = "Relu", *, opset: int = 17, domain: str = "", ir_version: int = 8) -> Path:
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x"], ["y"], domain=domain)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), str(path))
    return path


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "opset": ({"opset": 99}, "99"),
    "IR version": ({"ir_version": 99}, "99"),
    "operator": ({"op_type": "Reluu"}, "Reluu"),
    "operator of ONNX Runtime": ({"op_type": "Reluu", "domain": "com.microsoft"}, "com.microsoft:Reluu"),
}


@pytest.mark.parametrize("given_as", ["path", "bytes"])
@pytest.mark.parametrize("name", CASES)
def test_without_a_driver_it_is_told_beside_that(lab: Lab, tmp_path: Path, name: str, given_as: str) -> None:
    options, named = CASES[name]
    model = save(tmp_path / "model.onnx", **options)
    found = diagnosed(lab.machine(), model, given_as)
    assert [(code, severity) for code, severity, _ in found] == [
        ("driver-not-found", "fatal"),
        ("provider-error", "fatal"),
    ]
    assert named in found[1][2]
    assert "or use a newer ONNX Runtime" in found[1][2]


def test_beside_a_driver_that_opens_no_session(lab: Lab, tmp_path: Path) -> None:
    machine = lab.machine(cuda=Cuda(init=999))
    found = diagnosed(machine, save(tmp_path / "model.onnx", opset=99))
    assert [code for code, _, _ in found] == ["driver-unusable", "provider-error"]


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, []),
        ({"op_type": "GlobalLpPool"}, []),  # a kernel for the GPU is not looked for where there is none
        ({"op_type": "Own", "domain": "a.library"}, [("provider-error", "warning")]),  # which may be registered
        ({"op_type": "AllReduce", "domain": "com.microsoft"}, [("collective-ops-unavailable", "fatal")]),
    ],
)
def test_what_is_no_fault_or_has_one_of_its_own(
    lab: Lab, tmp_path: Path, options: dict[str, Any], others: list[tuple[str, str]]
) -> None:
    model = save(tmp_path / "model.onnx", **options)
    found = diagnosed(lab.machine(), model)
    assert [each[:2] for each in found if each[0] != "driver-not-found"] == others


def test_a_library_has_the_operators_of_a_domain(lab: Lab, tmp_path: Path) -> None:
    model = save(tmp_path / "model.onnx", op_type="Own", domain="a.library")
    found = diagnosed(lab.machine(), model)
    assert [each[1] for each in found] == ["fatal", "warning"]
    assert "register_custom_ops_library(path)" in found[1][2]
    on_a_gpu = opened_on_a_gpu(refused_by_onnx_runtime(lab.machine(), model))
    assert "a.library:Own" in on_a_gpu.evidence[0]


def refused_by_onnx_runtime(machine: Machine, model: Path) -> str:
    """Its words about a model, as the child of a probe reports them; empty where it opens the model."""
    outcome = machine.open_plain_session(model, providers=["CPUExecutionProvider"])
    return f"{outcome.error.type}: {outcome.error.text}" if outcome.error is not None else ""


def opened_on_a_gpu(said: str) -> GPUError:
    """What is found where a session works, and ONNX Runtime said this of the model."""
    steps = ProbeStep("session", True), ProbeStep("model", False, said)
    (problem,) = find_problems(all_of(request(model=ModelFacts("m.onnx")), probed(*steps))(HEALTHY))
    return problem


@pytest.mark.skipif(older_than((1, 26)) is not None, reason="ONNX Runtime then reads weights wherever they are")
@pytest.mark.parametrize("how", ["a link to another folder", "a folder above", "an absolute path"])
def test_weights_outside_of_the_folder_of_the_model(lab: Lab, tmp_path: Path, how: str) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    other.mkdir()
    folder.mkdir()
    named = {"a folder above": "../other/weights.data", "an absolute path": str(other / "weights.data")}
    model = with_weights_elsewhere(folder, named.get(how, "weights.data"))
    (other / "weights.data").write_bytes(bytes(16))
    if how == "a link to another folder":
        (folder / "weights.data").symlink_to(other / "weights.data")
    machine = lab.machine()
    problem = opened_on_a_gpu(refused_by_onnx_runtime(machine, model))
    assert problem.summary == "the installed ONNX Runtime cannot open this model"
    (folder / "weights.data").unlink(missing_ok=True)
    (folder / "weights.data").write_bytes(bytes(16))
    assert refused_by_onnx_runtime(machine, with_weights_elsewhere(folder, "weights.data")) == ""


def with_weights_elsewhere(folder: Path, location: str) -> Path:
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "graph", values[:1], values[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_a_file_that_is_no_model_is_told_once(lab: Lab, tmp_path: Path) -> None:
    model = tmp_path / "text.onnx"
    model.write_text("not a model", encoding="utf-8")
    found = diagnosed(lab.machine(), model)
    assert [code for code, _, _ in found] == ["driver-not-found", "gpu-error"]


def test_a_model_at_which_the_child_ended() -> None:
    (problem,) = find_problems(probed(died_in="load")(HEALTHY))
    assert (problem.code, problem.summary) == ("provider-error", "reading this model ended the process (SIGSEGV)")


# A model that cannot be read, where the environment is broken too


def _no_graph(path: Path) -> None:
    path.write_bytes(b"\n\x03\n\x01x")


def _cut_short(path: Path) -> None:
    save(path)
    path.write_bytes(path.read_bytes()[:-9])


def _without_its_weights(path: Path) -> None:
    with_weights_elsewhere(path.parent, "weights.data")


BROKEN: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a model", encoding="utf-8"),
    "cut short": _cut_short,
    "no graph": _no_graph,
    "missing weights": _without_its_weights,
}
WAYS = {
    "GPUSession": "GPUSession(model)",
    "with options": "GPUSession(model, onnxruntime.SessionOptions())",
    "pool": "GPUSessionPool(model)",
    "the guard": f"onnxruntime.InferenceSession(model, providers=[{CUDA!r}])",
}
REFUSED = f"""
import onnxruntime, ortgpu, sys
from ortgpu import GPUSession, GPUSessionPool
found = []
def refused(action):
    try:
        action()
    except Exception as error:
        found.append([type(error).__module__, type(error).__name__, str(error)])
for model in sys.argv[1:]:
    if model.endswith("="):
        model = open(model[:-1], "rb").read()
    refused(lambda: onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]))
    with ortgpu.enforce():
        {"; ".join(f"refused(lambda: {way})" for way in WAYS.values())}
report(found)
"""


@pytest.mark.parametrize(
    "broken",
    [
        "no driver",
        pytest.param("a driver that refuses", marks=pytest.mark.slow),
        pytest.param("no library", marks=pytest.mark.slow),
    ],
)
def test_a_broken_model_is_refused_as_plain_onnxruntime_refuses_it(lab: Lab, tmp_path: Path, broken: str) -> None:
    machine = lab.machine(cuda=Cuda(init=999) if broken == "a driver that refuses" else None)
    if broken == "no library":
        machine.overlay.remove("nvidia/*/lib/libcublas.so*")
    models = []
    for name, make in BROKEN.items():
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.onnx"
        make(path)
        models += [str(path)] + ([f"{path}="] if path.is_file() and name != "missing weights" else [])
    found = machine.run(REFUSED, argv=models).ok().json
    assert len(found) == (1 + len(WAYS)) * len(models)
    while found:
        plain, *ours = (found.pop(0) for _ in range(1 + len(WAYS)))
        assert dict.fromkeys(map(tuple, ours)) == {tuple(plain): None}


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("a model", "DriverNotFoundError: the NVIDIA driver's library libcuda.so.1 cannot be loaded"),
        ("a pipe", "GPUError: the model {path} cannot be read"),
    ],
    ids=["a model", "a pipe"],
)
def test_onnxruntime_is_asked_only_about_what_seems_broken(lab: Lab, tmp_path: Path, kind: str, raised: str) -> None:
    """A large model would have to be parsed only to say that there is no driver, and a pipe be waited for."""
    path = tmp_path / "model.onnx"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        save(path)
    code = """
import sys
from ortgpu import GPUSession
from onnxruntime.capi import _pybind_state, onnxruntime_pybind11_state as native
asked = []
for module in (native, _pybind_state):
    module.InferenceSession = lambda *given: asked.append(1)
try:
    GPUSession(sys.argv[1])
except Exception as error:
    report([f"{type(error).__name__}: {str(error).splitlines()[0]}", asked])
"""
    found = lab.machine().run(code, argv=[str(path)], timeout=30).ok().json
    assert found == [raised.format(path=path), []]
