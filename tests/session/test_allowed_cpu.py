"""When the CPU may serve instead of a GPU, that it is said each time, and that a session stays allowed to be there."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from ortgpu.errors import (
    CollectiveOpsUnavailableError,
    CPUExecutionWarning,
    DeviceNotFoundError,
    DriverNotFoundError,
    GPUError,
    LibraryNotFoundError,
    NoDeviceError,
    PlacementError,
    ProviderFallbackError,
    ProviderOptionError,
    ProviderRequestError,
)
from ortgpu.session.allowed_cpu import is_cpu_allowed, warn_of_cpu
from ortgpu.session.request import SessionRequest
from tests.lab.models import Models
from tests.support.children import ROOT, child_environment, run_child, run_python
from tests.support.made_sessions import NEG

PROGRAM = ROOT / "tests" / "programs" / "allowed_cpu.py"


def test_what_the_constructor_was_allowed_stays_allowed(models: Models) -> None:
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = run_child([sys.executable, str(PROGRAM), str(models.relu)], env=env).ok().json
    here = "cpu ['CPUExecutionProvider']"
    assert found == {
        "to cpu": f"{here} 0",
        "to cpu with options": f"{here} 0",
        "to cuda": f"{here} 1",
        "to cuda again": f"{here} 1",
        "to openvino": "ProviderRequestError",
        "pickled": "cpu",
        "copied": "cpu",
        "constructed again": "cpu",
        "explained": str({"Relu 'the_relu'": "the whole session is on the CPU"}),
    }


def allowed(error: GPUError | None = None, **request: Any) -> bool:
    return is_cpu_allowed(SessionRequest("model.onnx", **request), error)


@pytest.mark.parametrize("said", [None, "1", "0"])
def test_the_argument_outweighs_the_variable(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if said is None:
        monkeypatch.delenv("ORTGPU_ALLOW_CPU", raising=False)
    else:
        monkeypatch.setenv("ORTGPU_ALLOW_CPU", said)
    assert allowed(allow_cpu=True)
    assert not allowed(allow_cpu=False)
    assert allowed(allow_cpu=None) is (said == "1")


def test_options_that_keep_the_cpu_out_outweigh_everything() -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    assert not allowed(allow_cpu=True, sess_options=options)


CUDA_IS_GONE = (DriverNotFoundError, NoDeviceError, LibraryNotFoundError, ProviderFallbackError, DeviceNotFoundError)


@pytest.mark.parametrize("error", CUDA_IS_GONE, ids=lambda error: error.__name__)
def test_the_cpu_may_serve_after_a_fault_of_the_machine(error: type[GPUError]) -> None:
    assert allowed(error("it failed"), allow_cpu=True)


@pytest.mark.parametrize("error", [ProviderRequestError, ProviderOptionError, CollectiveOpsUnavailableError])
def test_the_cpu_mends_no_wrong_request(error: type[GPUError]) -> None:
    assert not allowed(error("it failed"), allow_cpu=True)


@pytest.mark.parametrize(
    ("request_", "serves"), [({}, True), ({"cpu_nodes": "forbid"}, False), ({"cuda_graph": True}, False)]
)
def test_the_cpu_serves_no_request_that_keeps_nodes_off_it(request_: dict[str, Any], serves: bool) -> None:
    assert allowed(PlacementError("a plugin"), allow_cpu=True, **request_) is serves


def test_each_session_on_the_cpu_is_warned_of_with_its_cause() -> None:
    error = NoDeviceError("CUDA sees no GPU")
    models: tuple[tuple[Any, str], ...] = (("model.onnx", "model.onnx"), (b"bytes", "<bytes>"))
    for model, name in models:
        with pytest.warns(CPUExecutionWarning, match="CUDA sees no GPU") as issued:
            warn_of_cpu(object(), error, model)
        warning: Any = issued[0].message
        assert (warning.model, warning.error) == (name, error)


def test_a_warning_that_is_hidden_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn_of_cpu(object(), NoDeviceError("CUDA sees no GPU"), "model.onnx")
    (record,) = caplog.records
    assert record.getMessage() == "model.onnx is running on the CPU, as allowed [no-device]: CUDA sees no GPU"


def test_a_model_that_is_damaged_inside_a_node_raises_onnxruntimes_own_error(tmp_path: Path) -> None:
    """Without a GPU, too: the caller has to mend the model, not the machine."""
    at = NEG.index(b"Neg")
    path = tmp_path / "model.onnx"
    path.write_bytes(NEG[: at - 1] + bytes([0x70]) + NEG[at:])  # The length of the name runs past the node.
    env = child_environment({"CUDA_VISIBLE_DEVICES": ""})
    outcome, *_ = run_python("session.opening.counted", str(path), env=env).ok().json
    assert outcome == "InvalidProtobuf"
