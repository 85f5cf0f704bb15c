"""What an opening costs: how often it opens the file of the model, and how many functions a failed one enters."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.lab.fixtures import Lab
from tests.support.children import child_environment, run_python

MOST_FUNCTIONS = 640  # entered by a failed open until its exception, comprehensions and class bodies counted

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
    outcome, openings, functions = run_python(program, save_model(tmp_path / "model.onnx", 1), env=env).ok().json
    assert outcome in ("DriverNotFoundError", "NoDeviceError")
    assert openings == 1
    assert functions <= MOST_FUNCTIONS
