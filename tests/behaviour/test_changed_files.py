"""Files of the installed package that somebody changed: harmless where they do their work, the culprit where not."""

from __future__ import annotations

import pytest

from tests.faults.case import H200, MENDED, with_gpus
from tests.lab.fixtures import Lab
from tests.lab.installed import GPU_DISTRIBUTION

CAPI = "onnxruntime/capi"
CLASS = f"{CAPI}/onnxruntime_inference_collection.py"


@pytest.mark.parametrize("pattern", ["_pybind_state.py", "onnxruntime_pybind11_state*.so"])
def test_a_file_that_does_its_work_is_not_the_cause(lab: Lab, pattern: str) -> None:
    """What is missing is the driver. Installing the package again would not bring it."""
    machine = lab.machine()
    path = machine.overlay.path(f"{CAPI}/{pattern}")
    # `patchelf` makes a library longer, and the loader does not mind
    longer = path.read_bytes() + (b"\n# here\n" if path.suffix == ".py" else bytes(4096))
    machine.overlay.replace(f"{CAPI}/{path.name}", longer)
    error = machine.open_session(lab.models.relu).error
    assert error is not None
    assert error.type == MENDED, error.text
    assert GPU_DISTRIBUTION not in error.text.partition("To fix it:")[2].partition("Also found:")[0]


def test_a_file_that_nobody_needs_may_be_missing(lab: Lab) -> None:
    machine = lab.machine()
    machine.overlay.remove(f"{CAPI}/onnxruntime_collect_build_info.py")
    error = machine.open_session(lab.models.relu).error
    assert error is not None
    assert error.type == MENDED, error.text


def test_a_changed_class_that_leaves_the_gpu_is_the_cause(lab: Lab) -> None:
    """The import says nothing of what its methods do. A session that is on the CPU in the end does."""
    machine = lab.machine(**with_gpus(H200))
    text = machine.overlay.path(CLASS).read_text(encoding="utf-8")
    opens = "            self._create_inference_session(providers, provider_options, disabled_optimizers)"
    assert opens in text, "ONNX Runtime's constructor is another one now"
    on_cpu = text.replace(opens, opens.replace("providers, provider_options", "['CPUExecutionProvider'], [{}]"))
    machine.overlay.replace(CLASS, on_cpu.encode())
    error = machine.open_session(lab.models.relu).error
    assert error is not None, "a session on the CPU"
    assert error.type == "BrokenPackageError", error.text
    assert CLASS in error.text
    assert "--force-reinstall" in error.text
